"""Eligibility-trace ratios: log R_t = Σ_{k≤t} w(t,k) l_k, with w falling in t − k at d = γλ per token.

Weights (k, t count from 1 at the first trained token of a trajectory):

    recent         d^{t−k}                    GRPO-λ (2510.00194) [S]
    both           max(d^{t−k}, d^{k−1})      GRPO-λ, reported better than recent [S]
    weight_floor   max(d^{t−k}, floor)        [R]

Where the clip acts (`clip`):

    traced         min(R A, clip(R) A)                                                  GRPO-λ [S]
    current        e_t·min(ρ_t A, clip(ρ_t) A), e_t = exp(Σ_{k<t} w l_k)                P-trace P-A (2605.05965) [R], see below
    inside         R_t A with every l_k clipped to [log(1−ε_lo), log(1+ε_hi)] first     P-B [R], V-trace style
    normalised     min(R A, clip(R) A), log R_t = Σ w l_k / Σ w                          P-C [R]; d → 1 at t = T is GSPO's ratio
    eps_weight     W_t·min(ρ_t A, clip(ρ_t) A), W_k = Σ_{t≥k} w(t,k)                    [R]

The equations of P-trace and S-trace are not public in a form we could read; P-A is our reading of "partial trust-region
preservation": the trust region holds on the current ratio, history enters as a decayed importance weight. λ = 0 gives
the token objective in every placement but `inside`. S-trace puts m^H_t·l_t in place of l_t in the history, m^H the mask
of high entropy. With `history: stop_gradient` only l_t itself carries a gradient. A·d^{T−t}, decay from the end, is
another method.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from components.learner.objective.base import AllSum, Inputs, Meters, Terms
from components.learner.objective.config import Objective, Trace
from components.learner.objective.entropy_mask import COLUMN
from components.learner.objective.ratio import clipped_loss, ratio_meters, safe_exp
from components.learner.objective.scan import map_rows, scan
from pipeline.core.jagged import Jagged

SCALE_COLUMN, START_COLUMN = "trace_scale", "trace_start"


def trace_sum(x: Jagged, settings: Trace, start: Tensor | None = None, past_only: bool = False) -> Jagged:
    """(W x)_t = Σ_{k≤t} w(t,k) x_k within each row, or Σ_{k<t}; linear and differentiable.

    Args:
        x: float values, zero where a token is not traced and before the token that counts as k = 1.
        settings: decay, style and floor.
        start: int64 [rows], place of that token, 0 where missing; only style "both" depends on it.
        past_only: leaves out k = t, whose weight is 1.
    """
    row_map = partial(_weigh, settings, past_only)
    if settings.style != "both" or start is None or not bool(start.any()):
        return map_rows(x, row_map)
    # What lies before `start` becomes a row of its own.
    begin = x.offsets[:-1]
    offsets = torch.cat([torch.stack([begin, begin + start], dim=1).flatten(), x.offsets[-1:]])
    return x.with_values(map_rows(Jagged(x.values, offsets), row_map).values)


def _weigh(settings: Trace, past_only: bool, grid: Tensor, reverse: bool) -> Tensor:
    """W or Wᵀ on [rows, length], the first column being k = 1."""
    if settings.style == "both":
        out = (_both_transposed if reverse else _both)(settings.decay, grid)
    elif settings.style == "weight_floor" and _span(settings) < grid.shape[1]:
        out = (_floor_transposed if reverse else _floor)(settings, grid)
    else:
        out = scan(settings.decay, grid, reverse)
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
    even, odd = y[:, 1::2], y[:, 2::2]
    older, lost = even.clone(), even.clone()
    older[:, : odd.shape[1]] += odd
    lost[:, : odd.shape[1]].add_(odd, alpha=decay)
    z = y.clone()
    z[:, :half] -= lost.mul_(powers[1:])
    x = scan(decay, z, True)
    x[:, :half] += scan(1.0, older, True).mul_(powers[:-1])
    return x


def _floor(settings: Trace, x: Tensor) -> Tensor:
    # d^{t−k} ≥ floor for t − k < n: older tokens take the floor, y_t = z_t + floor·c_{t−n} − d^n z_{t−n}.
    n = _span(settings)
    z = scan(settings.decay, x, False)
    older = scan(1.0, x[:, :-n], False).mul_(settings.floor).sub_(z[:, :-n], alpha=settings.decay**n)
    z[:, n:] += older
    return z


def _floor_transposed(settings: Trace, y: Tensor) -> Tensor:
    n = _span(settings)
    z = y.clone()
    z[:, :-n].sub_(y[:, n:], alpha=settings.decay**n)
    x = scan(settings.decay, z, True)
    x[:, :-n].add_(scan(1.0, y[:, n:], True), alpha=settings.floor)
    return x


def _powers(decay: float, count: int, like: Tensor) -> Tensor:
    """d^0 … d^{count−1}, made in float64."""
    exponents = torch.arange(count, dtype=torch.float64, device=like.device)
    return torch.pow(torch.full_like(exponents, decay), exponents).to(like.dtype)


def _span(settings: Trace) -> int:
    """How many tokens, t itself included, keep their own weight above the floor."""
    if settings.decay >= 1 or settings.floor <= 0:
        return 1 << 40
    return 1 if settings.decay <= 0 else 1 + math.floor(math.log(settings.floor) / math.log(settings.decay) + 1e-9)


def _first_trained(mask: Jagged) -> Tensor:
    """int64 [rows]: index of the first trained token, 0 in a row without one."""
    later = mask.positions.masked_fill(~mask.values, 1 << 40).double()
    first = torch.segment_reduce(later, "min", offsets=mask.offsets, initial=float(1 << 40))
    return torch.where(first >= 1 << 40, 0, first.long())


def _own(x: Jagged, inputs: Inputs, objective: Objective) -> Jagged:
    """What enters the history, of values that are zero outside the mask: with an entropy mask only tokens of high entropy."""
    high = inputs.columns.get(COLUMN)
    # A product, not where: on a CPU, branches on scattered tokens cost more than the rest of the trace.
    return x if high is None or objective.entropy_mask.where == "loss" else x.with_values(x.values * high.values)


def _sum(x: Jagged, inputs: Inputs, settings: Trace, past_only: bool = False) -> Tensor:
    column = inputs.columns.get(START_COLUMN)
    begin = x.offsets[:-1].clamp(max=max(len(x.values) - 1, 0))
    start = None if column is None or len(x.values) == 0 else torch.where(x.lengths > 0, column.values[begin], 0)
    return trace_sum(x, settings, start, past_only).values


def _traced_ratio(log_ratio: Jagged, inputs: Inputs, objective: Objective) -> Tensor:
    """log R_t of log ratios that are zero outside the mask; linear in them."""
    settings, own = objective.trace, _own(log_ratio, inputs, objective)
    total, last = _sum(own, inputs, settings), own.values
    if settings.clip == "normalised":
        ones = _own(inputs.mask.to(last.dtype), inputs, objective)
        norm = _sum(ones, inputs, settings).clamp(min=1e-30)
        total, last = total / norm, last / norm
    return (total - last).detach() + last if settings.history == "stop_gradient" else total


def _history(log_ratio: Jagged, inputs: Inputs, objective: Objective) -> Tensor:
    """Σ_{k<t} w(t,k) l_k of log ratios that are zero outside the mask."""
    past = _sum(_own(log_ratio, inputs, objective), inputs, objective.trace, past_only=True)
    return past.detach() if objective.trace.history == "stop_gradient" else past


def prepare(inputs: Inputs, objective: Objective, all_sum: AllSum) -> Inputs:
    """Adds column "trace_scale": C_k / A on-policy, the factor by which the trace scales ∇log π(y_k)."""
    settings, mask = objective.trace, inputs.mask
    if settings.style == "both":
        inputs = inputs.replace(columns=inputs.columns | {START_COLUMN: mask.spread(_first_trained(mask))})
    with torch.enable_grad():
        leaf = torch.zeros_like(inputs.old_logprobs.values).requires_grad_()
        log_ratio = mask.with_values(torch.where(mask.values, leaf, 0.0))
        if settings.clip == "eps_weight":
            total = _sum(_own(log_ratio, inputs, objective), inputs, settings)
        elif settings.clip == "current":
            # P-A's current ratio is whole whatever the entropy mask says.
            total = _history(log_ratio, inputs, objective) + log_ratio.values
        else:
            total = _traced_ratio(log_ratio, inputs, objective)
        (scale,) = torch.autograd.grad(torch.where(mask.values, total, 0.0).sum(), leaf)
    scale = torch.where(mask.values, scale, 0.0)
    sums = all_sum(torch.stack([scale.double().sum(), mask.values.sum().double()]))
    mean = float(sums[0] / sums[1].clamp(min=1))
    columns = {SCALE_COLUMN: mask.with_values(scale)}
    if settings.normalise:
        columns["trace_mean_scale"] = mask.with_values(torch.full_like(scale, mean if mean > 0 else 1.0))
    return inputs.replace(columns=inputs.columns | columns)


def terms(inputs: Inputs, objective: Objective) -> Terms:
    """Per-token loss."""
    settings, meters = objective.trace, Meters()
    mask = inputs.mask.values
    advantage = inputs.advantage.values
    if settings.min_advantage is not None:
        advantage = advantage.clamp(min=settings.min_advantage)
    scale = inputs.columns[SCALE_COLUMN].values
    # The column is 0 where masked.
    meters.add("gradient_scale", scale.sum(), torch.count_nonzero(mask))
    # where, not a product: a masked token may hold inf or NaN.
    log_ratio = inputs.logprobs.with_values(torch.where(mask, inputs.logprobs.values - inputs.old_logprobs.values, 0.0))
    loss = _placed(log_ratio, inputs, advantage, scale, objective, meters)
    if settings.normalise:
        loss = loss / inputs.columns["trace_mean_scale"].values
    return Terms(loss=inputs.logprobs.with_values(loss), meters=meters)


def _placed(
    log_ratio: Jagged, inputs: Inputs, advantage: Tensor, scale: Tensor, objective: Objective, meters: Meters
) -> Tensor:
    settings, mask = objective.trace, inputs.mask.values
    if settings.clip == "inside":
        low, high = math.log(max(1 - objective.clip_low, 1e-8)), math.log(1 + objective.clip_high)
        clipped = log_ratio.with_values(log_ratio.values.clamp(low, high))
        ratio = safe_exp(_traced_ratio(clipped, inputs, objective), mask, meters)
        lost = (log_ratio.values < low) | (log_ratio.values > high)
        meters.share("clip_fraction", lost, mask)
        meters.mean("ratio_mean", ratio, mask)
        meters.top("ratio_max", ratio, mask)
        return -ratio * advantage
    if settings.clip in ("traced", "normalised"):
        ratio = safe_exp(_traced_ratio(log_ratio, inputs, objective), mask, meters)
        ratio_meters(meters, ratio, advantage, mask, objective)
        return clipped_loss(ratio, advantage, objective)
    ratio = safe_exp(log_ratio.values, mask, meters)
    ratio_meters(meters, ratio, advantage, mask, objective)
    loss = clipped_loss(ratio, advantage, objective)
    if settings.clip == "eps_weight":
        return loss * scale
    history = safe_exp(_history(log_ratio, inputs, objective), mask, meters)
    meters.mean("trace_weight", history, mask)
    meters.top("trace_weight_max", history, mask)
    return loss * history
