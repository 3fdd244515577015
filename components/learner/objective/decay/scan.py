"""Linear maps of whole rows, such as the decayed sum z_t = x_t + d·z_{t−1}, in blocks: no loop over tokens.

Rows are laid out in a [rows, width] grid, zero after a row's end, and cut into blocks of 64. Inside a block the scan is
one matrix product with the triangle d^{t−k}; the last values of the blocks, carried with decay d^64, are the same
problem on rows 64 times shorter. The adjoint (the backward pass) is the same scan run from the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from creditgraph.pipeline.core.jagged import Jagged

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
