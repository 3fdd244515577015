"""Decayed sums over the tokens of each row, the linear part of eligibility traces: numbers in, numbers out."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from creditgraph.pipeline.core.jagged import Jagged

Style = Literal["recent", "both"]


class TraceWeights(Protocol):
    """What determines w(t,k); see the top of `trace.py`."""

    @property
    def decay(self) -> float:
        """d, per token."""

    @property
    def style(self) -> Style:
        """How weights fall."""


def trace_sum(x: Jagged, weights: TraceWeights, start: Tensor | None = None, past_only: bool = False) -> Jagged:
    """(W x)_t = Σ_{k≤t} w(t,k) x_k within each row, or Σ_{k<t}; linear and differentiable.

    Args:
        x: float values, zero where a token is not traced and before the token that counts as k = 1.
        weights: decay and style.
        start: int64 [rows], place of that token, 0 where missing; only style "both" depends on it.
        past_only: leaves out k = t, whose weight is 1.
    """
    row_map = partial(_weigh, weights, past_only)
    if weights.style != "both" or start is None or not bool(start.any()):
        return map_rows(x, row_map)
    # Tokens before `start` become a separate row.
    begin = x.offsets[:-1]
    offsets = torch.cat([torch.stack([begin, begin + start], dim=1).flatten(), x.offsets[-1:]])
    return x.with_values(map_rows(Jagged(x.values, offsets), row_map).values)


def _weigh(weights: TraceWeights, past_only: bool, grid: Tensor, reverse: bool) -> Tensor:
    """W or Wᵀ on [rows, length], the first column being k = 1."""
    if weights.style == "both":
        out = (_both_transposed if reverse else _both)(weights.decay, grid)
    else:
        out = scan(weights.decay, grid, reverse)
    return out.sub_(grid) if past_only else out


def _both(decay: float, x: Tensor) -> Tensor:
    # d^{t−k} ≥ d^{k−1} from k = ⌊t/2⌋ + 1 on. The m = ⌊t/2⌋ older tokens take d^{k−1}, a plain cumulative sum c, in
    # place of what the decayed sum z gives them: y_t = z_t + c_m − d^{t−m} z_m, for the two t of each m.
    half = x.shape[1] // 2
    powers = _powers(decay, half + 1, x)
    z = scan(decay, x, False)
    older = scan(1.0, x[:, :half] * powers[:-1], False)
    lost = z[:, :half] * powers[1:]
    z[:, 1::2] += older - lost
    z[:, 2::2] += older.sub_(lost, alpha=decay)[:, : (x.shape[1] - 1) // 2]
    return z


def _both_transposed(decay: float, y: Tensor) -> Tensor:
    half = y.shape[1] // 2
    powers = _powers(decay, half + 1, y)
    even = y[:, 1::2]
    odd = y[:, 2::2]
    older = even.clone()
    older[:, : odd.shape[1]] += odd
    lost = even.clone()
    lost[:, : odd.shape[1]].add_(odd, alpha=decay)
    z = y.clone()
    z[:, :half] -= lost.mul_(powers[1:])
    x = scan(decay, z, True)
    x[:, :half] += scan(1.0, older, True).mul_(powers[:-1])
    return x


def _powers(decay: float, count: int, like: Tensor) -> Tensor:
    """d^0 … d^{count−1}, made in float64."""
    exponents = torch.arange(count, dtype=torch.float64, device=like.device)
    return torch.pow(torch.full_like(exponents, decay), exponents).to(like.dtype)


# Linear maps of whole rows, such as the decayed sum z_t = x_t + d·z_{t−1}, in blocks: no loop over tokens.
#
# Rows are laid out in a [rows, width] grid, zero after a row's end, and cut into blocks of 64. Inside a block the scan
# is one matrix product with the triangle d^{t−k}; the last values of the blocks, carried with decay d^64, are the same
# problem on rows 64 times shorter. The adjoint (the backward pass) is the same scan run from the end.

BLOCK = 64

# (grid [rows, width], reverse) ↦ another such grid: a linear map of each row, or its transpose. It must not change
# its argument.
RowMap = Callable[[Tensor, bool], Tensor]


def map_rows(x: Jagged, row_map: RowMap) -> Jagged:
    """Applies a linear map to every row; differentiable through its transpose, and autograd records nothing inside."""
    if len(x.values) == 0:
        return x
    apply: Any = _RowMap.apply
    return x.with_values(apply(x.values, x.offsets, row_map))


class _RowMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor, row_map: RowMap) -> Tensor:
        ctx.save_for_backward(offsets)
        ctx.row_map = row_map
        ctx.longest = int(offsets.diff().max())
        return _on_grid(values, offsets, ctx.longest, row_map, reverse=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (offsets,) = ctx.saved_tensors
        return _on_grid(grads[0].contiguous(), offsets, ctx.longest, ctx.row_map, reverse=True), None, None


def _on_grid(values: Tensor, offsets: Tensor, longest: int, row_map: RowMap, reverse: bool) -> Tensor:
    rows = len(offsets) - 1
    if rows * longest == len(values):
        return row_map(values.view(rows, longest), reverse).reshape(-1)
    width = longest if longest <= BLOCK else -(-longest // BLOCK) * BLOCK
    grid = torch.ops.aten._jagged_to_padded_dense_forward(values[:, None], [offsets], [width], 0.0).squeeze(2)
    out = row_map(grid, reverse)
    flat: Tensor = torch.ops.aten._padded_dense_to_jagged_forward(out[:, :, None], [offsets], len(values)).squeeze(1)
    return flat


def scan(decay: float, grid: Tensor, reverse: bool) -> Tensor:
    """Decayed sums along the second dimension of [rows, length], in reverse from its end; a fresh tensor."""
    rows, length = grid.shape
    if length <= BLOCK:
        return grid @ _triangle(length, decay, reverse, grid)
    extra = -length % BLOCK
    blocks = (F.pad(grid, (0, extra)) if extra else grid).reshape(rows, -1, BLOCK)
    triangle = _triangle(BLOCK, decay, reverse, grid)
    local = blocks @ triangle
    carried = scan(decay**BLOCK, local[:, :, 0 if reverse else -1], reverse)
    powers = decay * triangle[-1 if reverse else 0]
    if reverse:
        local[:, :-1].addcmul_(carried[:, 1:, None], powers)
    else:
        local[:, 1:].addcmul_(carried[:, :-1, None], powers)
    return local.reshape(rows, -1)[:, :length]


def _triangle(size: int, decay: float, reverse: bool, like: Tensor) -> Tensor:
    """[k, t] ↦ d^{t−k} for k ≤ t, its transpose in reverse; made in float64."""
    step = torch.arange(size)
    gap = step[None, :] - step[:, None]
    powers = torch.tensor(decay, dtype=torch.float64).pow(gap.clamp(min=0)).where(gap >= 0, 0.0)
    return (powers.t() if reverse else powers).to(like.device, like.dtype)
