"""Cuts rows into forward passes: ranges under a token budget, and padded rows of contexts with tokens to score."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from creditgraph.pipeline.core.jagged import Jagged

# Elements of one [rows, vocabulary] block in float32; larger batches are processed in blocks of rows.
BLOCK = 1 << 24


def blocks(rows: int, vocab: int) -> list[slice]:
    """Row ranges whose [rows, vocab] blocks stay below `BLOCK` numbers."""
    size = max(1, BLOCK // max(vocab, 1))
    return [slice(a, min(a + size, rows)) for a in range(0, rows, size)]


def token_batches(lengths: Sequence[int], limit: int) -> list[slice]:
    """Cuts ascending lengths into ranges whose padded size stays within `limit` tokens, at least one row each.

    >>> token_batches([1, 2, 3, 9], 6)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    parts = []
    start = 0
    for end, length in enumerate(lengths):
        if end > start and (end + 1 - start) * length > limit:
            parts.append(slice(start, end))
            start = end
    return [*parts, slice(start, len(lengths))] if lengths else []


class ScoringBatch(NamedTuple):
    """Some rows of contexts and tokens as one left-aligned table, and its M scored tokens.

    Attributes:
        rows: int64 [R], which rows these are.
        padded: int64 [R, T], context and tokens of each.
        row: int64 [M], row of each scored token in the table.
        column: int64 [M], the column that predicts it: the one before its own.
        target: int64 [M], its id.
        flat: int64 [M], its place among the values of all scored tokens.
    """

    rows: Tensor
    padded: Tensor
    row: Tensor
    column: Tensor
    target: Tensor
    flat: Tensor


def scoring_batches(context: Jagged, tokens: Jagged, limit: int) -> Iterator[ScoringBatch]:
    """Yields all rows with tokens to score, the shortest first, in tables of at most `limit` tokens (or one row)."""
    total = context.lengths + tokens.lengths
    order = torch.argsort(total)
    order = order[tokens.lengths[order] > 0]
    for part in token_batches(total[order].tolist(), limit):
        rows = order[part]
        before = context.select(rows)
        after = tokens.select(rows)
        padded = torch.zeros(len(rows), int(total[rows].max()), dtype=torch.int64)
        padded[before.row_ids, before.positions] = before.values.to(torch.int64)
        columns = before.lengths[after.row_ids] + after.positions
        padded[after.row_ids, columns] = after.values.to(torch.int64)
        flat = tokens.offsets[:-1][rows][after.row_ids] + after.positions
        yield ScoringBatch(rows, padded, after.row_ids, columns - 1, after.values.to(torch.int64), flat)
