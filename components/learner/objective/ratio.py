"""Shared code of the ratio objectives: clip settings, a safe exponential, the clipped surrogate and its metrics."""

from dataclasses import dataclass

import torch
from torch import Tensor

from creditgraph.components.learner.objective.base import MAX_LOG_RATIO
from creditgraph.components.learner.objective.meters import Meters
from creditgraph.pipeline.core.jagged import Jagged, takes_lists
from creditgraph.pipeline.core.metric import Metric

RATIO_METRICS: tuple[Metric, ...] = (
    Metric("ratio_mean", "ratio", "mean of π/π_old over trained tokens (of sequences for `gspo`)"),
    Metric("ratio_max", "ratio", "largest π/π_old"),
    Metric("ratio_overflow", "share", "tokens whose log ratio was clamped to keep exp finite"),
    Metric("clip_fraction", "share", "trained tokens that get no gradient from the objective because of clipping"),
    Metric("clip_fraction_low", "share", "those clipped from below"),
    Metric("clip_fraction_high", "share", "those clipped from above"),
    Metric("clip_fraction_dual", "share", "those stopped by the second clip of negative advantages"),
)


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Bounds of PPO's clip."""

    clip_low: float = 0.2
    """ratios below 1 − clip_low lose their gradient where the advantage is negative"""
    clip_high: float = 0.2
    """ratios above 1 + clip_high lose their gradient where the advantage is positive"""
    dual_clip: float = 0.0
    """for negative advantages the loss stops growing beyond this ratio (3 is usual); 0 is off"""

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ValueError(
                f"expected 0 ≤ clip_low ≤ 1 and clip_high ≥ 0, got clip_low {self.clip_low} and clip_high "
                f"{self.clip_high}."
            )
        if self.dual_clip and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"expected dual_clip above 1 + clip_high = {1 + self.clip_high}, or 0 (off), got {self.dual_clip}."
            )


def safe_exp(log_ratio: Tensor, mask: Tensor, meters: Meters) -> Tensor:
    """exp with |log ratio| clamped to 20; the share of clamped trained tokens is metric "ratio_overflow"."""
    clamped = ~(log_ratio.detach().abs() <= MAX_LOG_RATIO)
    meters.share("ratio_overflow", clamped, mask)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@takes_lists
def mean_log_ratio(log_ratio: Jagged, gate: Tensor) -> Tensor:
    """Mean of the gated log ratios of each row at each of its tokens, float32 [total]; 0 in a row without a gate."""
    count = log_ratio.with_values(gate).sum().clamp(min=1)
    share = gate.float() / log_ratio.spread(count).values
    # where, not a product: a masked token may hold inf. Summed in float64 so that a row's cut from its batch changes
    # no bit.
    weighted = torch.where(gate, log_ratio.values, 0.0).double() * share
    return log_ratio.spread(log_ratio.with_values(weighted).sum()).values.float()


@takes_lists
def surrogate(ratio: Tensor, advantage: Tensor, clip: Clip) -> Tensor:
    """−min(R A, clip(R, 1−ε_lo, 1+ε_hi) A), and for A < 0 at most −c A under dual clip. Elementwise, all [n]."""
    bounded = ratio.clamp(1 - clip.clip_low, 1 + clip.clip_high)
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    if clip.dual_clip:
        loss = torch.where(advantage < 0, torch.minimum(loss, -clip.dual_clip * advantage), loss)
    return loss


def clip_flags(ratio: Tensor, advantage: Tensor, clip: Clip) -> dict[str, Tensor]:
    """bool [n] by metric: the terms of `surrogate` without a gradient, from below, above and by a dual clip."""
    ratio = ratio.detach()
    flags = {
        "clip_fraction_low": (advantage < 0) & (ratio < 1 - clip.clip_low),
        "clip_fraction_high": (advantage > 0) & (ratio > 1 + clip.clip_high),
    }
    if clip.dual_clip:
        flags["clip_fraction_dual"] = (advantage < 0) & (ratio > clip.dual_clip)
    return flags


def clip_meters(flags: dict[str, Tensor], mask: Tensor, meters: Meters) -> None:
    """Metrics: shares of trained tokens that lost their gradient to a clip, by side and together."""
    for name, flag in flags.items():
        meters.share(name, flag, mask)
    meters.share("clip_fraction", torch.stack(list(flags.values())).any(0), mask)


def ratio_meters(ratio: Tensor, mask: Tensor, meters: Meters) -> None:
    """Metrics: mean and maximum of the ratio over trained tokens."""
    meters.mean("ratio_mean", ratio.detach(), mask)
    meters.maximum("ratio_max", ratio.detach(), mask)


def clipped_loss(ratio: Tensor, advantage: Tensor, mask: Tensor, clip: Clip, meters: Meters) -> Tensor:
    """`surrogate` with its metrics, for objectives whose tokens each have one term."""
    clip_meters(clip_flags(ratio, advantage, clip), mask, meters)
    ratio_meters(ratio, mask, meters)
    return surrogate(ratio, advantage, clip)
