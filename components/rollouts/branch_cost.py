"""What scoring branches costs a server: tokens that it prefills, and positions whose whole vocabulary it computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16  # tokens in a block of vLLM's prefix cache on GPUs; a cached prefix consists of whole blocks


@dataclass(frozen=True, kw_only=True)
class BranchCost:
    """Counts of scoring branches.

    Attributes:
        requests: one per branch.
        sent: tokens in the requests, contexts included.
        prefilled: tokens that pass through the model, if the cache holds no trunk before.
        prefilled_cached: the same, if it holds all of them, as where they were just sampled and nothing was evicted.
        scored: positions whose log-probs over the vocabulary are computed.
    """

    requests: int
    sent: int
    prefilled: int
    prefilled_cached: int
    scored: int


def branch_cost(row: Tensor, at: Tensor, tokens: Tensor, block: int = BLOCK) -> BranchCost:
    """Cost of `Policy.score_branches` on engines behind a prefix cache, which send a trunk's longest branch first.

    A branch of n tokens after a tokens of its trunk finds the ⌊(a − 1) / block⌋ whole blocks before the position that
    predicts its first token, and prefills the other a + n − block ⌊(a − 1) / block⌋ tokens. Without the trunk in the
    cache, the longest branch of each trunk prefills all a + n. Trunks are counted as if they shared nothing.

    Args:
        row: int64 [B], trunk of each branch.
        at: int64 [B], tokens of the trunk before it, at least 1.
        tokens: int64 [B], its tokens.
        block: tokens in a block of the cache.

    >>> branch_cost(torch.tensor([0, 0]), torch.tensor([100, 40]), torch.tensor([5, 5]), block=32)
    BranchCost(requests=2, sent=150, prefilled=118, prefilled_cached=22, scored=10)
    """
    sent = at + tokens
    found = (at - 1) // block * block
    own = int((sent - found).sum())
    longest = torch.zeros(int(row.max()) + 1 if len(row) else 0, dtype=torch.int64)
    longest = longest.scatter_reduce(0, row, found, "amax", include_self=True)
    return BranchCost(
        requests=len(row),
        sent=int(sent.sum()),
        prefilled=own + int(longest.sum()),
        prefilled_cached=own,
        scored=int(tokens.sum()),
    )


def planned_cost(
    *, rows: int, prompt: int, response: int, segments: int, reference: int, block: int = BLOCK
) -> BranchCost:
    """Cost of scoring one reference at the start of every response and at the end of each of its equal segments.

    Args:
        rows: trajectories.
        prompt, response: tokens of each.
        segments: of each response.
        reference: tokens of the scored text, its exit text included.
        block: see `branch_cost`.
    """
    places = prompt + response * torch.arange(segments + 1) // segments
    row = torch.arange(rows).repeat_interleave(len(places))
    return branch_cost(row, places.repeat(rows), torch.full((len(row),), reference), block)
