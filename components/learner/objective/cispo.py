"""`cispo`: a clipped importance weight without a gradient of its own."""

from dataclasses import dataclass

from torch import Tensor

from creditgraph.components.learner.objective.base import LossInputs, Objective
from creditgraph.components.learner.objective.meters import Meters
from creditgraph.components.learner.objective.ratio import safe_exp
from creditgraph.pipeline.core.metric import Metric


class CISPO(Objective):
    """−sg[clip(ρ_t, 1−ε_lo, 1+ε_hi)] A_t log π_θ(y_t) with ρ_t = π_θ(y_t)/π_old(y_t). On-policy it is `reinforce`.

    Where PPO's clip removes the gradient of a token, every token keeps its own here, with a bounded weight. Source:
    CISPO (2506.13585), which sets no lower bound and does not give ε_hi; 2 is ours.
    """

    metrics = (
        Metric("ratio_overflow", "share", "tokens whose log ratio was clamped to keep exp finite"),
        Metric("weight_clipped", "share", "trained tokens whose importance weight was clipped"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Bounds of the weight."""

        clip_low: float = 1.0
        """weights are at least 1 − clip_low; 1 is no lower bound"""
        clip_high: float = 2.0
        """weights are at most 1 + clip_high"""

        def __post_init__(self) -> None:
            if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
                raise ValueError(
                    f"expected 0 ≤ clip_low ≤ 1 and clip_high ≥ 0, got clip_low {self.clip_low} and clip_high "
                    f"{self.clip_high}."
                )

    config: Config

    def terms(self, inputs: LossInputs, meters: Meters) -> Tensor:
        """Loss per token."""
        mask = inputs.mask.values
        ratio = safe_exp((inputs.logprobs.values - inputs.old_logprobs.values).detach(), mask, meters)
        weight = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        meters.share("weight_clipped", weight != ratio, mask)
        return -weight * inputs.advantage.values * inputs.logprobs.values
