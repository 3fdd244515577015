"""Token ratio with PPO's clip: ρ_t = exp(log π_θ − log π_old), −min(ρ A, clip(ρ) A).

Source: GRPO (2402.03300, clip .2/.2), DAPO (2503.14476, clip .2/.28), Dr.GRPO (2503.20783) [P].
"""

from __future__ import annotations

from components.learner.objective.base import Inputs, Meters, Terms
from components.learner.objective.config import Objective
from components.learner.objective.ratio import clipped_loss, ratio_meters, safe_exp


def terms(inputs: Inputs, objective: Objective) -> Terms:
    """Per-token loss."""
    meters = Meters()
    mask, advantage = inputs.mask.values, inputs.advantage.values
    ratio = safe_exp(inputs.logprobs.values - inputs.old_logprobs.values, mask, meters)
    ratio_meters(meters, ratio, advantage, mask, objective)
    return Terms(loss=inputs.logprobs.with_values(clipped_loss(ratio, advantage, objective)), meters=meters)
