"""Scoring many continuations of prefixes of the same sequence, with the sequence run once (tree attention)."""

from __future__ import annotations

import torch
from torch import Tensor

from components.engine.local.lean import LeanDecoder
from components.engine.local.sampling import blocks, chosen
from pipeline.core.errors import CreditgraphError
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Scores

# Places of one attention mask [rows, branch tokens, all tokens]; a longer row goes alone.
MASK_ELEMENTS = 1 << 26
# Tokens from which on a batch of its own costs less than padding.
WORTH_A_PASS = 1024


def check_branches(trunk: Jagged, row: Tensor, at: Tensor, tokens: Jagged, context_length: int) -> None:
    """Raises CreditgraphError unless every branch starts within its trunk and fits the model's context."""
    if not len(row) == len(at) == len(tokens):
        raise CreditgraphError(
            f"score_branches: {len(row)} rows, {len(at)} places and {len(tokens)} token rows; wanted one of each per "
            "branch."
        )
    if not len(row):
        return
    if not 0 <= int(row.min()) <= int(row.max()) < len(trunk):
        raise CreditgraphError(
            f"score_branches: trunk rows {int(row.min())} to {int(row.max())}; wanted 0 to {len(trunk) - 1}."
        )
    wrong = ((at < 1) | (at > trunk.lengths[row])) & (tokens.lengths > 0)
    if bool(wrong.any()):
        b = int(wrong.nonzero()[0])
        raise CreditgraphError(
            f"score_branches: branch {b} starts after {int(at[b])} tokens of a trunk of {int(trunk.lengths[row[b]])}; "
            "wanted 1 to the trunk's length (at least one token to condition on)."
        )
    longest = int((at + tokens.lengths).max())
    if longest > context_length:
        raise CreditgraphError(
            f"score_branches: prefix plus branch have {longest} tokens; wanted at most {context_length} (context of "
            "the model). "
            "Shorten the response budget or raise model.max_context."
        )


@torch.inference_mode()
def score_branches(
    decoder: LeanDecoder,
    trunk: Jagged,
    row: Tensor,
    at: Tensor,
    tokens: Jagged,
    temperature: float,
    device: str,
    batch_tokens: int,
) -> tuple[Scores, int]:
    """Scores `tokens` [B rows] after the first `at` [B] tokens of trunks `row` [B].

    A branch token attends to its trunk's first `at` tokens and to its own branch; positions go on from `at`. A trunk is
    run as far as its last branch point, and a branch without its last token, which predicts nothing.

    Returns:
        log-probs and entropies like `tokens`, and the number of tokens that went through the model.
    """
    logprobs, entropies = torch.zeros(len(tokens.values)), torch.zeros(len(tokens.values))
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
        mine = used[local[owner] >= 0]
        host = local[owner[local[owner] >= 0]]
        by_host = torch.argsort(host, stable=True)
        mine, host = mine[by_host], host[by_host]
        begun = trunk.slice_rows(torch.zeros_like(reach[rows]), reach[rows], trunks[rows])
        hidden, places = _run(decoder, begun, host, at[mine], tokens.select(mine), device)
        picked = tokens.select(mine)
        flat = tokens.offsets[:-1][mine][picked.row_ids] + picked.positions
        targets = picked.values.to(torch.int64)
        for block in blocks(len(places), decoder.vocab_size):
            logits = decoder.logits(hidden[places[block].to(device)])
            lp, ent = chosen(logits, targets[block].to(device), temperature or 1.0)
            logprobs[flat[block]], entropies[flat[block]] = lp.cpu(), ent.cpu()
    scores = Scores(logprobs=tokens.with_values(logprobs), entropies=tokens.with_values(entropies))
    return scores, int(reach.sum() + inner.sum())


def _run(
    decoder: LeanDecoder, trunk: Jagged, host: Tensor, at: Tensor, tokens: Jagged, device: str
) -> tuple[Tensor, Tensor]:
    """Hidden states [B·(T + S), C] of one batch, and the place in them that predicts each of `tokens` (branches ordered by `host`)."""
    inner = tokens.slice_rows(torch.zeros_like(at), tokens.lengths - 1)
    per_trunk = torch.zeros(len(trunk), dtype=torch.int64).index_add_(0, host, inner.lengths)
    slots = Jagged.from_lengths(inner.row_ids, per_trunk)
    length, width = int(trunk.lengths.max()), int(per_trunk.max())
    # Unused slots belong to no branch; they see the first trunk token, because a row of a mask must not be empty.
    branch = slots.to_padded(-1)
    start = torch.where(branch >= 0, at[branch], 1)
    after = slots.with_values(inner.positions).to_padded(0)
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    visible = torch.cat(
        [
            torch.arange(length) < start[..., None],
            (branch[:, :, None] == branch[:, None, :]) & (branch >= 0)[:, :, None] & causal,
        ],
        2,
    )
    hidden = decoder.branched(
        trunk.to_padded().to(device, torch.int64),
        slots.with_values(inner.values).to_padded().to(device, torch.int64),
        (start + after).to(device),
        visible.to(device),
    )
    stride = length + width
    first = inner.offsets[:-1] - slots.offsets[:-1][host]
    within = torch.where(
        tokens.positions == 0, at[tokens.row_ids] - 1, length + first[tokens.row_ids] + tokens.positions - 1
    )
    return hidden.reshape(-1, hidden.shape[-1]), host[tokens.row_ids] * stride + within


def _parts(reach: list[int], inner: list[int], batch_tokens: int) -> list[slice]:
    """Cuts trunks, sorted by branch tokens, into batches whose padded tokens and attention mask stay within their limits.

    A batch that is worth a pass of its own is also cut where padding would make up more than half of it.
    """
    parts: list[slice] = []
    start = longest = real = 0
    for end, (length, width) in enumerate(zip(reach, inner, strict=True)):
        longest, real, rows = max(longest, length), real + length + width, end + 1 - start
        padded = rows * (longest + width)
        full = padded > batch_tokens or padded * width > MASK_ELEMENTS
        if end > start and (full or (padded > 2 * real and real > WORTH_A_PASS)):
            parts.append(slice(start, end))
            start, longest, real = end, length, length + width
    return [*parts, slice(start, len(reach))] if reach else []
