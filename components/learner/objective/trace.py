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
preservation": the trust region holds on the current ratio, history enters as a decayed importance weight. λ = 0 gives the token
objective in every placement but `inside`. S-trace puts m^H_t·l_t in place of l_t in the history, m^H the mask of high entropy.
With `history: stop_gradient` only l_t itself carries a gradient. A·d^{T−t}, decay from the end, is another method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from components.learner.objective.base import AllSum, Inputs, Meters, Terms
from components.learner.objective.config import Objective, Trace
from components.learner.objective.entropy_mask import COLUMN
from components.learner.objective.ratio import clipped_loss, ratio_meters, safe_exp
from components.learner.objective.scan import decayed_sum
from pipeline.jagged import Jagged

SCALE_COLUMN = "trace_scale"


@dataclass(frozen=True, eq=False, kw_only=True)
class OlderWeights:
    """What older tokens weigh beside the recent ones; all per token t, numbers relative to t, so that rows can be selected.

    Attributes:
        back: int64, how many tokens before t the last older token lies.
        old, dropped: float32, weight of the cumulative sum up to there, and d^back, what is left of `recent` there; 0 without older tokens.
        early: float32, d^{k−1} of style "both", else 1.
    """

    back: Tensor
    old: Tensor
    dropped: Tensor
    early: Tensor

    NAMES: ClassVar[tuple[str, ...]] = ("back", "old", "dropped", "early")

    @staticmethod
    def of(columns: dict[str, Jagged]) -> OlderWeights | None:
        """From the columns that `prepare` made."""
        found = {n: columns[f"trace_{n}"].values for n in OlderWeights.NAMES if f"trace_{n}" in columns}
        return OlderWeights(**found) if found else None


def trace_sum(x: Jagged, settings: Trace, weights: OlderWeights | None = None) -> Jagged:
    """(W x)_t = Σ_{k≤t} w(t,k) x_k within each row; linear and differentiable.

    Args:
        x: float values, zero where a token is not traced and before the token that counts as k = 1.
        settings: decay, style and floor.
        weights: see `older_weights`; made here when missing, with k counted from the row's start.
    """
    recent = decayed_sum(x, settings.decay)
    if settings.style == "recent":
        return recent
    w = older_weights(x.positions, settings) if weights is None else weights
    old = decayed_sum(x.with_values(x.values * w.early), 1.0)
    index = (torch.arange(len(w.back), device=w.back.device) - w.back).clamp_(min=0)
    return x.with_values(recent.values + w.old * old.values.index_select(0, index) - w.dropped * recent.values.index_select(0, index))


def older_weights(place: Tensor, settings: Trace) -> OlderWeights:
    """For styles beside "recent"; `place` is int64, k − 1 of each token, negative before the first trained one."""
    early = old = torch.ones_like(place, dtype=torch.float32)
    if settings.style == "both":
        # d^{t−k} ≥ d^{k−1} from k = ⌊t/2⌋ + 1 on: older tokens take d^{k−1}, a plain cumulative sum.
        cut = torch.div(place + 1, 2, rounding_mode="floor")
        early = _power(settings.decay, place)
    else:
        # d^{t−k} ≥ floor for t − k ≤ n: older tokens take the floor.
        cut = place - _span(settings)
        old = old * settings.floor
    has_old = cut > 0
    # `cut` tokens from k = 1 on are older; the last of them lies place − cut + 1 before t.
    back = (place - cut + 1).clamp(min=0)
    dropped = _power(settings.decay, back)
    return OlderWeights(back=back, old=torch.where(has_old, old, 0.0), dropped=torch.where(has_old, dropped, 0.0), early=early)


def _power(decay: float, exponent: Tensor) -> Tensor:
    return torch.pow(torch.tensor(decay, dtype=torch.float64, device=exponent.device), exponent.clamp(min=0)).float()


def _span(settings: Trace) -> int:
    if settings.decay >= 1 or settings.floor <= 0:
        return 1 << 40
    return 0 if settings.decay <= 0 else math.floor(math.log(settings.floor) / math.log(settings.decay) + 1e-9)


def _first_trained(mask: Jagged) -> Tensor:
    """int64 [rows]: index of the first trained token, 0 in a row without one."""
    later = mask.positions.masked_fill(~mask.values, 1 << 40).double()
    first = torch.segment_reduce(later, "min", offsets=mask.offsets, initial=float(1 << 40))
    return torch.where(first >= 1 << 40, 0, first.long())


def _traced(inputs: Inputs, objective: Objective) -> Tensor:
    # bool over tokens: those that enter the history.
    high = inputs.columns.get(COLUMN)
    return inputs.mask.values if high is None or objective.entropy_mask.where == "loss" else inputs.mask.values & high.values


def _trace(log_ratio: Jagged, inputs: Inputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """History Σ_{k<t} w l_k and own part w(t,t) l_t of log R_t (both over Σ w when normalised); linear in l."""
    settings = objective.trace
    traced, weights = _traced(inputs, objective), OlderWeights.of(inputs.columns)
    own = torch.where(traced, log_ratio.values, 0.0)
    total = trace_sum(log_ratio.with_values(own), settings, weights).values
    if settings.clip == "normalised":
        ones = trace_sum(log_ratio.with_values(traced.to(own.dtype)), settings, weights).values
        norm = ones.clamp(min=1e-30)
        total, own = total / norm, own / norm
    past = total - own
    return past.detach() if settings.history == "stop_gradient" else past, own


def prepare(inputs: Inputs, objective: Objective, all_sum: AllSum) -> Inputs:
    """Adds column "trace_scale": C_k / A on-policy, the factor by which the trace scales ∇log π(y_k)."""
    settings = objective.trace
    if settings.style != "recent":
        mask = inputs.mask
        weights = older_weights(mask.positions - mask.spread(_first_trained(mask)).values, settings)
        made = {f"trace_{n}": mask.with_values(getattr(weights, n)) for n in OlderWeights.NAMES}
        inputs = inputs.replace(columns=inputs.columns | made)
    with torch.enable_grad():
        leaf = torch.zeros_like(inputs.old_logprobs.values).requires_grad_()
        log_ratio = inputs.old_logprobs.with_values(leaf)
        if settings.clip == "eps_weight":
            traced = torch.where(_traced(inputs, objective), leaf, 0.0)
            total = trace_sum(log_ratio.with_values(traced), settings, OlderWeights.of(inputs.columns)).values
        else:
            past, own = _trace(log_ratio, inputs, objective)
            # P-A's current ratio is whole whatever the entropy mask says.
            total = past + (leaf if settings.clip == "current" else own)
        (scale,) = torch.autograd.grad(torch.where(inputs.mask.values, total, 0.0).sum(), leaf)
    sums = all_sum(torch.stack([torch.where(inputs.mask.values, scale, 0.0).double().sum(), inputs.mask.values.sum().double()]))
    mean = float(sums[0] / sums[1].clamp(min=1))
    columns = {SCALE_COLUMN: inputs.mask.with_values(scale)}
    if settings.normalise:
        columns["trace_mean_scale"] = inputs.mask.with_values(torch.full_like(scale, mean if mean > 0 else 1.0))
    return inputs.replace(columns=inputs.columns | columns)


def terms(inputs: Inputs, objective: Objective) -> Terms:
    """Per-token loss."""
    settings, meters = objective.trace, Meters()
    mask = inputs.mask.values
    advantage = inputs.advantage.values
    if settings.min_advantage is not None:
        advantage = advantage.clamp(min=settings.min_advantage)
    scale = inputs.columns[SCALE_COLUMN].values
    meters.mean("gradient_scale", scale, mask)
    log_ratio = inputs.logprobs.with_values(torch.where(mask, inputs.logprobs.values - inputs.old_logprobs.values, 0.0))
    loss = _placed(log_ratio, inputs, advantage, scale, objective, meters)
    if settings.normalise:
        loss = loss / inputs.columns["trace_mean_scale"].values
    return Terms(loss=inputs.logprobs.with_values(loss), meters=meters)


def _placed(log_ratio: Jagged, inputs: Inputs, advantage: Tensor, scale: Tensor, objective: Objective, meters: Meters) -> Tensor:
    settings, mask = objective.trace, inputs.mask.values
    if settings.clip == "inside":
        low, high = math.log(max(1 - objective.clip_low, 1e-8)), math.log(1 + objective.clip_high)
        clipped = log_ratio.with_values(log_ratio.values.clamp(low, high))
        ratio = safe_exp(torch.add(*_trace(clipped, inputs, objective)), mask, meters)
        lost = (log_ratio.values < low) | (log_ratio.values > high)
        meters.share("clip_fraction", lost, mask)
        meters.mean("ratio_mean", ratio, mask)
        meters.top("ratio_max", ratio, mask)
        return -ratio * advantage
    if settings.clip in ("traced", "normalised"):
        ratio = safe_exp(torch.add(*_trace(log_ratio, inputs, objective)), mask, meters)
        ratio_meters(meters, ratio, advantage, mask, objective)
        return clipped_loss(ratio, advantage, objective)
    ratio = safe_exp(log_ratio.values, mask, meters)
    ratio_meters(meters, ratio, advantage, mask, objective)
    loss = clipped_loss(ratio, advantage, objective)
    if settings.clip == "eps_weight":
        return loss * scale
    history = safe_exp(_trace(log_ratio, inputs, objective)[0], mask, meters)
    meters.mean("trace_weight", history, mask)
    meters.top("trace_weight_max", history, mask)
    return loss * history
