"""`ppo_clip`: one ratio per token with PPO's clip, the objective of GRPO and its relatives."""

from dataclasses import dataclass

from torch import Tensor

from creditgraph.components.learner.objective.base import LossInputs, Objective
from creditgraph.components.learner.objective.meters import Meters
from creditgraph.components.learner.objective.ratio import RATIO_METRICS, Clip, clipped_loss, safe_exp


class PPOClip(Objective):
    """−min(ρ_t A_t, clip(ρ_t, 1−ε_lo, 1+ε_hi) A_t) with ρ_t = exp(log π_θ(y_t) − log π_old(y_t)).

    Source: GRPO (2402.03300, clip .2/.2), DAPO (2503.14476, clip .2/.28), Dr.GRPO (2503.20783).
    """

    metrics = RATIO_METRICS

    @dataclass(frozen=True, kw_only=True)
    class Config(Clip):
        """Bounds of the ratio."""

    config: Config

    def terms(self, inputs: LossInputs, meters: Meters) -> Tensor:
        """Loss per token."""
        mask = inputs.mask.values
        ratio = safe_exp(inputs.logprobs.values - inputs.old_logprobs.values, mask, meters)
        return clipped_loss(ratio, inputs.advantage.values, mask, self.config, meters)
