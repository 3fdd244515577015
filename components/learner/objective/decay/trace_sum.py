"""Decayed sums over the tokens of each row, the linear part of eligibility traces: numbers in, numbers out."""

from __future__ import annotations

from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from creditgraph.components.learner.objective.decay.scan import map_rows, scan
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
