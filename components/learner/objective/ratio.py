"""Pieces that all ratio objectives share: a safe exponential, the clipped surrogate, and its metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from components.learner.objective.base import MAX_LOG_RATIO, Meters
from components.learner.objective.config import Objective


def safe_exp(log_ratio: Tensor, mask: Tensor, meters: Meters) -> Tensor:
    """exp with |log ratio| clamped to 20; the share of clamped trained tokens is metric "ratio_overflow"."""
    lost = ~(log_ratio.detach().abs() <= MAX_LOG_RATIO)
    meters.share("ratio_overflow", lost, mask)
    apply: Any = _SafeExp.apply
    ratio: Tensor = apply(log_ratio, lost)
    return ratio


class _SafeExp(torch.autograd.Function):
    # Beyond the clamp, and where the log ratio is NaN, the gradient is 0 as that of clamp is.
    @staticmethod
    def forward(ctx: Any, log_ratio: Tensor, lost: Tensor) -> Tensor:
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()
        ctx.save_for_backward(ratio, lost)
        return ratio

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ratio, lost = ctx.saved_tensors
        return (grads[0] * ratio).masked_fill_(lost, 0.0), None


def clipped_loss(ratio: Tensor, advantage: Tensor, objective: Objective) -> Tensor:
    """−min(R A, clip(R, 1−ε_lo, 1+ε_hi) A), and for A < 0 at most −c A under dual clip. Elementwise."""
    bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    if objective.dual_clip:
        loss = torch.where(advantage < 0, torch.minimum(loss, -objective.dual_clip * advantage), loss)
    return loss


def ratio_meters(meters: Meters, ratio: Tensor, advantage: Tensor, mask: Tensor, objective: Objective) -> None:
    """Clip fractions (tokens that lost their gradient), mean and maximum of the ratio, over trained tokens."""
    ratio = ratio.detach()
    low = (advantage < 0) & (ratio < 1 - objective.clip_low)
    high = (advantage > 0) & (ratio > 1 + objective.clip_high)
    dual = (advantage < 0) & (ratio > objective.dual_clip) if objective.dual_clip else torch.zeros_like(low)
    meters.share("clip_fraction", low | high | dual, mask)
    meters.share("clip_fraction_low", low, mask)
    meters.share("clip_fraction_high", high, mask)
    if objective.dual_clip:
        meters.share("clip_fraction_dual", dual, mask)
    meters.mean("ratio_mean", ratio, mask)
    meters.top("ratio_max", ratio, mask)
