"""Micro-batches under a token budget: their rows, and the layout of these.

A sequence is prompt + response without its last token, which nothing is predicted from. Sequences are never cut.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.learner.packing.attention import Gather, PackedLayout, make_layout
from creditgraph.components.learner.packing.prefix import bags, overlaps, paths, without_last, worthwhile
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.jagged import Jagged


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedBatch:
    """Model input for some rows.

    Attributes:
        input_ids, position_ids: int64 [1, tokens].
        layout: layout of the sequences.
        predict: int64 [pairs], place in the hidden states that predicts each pair's token.
        next_tokens: int64 [pairs], the tokens predicted; or [pairs, 1 + k], each followed by k candidates that could
            stand in its place. With shared prefixes a response token that several rows share is one pair (with
            candidates, which are the row's own, it is not), and the last token of a prefix predicts a different token
            for each continuation: one pair for each.
        bags: for each place in the hidden states, the pairs it predicts; None without shared prefixes.
        targets: Jagged int64, the response tokens of the rows.
        spread: int64 [targets], the pair of each response token; None when they are the same.
        tokens: number of computed tokens.
        saved: number of tokens that were not computed because another row computes them.
        experts: int16 [tokens, layers × experts per token], those to compute with; −1 where the router chooses; None
            where it always does. On the CPU: a pipeline holds all micro-batches of a step.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: PackedLayout
    predict: Tensor
    next_tokens: Tensor
    bags: tuple[Tensor, Tensor] | None = None
    targets: Jagged
    spread: Tensor | None = None
    tokens: int
    saved: int = 0
    experts: Tensor | None = None

    def predicting(self, hidden: Tensor) -> Tensor:
        """Hidden states [pairs, D] at the places that predict, from those [tokens, D] of all places."""
        if self.bags is None:
            return hidden.index_select(0, self.predict)
        gather: Any = Gather.apply
        out: Tensor = gather(hidden, self.predict, *self.bags)
        return out

    def by_row(self, logprobs: Tensor, entropies: Tensor) -> tuple[Jagged, Jagged]:
        """Values of pairs as rows of response tokens; with candidates, 1 + k log-probs of each, one after the other."""
        if self.spread is not None:
            logprobs = logprobs.index_select(0, self.spread)
            entropies = entropies.index_select(0, self.spread)
        width = self.next_tokens.shape[1] if self.next_tokens.dim() == 2 else 1
        return Jagged(logprobs.flatten(), self.targets.offsets * width), self.targets.with_values(entropies)


def check_rows(prompt: Jagged, response: Jagged, max_context: int) -> None:
    """Raises DataError for a row the model does not support: a response without a prompt, or too many tokens."""
    empty = (prompt.lengths == 0) & (response.lengths > 0)
    if bool(empty.any()):
        raise DataError(
            f"learner: row {int(empty.nonzero()[0])} has an empty prompt; the first response token needs at least one "
            "token before it. Give the prompt a BOS token."
        )
    lengths = prompt.lengths + response.lengths
    if len(lengths) and max_context and int(lengths.max()) > max_context:
        row = int(lengths.argmax())
        raise DataError(
            f"learner: row {row} has {int(lengths[row])} tokens (prompt {int(prompt.lengths[row])}, response "
            f"{int(response.lengths[row])}), but the model's context is {max_context}; lower the sampler's max_tokens "
            "or raise model.max_context."
        )


def plan(lengths: Tensor, budget: int) -> list[Tensor]:
    """Cuts rows into micro-batches of at most `budget` tokens.

    Rows are sorted by length, so those of a micro-batch are of similar length. Rows of length 0 are left out; a row
    longer than the budget gets its own micro-batch.

    Args:
        lengths: int64 [rows].
        budget: tokens per micro-batch; 0 puts all rows in one.

    Returns:
        int64 row indices per micro-batch; every row of positive length is in exactly one.
    """
    order = torch.argsort(lengths, stable=True)
    sizes = lengths[order].tolist()
    first = next((i for i, n in enumerate(sizes) if n > 0), len(sizes))
    cuts = []
    start = first
    used = 0
    for i in range(first, len(sizes)):
        if budget and i > start and used + sizes[i] > budget:
            cuts.append(order[start:i])
            start = i
            used = 0
        used += sizes[i]
    if start < len(sizes):
        cuts.append(order[start:])
    return cuts


def pack(
    prompt: Jagged,
    response: Jagged,
    index: Tensor,
    share: bool = False,
    candidates: Tensor | None = None,
    experts: Tensor | None = None,
) -> PackedBatch:
    """Lays out the rows `index`, each with a non-empty prompt and response, end to end.

    Args:
        prompt, response: token rows.
        index: int64, the rows to take.
        share: whether to compute the common prefix of each row and the previous one in `index` only once; saves most in
            the order of `Sorted`.
        candidates: optional int64 [response tokens of these rows, k], further tokens to score in the place of each.
        experts: optional int16 [tokens of these rows but their last, n], see `PackedBatch`; a token that several rows
            share gets those of the first.
    """
    prompts = prompt.select(index)
    targets = response.select(index).to(torch.int64)
    whole = prompts.join(targets)
    if share:
        overlap = overlaps(whole)
        inputs_overlap = worthwhile(without_last(overlap, whole.lengths), whole.lengths - 1)
        if bool(inputs_overlap.any()):
            return _pack_shared(prompts, targets, whole, overlap, inputs_overlap, candidates, experts)
    inputs = whole.slice_rows(torch.zeros_like(whole.lengths), whole.lengths - 1)
    # Response token t of a row with P prompt tokens is predicted at place P + t − 1.
    before = (prompts.lengths - 1)[targets.row_ids] + targets.positions
    return PackedBatch(
        input_ids=inputs.values.long()[None],
        position_ids=inputs.positions[None],
        layout=make_layout(inputs.lengths),
        predict=inputs.offsets[:-1][targets.row_ids] + before,
        next_tokens=_with(targets.values, candidates),
        targets=targets,
        tokens=len(inputs.values),
        experts=experts,
    )


def _with(tokens: Tensor, candidates: Tensor | None) -> Tensor:
    return tokens if candidates is None else torch.cat([tokens[:, None], candidates], 1)


def filler(device: str) -> PackedBatch:
    """A micro-batch of one input token, for a rank that must take part in a pass without rows of its own."""
    token = Jagged.from_rows([[0]], torch.int64).to(device)
    return pack(token, token, torch.zeros(1, dtype=torch.int64, device=device))


def _pack_shared(
    prompts: Jagged,
    targets: Jagged,
    whole: Jagged,
    overlap: Tensor,
    inputs_overlap: Tensor,
    candidates: Tensor | None,
    experts: Tensor | None,
) -> PackedBatch:
    # Two trees: that of inputs (rows without their last token), whose nodes are computed, and that of whole rows, whose
    # nodes are the distinct (path, next token) pairs. `own` tokens of each input row are computed for it.
    lengths = whole.lengths - 1
    keys = paths(inputs_overlap, lengths)
    own = lengths - inputs_overlap
    computed = whole.slice_rows(inputs_overlap, lengths)
    places = computed.positions + inputs_overlap[computed.row_ids]

    at = prompts.lengths[targets.row_ids] + targets.positions
    predict = keys.values[keys.offsets[:-1][targets.row_ids] + at - 1]
    next_tokens = _with(targets.values, candidates)
    spread = None
    if candidates is None:
        node = paths(torch.minimum(overlap, inputs_overlap + 1), whole.lengths)
        pair = node.values[whole.offsets[:-1][targets.row_ids] + at]
        used = torch.zeros(int(node.values.max()) + 1, dtype=torch.int64, device=pair.device)
        used[pair] = 1
        spread = (used.cumsum(0) - 1)[pair]
        of_pair = spread.new_empty(2, int(used.sum()))
        of_pair[:, spread] = torch.stack([predict, next_tokens])
        predict, next_tokens = of_pair

    tokens = len(computed.values)
    # A row that begins with all of the row before, as later turns of an episode do, is one sequence with it: its own
    # tokens follow those.
    last = torch.cat([inputs_overlap[1:] < lengths[:-1], inputs_overlap.new_ones(1, dtype=torch.bool)])
    queries = own.new_zeros(len(own)).index_add_(0, last.cumsum(0) - last.to(own.dtype), own)[: int(last.sum())]
    keys = keys.select(last.nonzero(as_tuple=True)[0])
    # One whose tokens are all shared has no queries.
    kept = (queries > 0).nonzero(as_tuple=True)[0]
    queries, keys = queries[kept], keys.select(kept)
    plain = len(keys.values) == tokens
    return PackedBatch(
        input_ids=computed.values.long()[None],
        position_ids=places[None],
        layout=make_layout(queries, None if plain else keys),
        predict=predict,
        next_tokens=next_tokens,
        bags=bags(predict, tokens),
        targets=targets,
        spread=spread,
        tokens=tokens,
        saved=int(lengths.sum()) - tokens,
        experts=None if experts is None else experts[((lengths.cumsum(0) - lengths)[computed.row_ids] + places).cpu()],
    )
