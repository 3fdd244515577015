"""Shared prefixes: rows that begin with the same tokens compute them once.

Rows of one prompt, and continuations of one reset state, are paths of a tree of tokens. Sorted lexicographically, each
row shares its longest common prefix with the row before it, so one number per row encodes the tree, the `overlap`: the
tokens [0, overlap) of row i are those of row i − 1, whichever row computes them; the rest are row i's own. A token's
hidden state depends on its path only, so log-probs and gradients are those of separate rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from creditgraph.pipeline.core.jagged import Jagged

# A smaller share of a row is recomputed: sharing it would save nothing, and a row without prefix has plain causal
# attention.
SMALLEST_SHARE = 1 / 32
# Attention copies the keys and values of a row's whole path, one layer at a time. A micro-batch holds at most this many
# budgets of path tokens.
PATH_BUDGETS = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class Sorted:
    """Rows in lexicographic order.

    Attributes:
        order: int64 [rows].
        overlap: int64 [rows], length of the common prefix of row order[i] with row order[i − 1]; 0 for the first.
    """

    order: Tensor
    overlap: Tensor

    @staticmethod
    def of(tokens: Jagged) -> Sorted:
        """Sorts rows of non-negative tokens."""
        # Big-endian bytes sort like the numbers.
        flat = tokens.values.cpu().numpy().astype(">u4")
        keys = [flat[a:b].tobytes() for a, b in pairwise(tokens.offsets.tolist())]
        places = sorted(range(len(keys)), key=keys.__getitem__)
        order = torch.tensor(places, dtype=torch.int64, device=tokens.values.device)
        return Sorted(order=order, overlap=overlaps(tokens.select(order)))

    def restrict(self, keep: Tensor) -> Sorted:
        """Only the rows where `keep` (bool [rows], by row index) is set."""
        kept = keep[self.order].nonzero(as_tuple=True)[0]
        # The common prefix of two rows of the order is the shortest overlap between them.
        block = torch.searchsorted(kept, torch.arange(len(self.order), device=kept.device))
        least = self.overlap.new_full((len(kept) + 1,), torch.iinfo(torch.int64).max)
        least = least.scatter_reduce(0, block, self.overlap, "amin")[: len(kept)]
        least[:1] = 0
        return Sorted(order=self.order[kept], overlap=least)


def overlaps(tokens: Jagged) -> Tensor:
    """Length of the common prefix of each row with the row before it, int64 [rows]."""
    lengths = tokens.lengths
    starts = tokens.offsets[:-1]
    positions = tokens.positions
    row_ids = tokens.row_ids
    before = torch.cat([lengths.new_zeros(min(1, len(lengths))), lengths[:-1]])
    limit = torch.minimum(lengths, before)
    inside = positions < limit[row_ids]
    other = torch.where(inside, (starts - before)[row_ids] + positions, 0)
    differs = inside & (tokens.values[other] != tokens.values)
    return limit.scatter_reduce(0, row_ids[differs], positions[differs], "amin")


def without_last(overlap: Tensor, lengths: Tensor) -> Tensor:
    """Overlaps of rows from which the last token is dropped; `lengths` are those before."""
    before = torch.cat([lengths.new_ones(min(1, len(lengths))), lengths[:-1]])
    return torch.minimum(overlap, torch.minimum(lengths, before) - 1).clamp(min=0)


def worthwhile(overlap: Tensor, lengths: Tensor) -> Tensor:
    """Overlaps with those below `SMALLEST_SHARE` of the row set to 0."""
    return torch.where(overlap < SMALLEST_SHARE * lengths, 0, overlap)


def plan_shared(rows: Sorted, lengths: Tensor, budget: int) -> list[Tensor]:
    """Cuts rows into micro-batches of at most `budget` computed tokens; neighbours in the tree stay together.

    Args:
        rows: rows with something to predict.
        lengths: int64, input tokens of every row, by row index.
        budget: computed tokens per micro-batch, and 1 / `PATH_BUDGETS` of its path tokens; 0 puts all rows in one. A
            longer row gets its own micro-batch.

    Returns:
        row indices per micro-batch.
    """
    sizes = lengths[rows.order]
    overlap = worthwhile(without_last(rows.overlap, sizes + 1), sizes)
    own = (sizes - overlap).tolist()
    # A row that begins with all of the row before has one path with it.
    more = torch.where(overlap[1:] == sizes[:-1], sizes[1:] - overlap[1:], sizes[1:]).tolist()
    pieces = []
    start = 0
    used = 0
    path = 0
    for i, size in enumerate(sizes.tolist()):
        if budget and i > start and (used + own[i] > budget or path + more[i - 1] > PATH_BUDGETS * budget):
            pieces.append(rows.order[start:i])
            start = i
            used = 0
            path = 0
        used += size if i == start else own[i]
        path += size if i == start else more[i - 1]
    return [*pieces, rows.order[start:]] if start < len(rows.order) else pieces


def unique_tokens(rows: Sorted, lengths: Tensor) -> int:
    """Nodes of the tree of inputs: the fewest tokens that must be computed."""
    sizes = lengths[rows.order]
    return int((sizes - without_last(rows.overlap, sizes + 1)).sum())


def paths(overlap: Tensor, lengths: Tensor) -> Jagged:
    """For each token of each row, the place of the computed token whose hidden state it has.

    Computed tokens lie row after row, each row's own ones only.

    >>> paths(torch.tensor([0, 2]), torch.tensor([3, 4])).to_lists()  # A B C and A B D E, computed as A B C D E
    [[0, 1, 2], [0, 1, 3, 4]]
    """
    own = lengths - overlap
    shift = own.cumsum(0) - own - overlap
    depth = torch.arange(int(lengths.max()) if len(lengths) else 0, device=lengths.device)
    # The owner of a token is the last row up to this one whose own tokens begin at or before that depth.
    rows = torch.arange(len(lengths), device=lengths.device)[:, None]
    owner = torch.where(depth[None] >= overlap[:, None], rows, 0).cummax(0).values if len(lengths) else rows
    grid = shift[owner] + depth[None]
    return Jagged.from_lengths(grid[depth[None] < lengths[:, None]], lengths)


def bags(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Which places of `index` hold each number below `size`: places sorted by number, and where each number's begin."""
    counts = torch.bincount(index, minlength=size)
    return torch.argsort(index, stable=True), counts.cumsum(0) - counts
