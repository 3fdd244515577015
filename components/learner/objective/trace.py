"""`trace`: eligibility traces over the tokens of a response, log R_t = Σ_{k≤t} w(t,k) l_k, with w falling in t − k.

Weights (d = γλ per token; k, t count from 1 at the first trained token of a trajectory):

    recent         d^{t−k}                    GRPO-λ (2510.00194), second-hand
    both           max(d^{t−k}, d^{k−1})      GRPO-λ, second-hand, reported better than recent
    weight_floor   max(d^{t−k}, floor)        our own

Where the clip acts (`clip`):

    traced         min(R A, clip(R) A)                            GRPO-λ, second-hand
    current        e_t·min(ρ_t A, clip(ρ_t) A),                   P-trace (2605.05965), our reading, see below
                   e_t = exp(Σ_{k<t} w l_k)
    inside         R_t A with every l_k clipped to                our own, as V-trace does it
                   [log(1−ε_lo), log(1+ε_hi)] first
    normalised     min(R A, clip(R) A), log R_t = Σ w l_k / Σ w   our own; d → 1 at t = T is GSPO's ratio
    eps_weight     W_t·min(ρ_t A, clip(ρ_t) A),                   our own
                   W_k = Σ_{t≥k} w(t,k)

The equations of P-trace and S-trace are not public in a form we could read. Ours is one reading of "partial
trust-region preservation": the trust region holds on the current ratio, history enters as a decayed importance weight.
λ = 0 gives `ppo_clip` in every placement but `inside`. S-trace uses m^H_t·l_t instead of l_t in the history, m^H the
mask of high entropy. With `history: stop_gradient` only l_t itself carries a gradient. A·d^{T−t}, decay from the end,
is a different method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from components.learner.objective.base import LossInputs, Objective
from components.learner.objective.entropy_mask import IN_TRACE
from components.learner.objective.meters import Meters
from components.learner.objective.ratio import RATIO_METRICS, Clip, clipped_loss, safe_exp
from components.learner.objective.scan import map_rows, scan
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric

SCALE = "trace_scale"
"""column: C_k / A on-policy, the factor by which the trace scales ∇log π(y_k)"""
MEAN_SCALE = "trace_mean_scale"
"""column: the mean of SCALE over the trained tokens of the batch, the same number everywhere"""
START = "trace_start"
"""column: place of the row's first trained token, the same number in the whole row"""


class Trace(Objective):
    """Ratio of a token and, with decaying weight, of the tokens before it: GRPO-λ, P-trace, S-trace.

    The formulas are at the top of this file.
    """

    has_trace = True
    metrics = (
        *RATIO_METRICS,
        Metric("gradient_scale", "ratio", "trace objectives: mean factor on the gradient of a trained token"),
        Metric("trace_weight", "ratio", "trace objectives: mean weight Π ratio^w of the tokens before"),
        Metric("trace_weight_max", "ratio", "trace objectives: largest of these weights"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Clip):
        """Weights of past tokens, and placement of the clip."""

        decay: float = 0.99
        """d = γλ, per token; 0 is `ppo_clip`"""
        style: Literal["recent", "both", "weight_floor"] = "recent"
        """weights of past tokens, see the top of `trace.py`"""
        floor: float = 0.0
        """smallest weight, of style "weight_floor" only"""
        clip: Literal["traced", "current", "inside", "normalised", "eps_weight"] = "traced"
        """what the clip acts on: "traced" is GRPO-λ, "current" is P-trace (and S-trace)"""
        history: Literal["differentiated", "stop_gradient"] = "differentiated"
        """whether past tokens get a gradient through later ratios"""
        normalise: bool = False
        """divide the loss by the mean gradient scale of the batch, so that learning rates compare with those of
        `ppo_clip`"""
        min_advantage: float | None = None
        """lower bound of advantages (GRPO-λ uses −0.1); null is none"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if not 0 <= self.decay <= 1:
                raise ValueError(f"expected decay = γλ with 0 ≤ decay ≤ 1, got {self.decay}.")
            if not 0 <= self.floor <= 1 or (self.floor > 0) != (self.style == "weight_floor"):
                raise ValueError(
                    "expected 0 < floor ≤ 1 with style 'weight_floor' and floor 0 with the others, got floor "
                    f"{self.floor} with style '{self.style}'."
                )

    config: Config

    def prepare(self, inputs: LossInputs) -> LossInputs:
        """Adds the columns above, SCALE from the gradient at log ratios of 0."""
        mask = inputs.mask
        if self.config.style == "both":
            inputs = inputs.with_columns(**{START: mask.spread(_first_trained(mask))})
        with torch.enable_grad():
            leaf = torch.zeros_like(inputs.old_logprobs.values).requires_grad_()
            log_ratio = mask.with_values(torch.where(mask.values, leaf, 0.0))
            if self.config.clip == "eps_weight":
                total = self._sum(_in_trace(log_ratio, inputs), inputs)
            elif self.config.clip == "current":
                # The entropy mask does not act on the current ratio.
                total = self._history(log_ratio, inputs) + log_ratio.values
            else:
                total = self._traced_ratio(log_ratio, inputs)
            (scale,) = torch.autograd.grad(torch.where(mask.values, total, 0.0).sum(), leaf)
        scale = torch.where(mask.values, scale, 0.0)
        mean = float(scale.double().sum() / mask.values.sum().double().clamp(min=1))
        inputs = inputs.with_columns(**{SCALE: mask.with_values(scale)})
        if self.config.normalise:
            mean_scale = torch.full_like(scale, mean if mean > 0 else 1.0)
            inputs = inputs.with_columns(**{MEAN_SCALE: mask.with_values(mean_scale)})
        return inputs

    def terms(self, inputs: LossInputs, meters: Meters) -> Tensor:
        """Loss per token."""
        mask = inputs.mask.values
        advantage = inputs.advantage.values
        if self.config.min_advantage is not None:
            advantage = advantage.clamp(min=self.config.min_advantage)
        # The column is 0 where masked.
        meters.add("gradient_scale", inputs.columns[SCALE].values.sum(), torch.count_nonzero(mask))
        # where, not a product: a masked token may hold inf or NaN.
        log_ratio = torch.where(mask, inputs.logprobs.values - inputs.old_logprobs.values, 0.0)
        loss = self._placed(inputs.logprobs.with_values(log_ratio), advantage, inputs, meters)
        if self.config.normalise:
            loss = loss / inputs.columns[MEAN_SCALE].values
        return loss

    def _placed(self, log_ratio: Jagged, advantage: Tensor, inputs: LossInputs, meters: Meters) -> Tensor:
        """The loss with its clip where `clip` says, of log ratios that are zero outside the mask."""
        config = self.config
        mask = inputs.mask.values
        if config.clip == "inside":
            low = math.log(max(1 - config.clip_low, 1e-8))
            high = math.log(1 + config.clip_high)
            clipped = log_ratio.with_values(log_ratio.values.clamp(low, high))
            ratio = safe_exp(self._traced_ratio(clipped, inputs), mask, meters)
            meters.share("clip_fraction", (log_ratio.values < low) | (log_ratio.values > high), mask)
            meters.mean("ratio_mean", ratio, mask)
            meters.maximum("ratio_max", ratio, mask)
            return -ratio * advantage
        if config.clip in ("traced", "normalised"):
            ratio = safe_exp(self._traced_ratio(log_ratio, inputs), mask, meters)
            return clipped_loss(ratio, advantage, mask, config, meters)
        ratio = safe_exp(log_ratio.values, mask, meters)
        loss = clipped_loss(ratio, advantage, mask, config, meters)
        if config.clip == "eps_weight":
            return loss * inputs.columns[SCALE].values
        weight = safe_exp(self._history(log_ratio, inputs), mask, meters)
        meters.mean("trace_weight", weight, mask)
        meters.maximum("trace_weight_max", weight, mask)
        return loss * weight

    def _traced_ratio(self, log_ratio: Jagged, inputs: LossInputs) -> Tensor:
        """log R_t of log ratios that are zero outside the mask; linear in them."""
        own = _in_trace(log_ratio, inputs)
        total = self._sum(own, inputs)
        last = own.values
        if self.config.clip == "normalised":
            ones = _in_trace(inputs.mask.to(last.dtype), inputs)
            norm = self._sum(ones, inputs).clamp(min=1e-30)
            total = total / norm
            last = last / norm
        return (total - last).detach() + last if self.config.history == "stop_gradient" else total

    def _history(self, log_ratio: Jagged, inputs: LossInputs) -> Tensor:
        """Σ_{k<t} w(t,k) l_k of log ratios that are zero outside the mask."""
        past = self._sum(_in_trace(log_ratio, inputs), inputs, past_only=True)
        return past.detach() if self.config.history == "stop_gradient" else past

    def _sum(self, x: Jagged, inputs: LossInputs, past_only: bool = False) -> Tensor:
        column = inputs.columns.get(START)
        if column is None or len(x.values) == 0:
            return trace_sum(x, self.config, None, past_only).values
        begin = x.offsets[:-1].clamp(max=len(x.values) - 1)
        start = torch.where(x.lengths > 0, column.values[begin], 0)
        return trace_sum(x, self.config, start, past_only).values


def _in_trace(x: Jagged, inputs: LossInputs) -> Jagged:
    """Values that enter traces, from values that are zero outside the mask: all, or those of high entropy."""
    kept = inputs.columns.get(IN_TRACE)
    # A product, not where: on a CPU, branches on scattered tokens cost more than the rest of the trace.
    return x if kept is None else x.with_values(x.values * kept.values)


def _first_trained(mask: Jagged) -> Tensor:
    """int64 [rows]: index of the first trained token, 0 in a row without one."""
    later = mask.positions.masked_fill(~mask.values, 1 << 40).double()
    first = torch.segment_reduce(later, "min", offsets=mask.offsets, initial=float(1 << 40))
    return torch.where(first >= 1 << 40, 0, first.long())


def trace_sum(x: Jagged, config: Trace.Config, start: Tensor | None = None, past_only: bool = False) -> Jagged:
    """(W x)_t = Σ_{k≤t} w(t,k) x_k within each row, or Σ_{k<t}; linear and differentiable.

    Args:
        x: float values, zero where a token is not traced and before the token that counts as k = 1.
        config: decay, style and floor.
        start: int64 [rows], place of that token, 0 where missing; only style "both" depends on it.
        past_only: leaves out k = t, whose weight is 1.
    """
    row_map = partial(_weigh, config, past_only)
    if config.style != "both" or start is None or not bool(start.any()):
        return map_rows(x, row_map)
    # Tokens before `start` become a separate row.
    begin = x.offsets[:-1]
    offsets = torch.cat([torch.stack([begin, begin + start], dim=1).flatten(), x.offsets[-1:]])
    return x.with_values(map_rows(Jagged(x.values, offsets), row_map).values)


def _weigh(config: Trace.Config, past_only: bool, grid: Tensor, reverse: bool) -> Tensor:
    """W or Wᵀ on [rows, length], the first column being k = 1."""
    if config.style == "both":
        out = (_both_transposed if reverse else _both)(config.decay, grid)
    elif config.style == "weight_floor" and _span(config) < grid.shape[1]:
        out = (_floor_transposed if reverse else _floor)(config, grid)
    else:
        out = scan(config.decay, grid, reverse)
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


def _floor(config: Trace.Config, x: Tensor) -> Tensor:
    # d^{t−k} ≥ floor for t − k < n: older tokens take the floor, y_t = z_t + floor·c_{t−n} − d^n z_{t−n}.
    n = _span(config)
    z = scan(config.decay, x, False)
    older = scan(1.0, x[:, :-n], False).mul_(config.floor).sub_(z[:, :-n], alpha=config.decay**n)
    z[:, n:] += older
    return z


def _floor_transposed(config: Trace.Config, y: Tensor) -> Tensor:
    n = _span(config)
    z = y.clone()
    z[:, :-n].sub_(y[:, n:], alpha=config.decay**n)
    x = scan(config.decay, z, True)
    x[:, :-n].add_(scan(1.0, y[:, n:], True), alpha=config.floor)
    return x


def _powers(decay: float, count: int, like: Tensor) -> Tensor:
    """d^0 … d^{count−1}, made in float64."""
    exponents = torch.arange(count, dtype=torch.float64, device=like.device)
    return torch.pow(torch.full_like(exponents, decay), exponents).to(like.dtype)


def _span(config: Trace.Config) -> int:
    """Number of tokens, including t, whose weight is above the floor."""
    if config.decay >= 1 or config.floor <= 0:
        return 1 << 40
    return 1 if config.decay <= 0 else 1 + math.floor(math.log(config.floor) / math.log(config.decay) + 1e-9)
