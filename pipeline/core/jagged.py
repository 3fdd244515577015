"""`Jagged`: rows of different length as one flat tensor plus offsets, without padding; and rows of any kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from creditgraph.pipeline.core.errors import AlignmentError


@dataclass(frozen=True, eq=False)
class Jagged:
    """Rows of different length.

    Attributes:
        values: tensor of shape [total]; row i is ``values[offsets[i]:offsets[i + 1]]``.
        offsets: int64 tensor of shape [rows + 1], non-decreasing, from 0 to total.

    >>> j = Jagged.from_rows([[1, 2], [], [3]])
    >>> j.lengths.tolist(), j.sum().tolist(), j.select(torch.tensor([2, 0])).values.tolist()
    ([2, 0, 1], [3, 0, 3], [3, 1, 2])
    """

    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        if (
            self.values.dim() != 1
            or self.offsets.dim() != 1
            or self.offsets.dtype != torch.int64
            or len(self.offsets) == 0
        ):
            raise ValueError(
                f"Jagged: values of shape {tuple(self.values.shape)} and {self.offsets.dtype} offsets of shape "
                f"{tuple(self.offsets.shape)}; expected values [total] and int64 offsets [rows + 1]."
            )

    @staticmethod
    def from_rows(rows: Sequence[Any], dtype: torch.dtype | None = None) -> Jagged:
        """Builds from a sequence of 1-D tensors or lists of numbers; an empty sequence gives zero rows."""
        tensors = [r if isinstance(r, Tensor) else torch.as_tensor(r, dtype=dtype or _dtype_of(rows)) for r in rows]
        lengths = torch.tensor([len(t) for t in tensors], dtype=torch.int64)
        values = torch.cat(tensors) if tensors else torch.zeros(0, dtype=dtype or torch.float32)
        return Jagged.from_lengths(values if dtype is None else values.to(dtype), lengths)

    @staticmethod
    def from_lengths(values: Tensor, lengths: Tensor) -> Jagged:
        """Cuts `values` [total] into rows of the given `lengths` [rows]."""
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=values.device)
        torch.cumsum(lengths.to(values.device, torch.int64), 0, out=offsets[1:])
        if int(offsets[-1]) != len(values):
            raise ValueError(f"Jagged: lengths sum to {int(offsets[-1])}, but there are {len(values)} values.")
        return Jagged(values, offsets)

    @staticmethod
    def concat(parts: Sequence[Jagged]) -> Jagged:
        """Stacks the rows of all parts, in order."""
        if not parts:
            raise ValueError("Jagged.concat: no parts; expected at least one.")
        return Jagged.from_lengths(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))

    def join(self, right: Jagged) -> Jagged:
        """Row-wise concatenation: each row followed by the same row of `right`, in the dtype of `self`.

        >>> Jagged.from_rows([[1, 2], [3]]).join(Jagged.from_rows([[4], [5, 6]])).to_lists()
        [[1, 2, 4], [3, 5, 6]]
        """
        total = len(self.values) + len(right.values)
        out = Jagged.from_lengths(self.values.new_empty(total), self.lengths + right.lengths)
        starts = out.offsets[:-1]
        out.values[starts[self.row_ids] + self.positions] = self.values
        out.values[(starts + self.lengths)[right.row_ids] + right.positions] = right.values.to(self.values.dtype)
        return out

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """int64 [rows]."""
        return self.offsets.diff()

    @property
    def row_ids(self) -> Tensor:
        """int64 [total]: the row each value belongs to."""
        rows = torch.arange(len(self), device=self.values.device)
        return torch.repeat_interleave(rows, self.lengths, output_size=len(self.values))

    @property
    def positions(self) -> Tensor:
        """int64 [total]: the place of each value within its row, from 0."""
        return torch.arange(len(self.values), device=self.values.device) - self.offsets[:-1][self.row_ids]

    def row(self, index: int) -> Tensor:
        """A view of one row."""
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def rows(self) -> list[Tensor]:
        """Views of all rows."""
        # One call, where a slice per row would cost a Python round trip each.
        return list(torch.split(self.values, self.lengths.tolist()))

    def to_lists(self) -> list[list[Any]]:
        """All rows as Python lists."""
        flat = self.values.tolist()
        bounds = self.offsets.tolist()
        return [flat[a:b] for a, b in pairwise(bounds)]

    def with_values(self, values: Tensor) -> Jagged:
        """The same row lengths with other values [total]."""
        if len(values) != len(self.values):
            raise ValueError(f"Jagged.with_values: {len(values)} values for rows that hold {len(self.values)}.")
        return Jagged(values, self.offsets)

    def spread(self, per_row: Tensor) -> Jagged:
        """Repeats one number per row [rows] over the row's places."""
        return self.with_values(torch.repeat_interleave(per_row, self.lengths, output_size=len(self.values)))

    def sum(self) -> Tensor:
        """Row sums [rows]; an empty row sums to 0. Exact for integers, deterministic for floats."""
        # Differences of a cumulative sum would lose precision for floats; for integers they are exact and faster.
        if self.values.dtype.is_floating_point:
            return torch.segment_reduce(self.values, "sum", offsets=self.offsets, initial=0)
        total = torch.zeros(len(self.values) + 1, dtype=torch.int64, device=self.values.device)
        torch.cumsum(self.values.to(torch.int64), 0, out=total[1:])
        return total[self.offsets[1:]] - total[self.offsets[:-1]]

    def mean(self) -> Tensor:
        """Row means [rows] in float; an empty row has mean 0."""
        sums = self.sum()
        if not sums.dtype.is_floating_point:
            sums = sums.to(torch.float32)
        return sums / self.lengths.clamp(min=1)

    def cumsum(self) -> Jagged:
        """Inclusive cumulative sums within each row, accumulated in float64 for floats."""
        # One scan over all rows, from which each row subtracts the sum before it; float64 keeps that accurate.
        wide = self.values.to(torch.float64 if self.values.dtype.is_floating_point else torch.int64)
        total = torch.cat([wide.new_zeros(1), wide.cumsum(0)])
        within = total[1:] - total[self.offsets[:-1]][self.row_ids]
        return self.with_values(within.to(self.values.dtype if self.values.dtype.is_floating_point else torch.int64))

    def select(self, index: Tensor) -> Jagged:
        """Rows by an int64 index or a bool mask [rows], in the order of the index."""
        if index.dtype == torch.bool:
            index = index.nonzero(as_tuple=True)[0]
        index = index.to(self.offsets.device)
        lengths = self.lengths[index]
        return self.slice_rows(torch.zeros_like(lengths), lengths, index)

    def slice_rows(self, start: Tensor, end: Tensor, index: Tensor | None = None) -> Jagged:
        """Cuts places [start, end) out of each row (of the rows in `index`, all rows without it)."""
        first = self.offsets[:-1] if index is None else self.offsets[:-1][index]
        lengths = end - start
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=self.values.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        total = int(offsets[-1])
        base = torch.repeat_interleave(first + start - offsets[:-1], lengths, output_size=total)
        return Jagged(self.values[base + torch.arange(total, device=self.values.device)], offsets)

    def to_padded(self, fill: float | int | bool = 0) -> Tensor:
        """A [rows, longest row] tensor, rows left-aligned, the rest `fill`."""
        longest = int(self.lengths.max()) if len(self) else 0
        out = self.values.new_full((len(self), longest), fill)
        out[self.row_ids, self.positions] = self.values
        return out

    def to(self, target: torch.dtype | torch.device | str) -> Jagged:
        """Values in another dtype, or everything on another device."""
        if isinstance(target, torch.dtype):
            return self.with_values(self.values.to(target))
        return Jagged(self.values.to(target), self.offsets.to(target))

    def equal(self, other: Jagged) -> bool:
        """Bitwise equality of lengths, dtype and values (NaN equals NaN)."""
        if self.values.dtype != other.values.dtype or not torch.equal(self.offsets, other.offsets):
            return False
        if self.values.dtype.is_floating_point:
            return bool(torch.equal(torch.nan_to_num(self.values), torch.nan_to_num(other.values))) and bool(
                torch.equal(self.values.isnan(), other.values.isnan())
            )
        return torch.equal(self.values, other.values)

    def __repr__(self) -> str:
        return (
            f"Jagged(rows={len(self)}, total={len(self.values)}, dtype={str(self.values.dtype).removeprefix('torch.')})"
        )


P = ParamSpec("P")
R = TypeVar("R")


def takes_lists(function: Callable[P, R]) -> Callable[P, R]:
    """Lets a pure function take lists of numbers where it takes a Tensor, and lists of lists for a Jagged.

    Numbers become float32, unless all are bool or all are whole.
    """
    hints = {name: str(p.annotation) for name, p in inspect.signature(function).parameters.items()}

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> R:
        named = {**dict(zip(hints, args, strict=False)), **kwargs}
        made = {name: _from_list(value, hints.get(name, "")) for name, value in named.items()}
        return function(*(made[name] for name, _ in zip(hints, args, strict=False)), **{k: made[k] for k in kwargs})

    return wrapped


def _from_list(value: Any, hint: str) -> Any:
    if not isinstance(value, list | tuple):
        return value
    if "Jagged" in hint:
        return Jagged.from_rows([torch.as_tensor(row) for row in value])
    return torch.as_tensor(value) if "Tensor" in hint else value


def _dtype_of(rows: Sequence[Any]) -> torch.dtype:
    # torch makes an empty list float32, which could then not be joined with integer rows.
    for row in rows:
        if isinstance(row, Tensor):
            return row.dtype
        if len(row):
            return torch.as_tensor(list(row)).dtype
    return torch.int64


def num_rows(value: Any) -> int | None:
    """Number of rows of a tensor, a Jagged, a list or named columns; None of what belongs to a whole batch."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    if isinstance(value, Jagged | list):
        return len(value)
    if isinstance(value, dict):
        for column in value.values():
            if isinstance(column, Jagged):
                return len(column)
    return None


def select_rows(value: Any, index: Tensor) -> Any:
    """Rows of the same by an int64 index, in its order; what belongs to a whole batch stays."""
    if isinstance(value, Tensor):
        return value[index.to(value.device)]
    if isinstance(value, Jagged):
        return value.select(index)
    if isinstance(value, list):
        return [value[i] for i in index.tolist()]
    if isinstance(value, dict):
        return {k: v.select(index) for k, v in value.items()}
    return value


def concat_rows(place: str, values: list[Any]) -> Any:
    """Stacks rows of the same; AlignmentError where columns or batch-wide values differ at `place`."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(values)
    if isinstance(first, Jagged):
        return Jagged.concat(values)
    if isinstance(first, list):
        return [x for v in values for x in v]
    if isinstance(first, dict):
        if any(v.keys() != first.keys() for v in values):
            raise AlignmentError(
                f"{place}: batches with columns {[sorted(v) for v in values]}; expected the same columns in all."
            )
        return {k: Jagged.concat([v[k] for v in values]) for k in first}
    if any(v != first for v in values):
        raise AlignmentError(f"{place}: values {values} differ between batches; expected one value for all.")
    return first
