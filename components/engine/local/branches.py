"""Scoring many continuations of prefixes of the same sequence, with the sequence run once (tree attention)."""

from typing import NamedTuple

import torch
from torch import Tensor

from creditgraph.components.engine.local.lean import LeanDecoder
from creditgraph.components.engine.local.score import token_scores
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.handles import Scores
from creditgraph.pipeline.core.jagged import Jagged

# Places of one attention mask [rows, branch tokens, all tokens]; a longer row goes alone.
MASK_ELEMENTS = 1 << 26
# From this number of tokens on, a separate batch costs less than padding.
WORTH_A_PASS = 1024


class Branches(NamedTuple):
    """Branches off trunks.

    Attributes:
        trunk: Jagged int32 [R rows].
        row: int64 [B], trunk of each branch.
        at: int64 [B], tokens of the trunk before each branch.
        tokens: Jagged int32 [B rows].
    """

    trunk: Jagged
    row: Tensor
    at: Tensor
    tokens: Jagged


def check_branches(branches: Branches, context_length: int) -> None:
    """Raises CreditgraphError unless every branch starts within its trunk and fits the model's context."""
    trunk, row, at, tokens = branches
    if not len(row) == len(at) == len(tokens):
        raise CreditgraphError(
            f"score_branches: expected one trunk row and one place per branch, got {len(row)} rows, {len(at)} places "
            f"and {len(tokens)} token rows."
        )
    if not len(row):
        return
    if not 0 <= int(row.min()) <= int(row.max()) < len(trunk):
        raise CreditgraphError(
            f"score_branches: expected trunk rows 0 to {len(trunk) - 1}, got {int(row.min())} to {int(row.max())}."
        )
    wrong = ((at < 1) | (at > trunk.lengths[row])) & (tokens.lengths > 0)
    if bool(wrong.any()):
        b = int(wrong.nonzero()[0])
        raise CreditgraphError(
            f"score_branches: expected a start after 1 to {int(trunk.lengths[row[b]])} tokens (the length of the "
            f"trunk), but branch {b} starts after {int(at[b])}."
        )
    longest = int((at + tokens.lengths).max())
    if longest > context_length:
        raise CreditgraphError(
            f"score_branches: expected at most {context_length} tokens (the context of the model), but prefix plus "
            f"branch have {longest}. Shorten the response budget or raise model.max_context."
        )


@torch.inference_mode()
def score_branches(
    decoder: LeanDecoder, branches: Branches, temperature: float, batch_tokens: int
) -> tuple[Scores, int]:
    """Scores the tokens of branches after what comes before them in their trunks.

    A branch token attends to the trunk before its branch and to its own branch; positions continue those of the trunk.
    A trunk is run up to its last branch point, and a branch without its last token, which predicts nothing.

    Returns:
        log-probs and entropies of `branches.tokens`, and the number of tokens that went through the model.
    """
    trunk, row, at, tokens = branches
    logprobs = torch.zeros(len(tokens.values))
    entropies = torch.zeros(len(tokens.values))
    used = (tokens.lengths > 0).nonzero(as_tuple=True)[0]
    used = used[torch.argsort(row[used], stable=True)]
    trunks, owner = torch.unique_consecutive(row[used], return_inverse=True)
    reach = torch.zeros(len(trunks), dtype=torch.int64).scatter_reduce(0, owner, at[used], "amax")
    inner = torch.zeros(len(trunks), dtype=torch.int64).index_add_(0, owner, tokens.lengths[used] - 1)
    order = torch.argsort(reach, stable=True)
    order = order[torch.argsort(inner[order], stable=True)]
    for part in _parts(reach[order].tolist(), inner[order].tolist(), batch_tokens):
        rows = order[part]
        local = torch.full((len(trunks),), -1)
        local[rows] = torch.arange(len(rows))
        here = local[owner] >= 0
        host = local[owner[here]]
        by_host = torch.argsort(host, stable=True)
        mine = used[here][by_host]
        picked = tokens.select(mine)
        begun = trunk.slice_rows(torch.zeros_like(reach[rows]), reach[rows], trunks[rows])
        hidden, places = _run(decoder, Branches(begun, host[by_host], at[mine], picked))
        flat = tokens.offsets[:-1][mine][picked.row_ids] + picked.positions
        lp, entropy, *_ = token_scores(decoder, hidden, places, picked.values.to(torch.int64), temperature)
        logprobs[flat] = lp
        entropies[flat] = entropy
    scores = Scores(logprobs=tokens.with_values(logprobs), entropies=tokens.with_values(entropies))
    return scores, int(reach.sum() + inner.sum())


def _run(decoder: LeanDecoder, branches: Branches) -> tuple[Tensor, Tensor]:
    """Hidden states [B·(T + S), C] of one batch, and the place in them that predicts each of its tokens.

    Branches are ordered by `row`; their tokens follow each other in the S slots of their trunk.
    """
    trunk, host, at, tokens = branches
    device = decoder.device
    inner = tokens.slice_rows(torch.zeros_like(at), tokens.lengths - 1)
    per_trunk = torch.zeros(len(trunk), dtype=torch.int64).index_add_(0, host, inner.lengths)
    slots = Jagged.from_lengths(inner.row_ids, per_trunk)
    length = int(trunk.lengths.max())
    width = int(per_trunk.max())
    # Unused slots belong to no branch; they see the first trunk token, because a row of a mask must not be empty.
    branch = slots.to_padded(-1)
    start = torch.where(branch >= 0, at[branch], 1)
    after = slots.with_values(inner.positions).to_padded(0)
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    in_trunk = torch.arange(length) < start[..., None]
    in_branch = (branch[:, :, None] == branch[:, None, :]) & (branch >= 0)[:, :, None] & causal
    hidden = decoder.branched(
        trunk.to_padded().to(device, torch.int64),
        slots.with_values(inner.values).to_padded().to(device, torch.int64),
        (start + after).to(device),
        torch.cat([in_trunk, in_branch], 2).to(device),
    )
    first = inner.offsets[:-1] - slots.offsets[:-1][host]
    row = tokens.row_ids
    within = torch.where(tokens.positions == 0, at[row] - 1, length + first[row] + tokens.positions - 1)
    return hidden.reshape(-1, hidden.shape[-1]), host[row] * (length + width) + within


def _parts(reach: list[int], inner: list[int], batch_tokens: int) -> list[slice]:
    """Cuts trunks, sorted by branch tokens, into batches within the limits of padded tokens and attention mask.

    A batch that is large enough for a separate pass is also cut where padding would be more than half of it.
    """
    parts: list[slice] = []
    start = longest = real = 0
    for end, (length, width) in enumerate(zip(reach, inner, strict=True)):
        longest = max(longest, length)
        real += length + width
        padded = (end + 1 - start) * (longest + width)
        full = padded > batch_tokens or padded * width > MASK_ELEMENTS
        if end > start and (full or (padded > 2 * real and real > WORTH_A_PASS)):
            parts.append(slice(start, end))
            start = end
            longest = length
            real = length + width
    return [*parts, slice(start, len(reach))] if reach else []
