"""Jagged against plain Python lists: by hand, and over random rows."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from creditgraph.pipeline.core.jagged import Jagged

ROWS = st.lists(st.lists(st.integers(-1000, 1000), max_size=6), max_size=8)
SOME_ROWS = st.lists(st.lists(st.integers(-1000, 1000), max_size=6), min_size=1, max_size=8)
fast = settings(max_examples=60, deadline=None)


def ints(rows: list[list[int]]) -> Jagged:
    return Jagged.from_rows(rows, torch.int64)


def test_by_hand() -> None:
    j = Jagged.from_rows([[1, 2], [], [3]])
    assert (len(j), j.values.tolist(), j.offsets.tolist()) == (3, [1, 2, 3], [0, 2, 2, 3])
    assert j.lengths.tolist() == [2, 0, 1]
    assert j.row_ids.tolist() == [0, 0, 2]
    assert j.positions.tolist() == [0, 1, 0]
    assert j.sum().tolist() == [3, 0, 3]
    assert j.mean().tolist() == [1.5, 0.0, 3.0]  # an empty row has mean 0
    assert j.cumsum().to_lists() == [[1, 3], [], [3]]
    assert j.row(0).tolist() == [1, 2]
    assert j.spread(torch.tensor([7, 8, 9])).to_lists() == [[7, 7], [], [9]]
    assert j.to_padded(-1).tolist() == [[1, 2], [-1, -1], [3, -1]]
    assert repr(j) == "Jagged(rows=3, total=3, dtype=int64)"


def test_slice_rows_by_hand() -> None:
    j = ints([[1, 2, 3], [4, 5], []])
    cut = j.slice_rows(torch.tensor([1, 0, 0]), torch.tensor([3, 1, 0]))
    assert cut.to_lists() == [[2, 3], [4], []]
    one = j.slice_rows(torch.tensor([1, 0]), torch.tensor([2, 3]), torch.tensor([1, 0]))
    assert one.to_lists() == [[5], [1, 2, 3]]


@fast
@given(ROWS)
def test_rows_round_trip(rows: list[list[int]]) -> None:
    j = ints(rows)
    assert j.to_lists() == rows
    assert [r.tolist() for r in j.rows()] == rows
    assert j.lengths.tolist() == [len(r) for r in rows]
    assert j.row_ids.tolist() == [i for i, r in enumerate(rows) for _ in r]
    assert j.positions.tolist() == [k for r in rows for k in range(len(r))]


@fast
@given(ROWS)
def test_sums_and_scans(rows: list[list[int]]) -> None:
    j = ints(rows)
    assert j.sum().tolist() == [sum(r) for r in rows]
    assert j.cumsum().to_lists() == [list(accumulate(r)) for r in rows]
    f = j.to(torch.float32)
    assert f.sum().tolist() == [float(sum(r)) for r in rows]
    assert f.cumsum().to_lists() == [[float(x) for x in accumulate(r)] for r in rows]
    assert f.mean().tolist() == pytest.approx([sum(r) / len(r) if r else 0.0 for r in rows], rel=1e-6)


@fast
@given(SOME_ROWS, st.data())
def test_select_and_concat(rows: list[list[int]], data: st.DataObject) -> None:
    j = ints(rows)
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10))
    assert j.select(torch.tensor(index, dtype=torch.int64)).to_lists() == [rows[i] for i in index]
    keep = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    assert j.select(torch.tensor(keep)).to_lists() == [r for r, k in zip(rows, keep, strict=True) if k]
    cut = data.draw(st.integers(0, len(rows)))
    assert Jagged.concat([ints(rows[:cut]), ints(rows[cut:])]).equal(j)


def test_join_appends_row_to_row_in_the_dtype_of_the_left() -> None:
    left = Jagged.from_rows([[1], [], [2, 3], []], torch.int32)
    joined = left.join(Jagged.from_rows([[4, 5], [6], [], []], torch.int64))
    assert joined.to_lists() == [[1, 4, 5], [6], [2, 3], []]
    assert joined.values.dtype == torch.int32


@fast
@given(SOME_ROWS, st.data())
def test_slices(rows: list[list[int]], data: st.DataObject) -> None:
    bounds = [sorted(data.draw(st.tuples(st.integers(0, len(r)), st.integers(0, len(r))))) for r in rows]
    start, end = torch.tensor(bounds, dtype=torch.int64).T
    assert ints(rows).slice_rows(start, end).to_lists() == [r[a:b] for r, (a, b) in zip(rows, bounds, strict=True)]


@fast
@given(ROWS, st.integers(-5, 5))
def test_padding(rows: list[list[int]], fill: int) -> None:
    longest = max((len(r) for r in rows), default=0)
    assert ints(rows).to_padded(fill).tolist() == [r + [fill] * (longest - len(r)) for r in rows]


def test_a_sum_does_not_depend_on_the_other_rows() -> None:
    row = torch.randn(200, generator=torch.Generator().manual_seed(0))
    big = torch.full((50,), 1e7)
    alone = Jagged.from_rows([row]).sum()[0]
    assert torch.equal(Jagged.from_rows([big, row, big]).sum()[1], alone)


def test_cumsum_keeps_small_numbers_after_large_rows() -> None:
    # float32 running totals would lose 0.001 behind 1e8; the scan is in float64.
    j = Jagged.from_rows([[1e8, 1.0], [0.001, 0.001]], torch.float32)
    assert j.cumsum().row(1).tolist() == pytest.approx([0.001, 0.002], rel=1e-5)


def test_gradients_pass_through() -> None:
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    j = Jagged.from_lengths(values, torch.tensor([2, 1]))
    (j.sum() * torch.tensor([1.0, 10.0])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 1.0, 10.0]


def test_dtypes_of_rows() -> None:
    assert Jagged.from_rows([]).values.dtype == torch.float32
    assert Jagged.from_rows([[], []]).values.dtype == torch.int64
    assert Jagged.from_rows([[], [1.5]]).values.dtype == torch.float32
    assert Jagged.from_rows([[True], []]).values.dtype == torch.bool
    assert Jagged.from_rows([torch.tensor([1], dtype=torch.int32), []]).values.dtype == torch.int32
    assert Jagged.from_rows([[1, 2]], torch.float32).values.dtype == torch.float32
    assert Jagged.from_rows([[1]]).to(torch.int32).values.dtype == torch.int32


def test_no_rows() -> None:
    j = Jagged.from_rows([], torch.int32)
    assert (len(j), j.to_lists(), j.sum().tolist(), j.to_padded().shape) == (0, [], [], (0, 0))
    assert j.select(torch.zeros(0, dtype=torch.int64)).to_lists() == []


def test_equal_looks_at_lengths_dtype_values_and_nan() -> None:
    nan = float("nan")
    a = Jagged.from_rows([[1.0, nan], [2.0]])
    assert a.equal(Jagged.from_rows([[1.0, nan], [2.0]]))
    assert not a.equal(Jagged.from_rows([[1.0, 0.0], [2.0]]))
    assert not a.equal(Jagged.from_rows([[1.0], [nan, 2.0]]))
    assert not ints([[1]]).equal(ints([[1]]).to(torch.int32))
    assert not ints([[1]]).equal(ints([[2]]))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Jagged(torch.zeros(2, 2), torch.tensor([0, 2])),
            r"values of shape \(2, 2\).*expected values \[total\] and int64 offsets",
        ),
        (lambda: Jagged(torch.zeros(2), torch.tensor([0, 2], dtype=torch.int32)), "torch.int32 offsets"),
        (lambda: Jagged(torch.zeros(0), torch.zeros(0, dtype=torch.int64)), r"offsets of shape \(0,\)"),
        (lambda: Jagged.from_lengths(torch.zeros(3), torch.tensor([1, 1])), "lengths sum to 2, but there are 3 values"),
        (lambda: ints([[1, 2]]).with_values(torch.zeros(3)), "3 values for rows that hold 2"),
        (lambda: Jagged.concat([]), "no parts; expected at least one"),
    ],
)
def test_refusals(make: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()  # type: ignore[operator]
