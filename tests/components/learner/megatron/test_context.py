"""Context parallelism: tokens and query-key pairs of each rank, counted."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from creditgraph.components.learner.packing.attention import PackedLayout
from creditgraph.components.learner.packing.pack import PackedBatch, pack
from creditgraph.components.learner.packing.prefix import Sorted
from creditgraph.pipeline.core.jagged import Jagged


@pytest.fixture(scope="module")
def attention() -> Any:
    pytest.importorskip("megatron.core")
    import creditgraph.components.learner.megatron.attention

    return creditgraph.components.learner.megatron.attention


def packed(rows: list[tuple[int, list[int]]], share: bool) -> PackedBatch:
    """Rows of prompts of the given lengths, with responses of the given lengths each."""
    prompts = [[7 * i + 1] * prompt for i, (prompt, responses) in enumerate(rows) for _ in responses]
    responses = [[9 + j] * n for _, lengths in rows for j, n in enumerate(lengths)]
    p, r = (Jagged.from_rows(x, torch.int64) for x in (prompts, responses))
    order = Sorted.of(p.join(r)).order
    return pack(p, r, order, share=share)


def pairs(layout: PackedLayout, real: int | None = None) -> int:
    """Query-key pairs of a layout, one by one; `real` leaves out rows of padding after so many queries."""
    count = queries = 0
    for start, length in zip(layout.starts.tolist(), layout.lengths.tolist(), strict=True):
        if real is None or queries < real:
            count += sum(start + place + 1 for place in range(length))
        queries += length
    return count


def of_ranks(attention: Any, batch: PackedBatch, context: int, tensor: int = 1) -> list[int]:
    inputs = [attention.prepare(batch, tensor, context, rank) for rank in range(context)]
    assert sorted(torch.cat([x.places for x in inputs]).tolist()) == list(range(batch.tokens))
    assert len({x.input_ids.shape for x in inputs}) == 1
    assert inputs[0].input_ids.shape[1] % tensor == 0
    assert inputs[0].input_ids.shape[1] * context < batch.tokens + context * (tensor + 1)
    return [pairs(x.layout, len(x.places)) for x in inputs]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(("context", "tensor"), [(2, 1), (4, 2), (3, 1)])
def test_rows_whose_chunks_are_equal_make_equal_work(attention: Any, share: bool, context: int, tensor: int) -> None:
    unit = 2 * context
    # The last token of a row is no input.
    rows = [(4 * unit, [3 * unit + 1, 5 * unit + 1, unit + 1]), (2 * unit, [2 * unit + 1]), (unit, [unit + 1])]
    batch = packed(rows, share)
    assert (batch.saved > 0) == share
    counts = of_ranks(attention, batch, context, tensor)
    assert len(set(counts)) == 1
    assert sum(counts) == pairs(batch.layout)


def contiguous(layout: PackedLayout, context: int) -> list[int]:
    """Pairs of equal slices of the pack, in order."""
    depths = torch.cat(
        [torch.arange(s + 1, s + n + 1) for s, n in zip(layout.starts.tolist(), layout.lengths.tolist(), strict=True)]
    )
    return [int(part.sum()) for part in depths.chunk(context)]


def imbalance(counts: list[int]) -> float:
    return max(counts) * len(counts) / sum(counts)


def test_long_rows_are_balanced_where_slices_were_not(attention: Any) -> None:
    alone = packed([(300, [3797])], share=False)
    assert imbalance(contiguous(alone.layout, 4)) == pytest.approx(1.75, abs=0.001)
    assert imbalance(of_ranks(attention, alone, 4)) == 1.0
    tree = packed([(500, [801, 1203, 357, 1022]), (333, [95, 2011])], share=True)
    assert tree.saved > 0
    assert imbalance(contiguous(tree.layout, 4)) > 1.2
    assert imbalance(of_ranks(attention, tree, 4)) < 1.01


def test_uneven_rows_differ_by_less_than_two_paths(attention: Any) -> None:
    g = torch.Generator().manual_seed(0)

    def work(begins: Tensor, lengths: Tensor, row: tuple[int, int], start: int) -> int:
        """Pairs of the chunks inside a row, which continues `start` tokens."""
        places = torch.cat([torch.arange(b, b + n) for b, n in zip(begins.tolist(), lengths.tolist(), strict=True)])
        places = places[(places >= row[0]) & (places < row[1])]
        return int((places - row[0] + 1 + start).sum())

    for context in (2, 3, 4, 8):
        lengths = torch.randint(1, 60, (40,), generator=g)
        shares = attention.zigzag(lengths, context)
        tokens = [int(n.sum()) for _, n in shares]
        assert sum(tokens) == int(lengths.sum())
        assert max(tokens) - min(tokens) <= 1
        offsets = [0, *lengths.cumsum(0).tolist()]
        for first, last in pairwise(offsets):
            start = int(torch.randint(0, 30, (1,), generator=g))
            counts = [work(*share, (first, last), start) for share in shares]
            assert max(counts) - min(counts) < 2 * (start + last - first)


def test_fewer_tokens_than_ranks(attention: Any) -> None:
    batch = packed([(1, [1])], share=False)
    assert of_ranks(attention, batch, 4) == [1, 0, 0, 0]
