"""`fipo`: PPO's clip, with each token's advantage weighed by how the update moves the tokens from it on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from creditgraph.components.learner.objective.base import MAX_LOG_RATIO, LossInputs, Objective
from creditgraph.components.learner.objective.decay import map_rows, scan
from creditgraph.components.learner.objective.meters import Meters
from creditgraph.components.learner.objective.ratio import RATIO_METRICS, Clip, clipped_loss, safe_exp
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric

OUTLIER = 10.0  # a token whose ratio is above takes no part in F
UNSAFE = 4.0  # where the advantage is negative and the ratio above, the weight is at most 1


def future_sum(x: Jagged, decay: float) -> Tensor:
    """F_t = Σ_{k≥t} d^{k−t} x_k within each row, [tokens]; linear and differentiable.

    Args:
        x: float, 0 where a token does not count; it counts in the distance k − t all the same.
        decay: d, per token.
    """
    return map_rows(x, lambda grid, reverse: scan(decay, grid, not reverse)).values


class FIPO(Objective):
    """−min(ρ_t f_t A_t, clip(ρ_t) f_t A_t), f_t = clip(exp F_t, low, high), F_t = Σ_{k≥t} γ^{k−t} log ρ_k.

    A token whose continuation has become likelier under the update gets a larger step. f has no gradient of its own.
    On-policy, at the first step of a batch, all f are 1 and it is `ppo_clip`.

    Source: 2603.19835, second-hand (ms-swift's documentation and code): γ = 2^(−1/half_life), half-life 32, bounds
    1 and 1.2, tokens with a ratio above 10 left out of F, and f at most 1 where A < 0 and ρ > 4. Its example script has
    bounds .8 and 1.2, and 3 for the latter ratio.
    """

    metrics = (
        *RATIO_METRICS,
        Metric("future_weight", "ratio", "fipo: mean weight f of a trained token's advantage"),
        Metric("future_bounded", "share", "fipo: trained tokens whose weight a bound changed"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Clip):
        """Bounds of the ratio, and how far tokens look ahead."""

        half_life: float = 32.0
        """tokens after which a later token counts half"""
        weight_low: float = 1.0
        """smallest weight f; 1 never lowers an advantage"""
        weight_high: float = 1.2
        """largest weight f"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if not (self.half_life > 0 and 0 <= self.weight_low <= 1 <= self.weight_high):
                raise ValueError(
                    f"expected half_life > 0 and 0 ≤ weight_low ≤ 1 ≤ weight_high, got {self.half_life}, "
                    f"{self.weight_low} and {self.weight_high}."
                )

    config: Config

    def terms(self, inputs: LossInputs, meters: Meters) -> Tensor:
        """Loss per token."""
        config, mask, advantage = self.config, inputs.mask.values, inputs.advantage.values
        ratio = safe_exp(inputs.logprobs.values - inputs.old_logprobs.values, mask, meters)
        moved = ratio.detach()
        counts = mask & (moved <= OUTLIER)
        future = future_sum(
            inputs.mask.with_values(torch.where(counts, moved.log(), 0.0)), 2 ** (-1 / config.half_life)
        )
        raw = future.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        weight = raw.clamp(config.weight_low, config.weight_high)
        meters.share("future_bounded", (raw < config.weight_low) | (raw > config.weight_high), mask)
        weight = torch.where((advantage < 0) & (moved > UNSAFE), weight.clamp(max=1.0), weight)
        meters.mean("future_weight", weight, mask)
        return clipped_loss(ratio, weight * advantage, mask, config, meters)
