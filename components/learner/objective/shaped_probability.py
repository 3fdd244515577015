"""`shaped_probability`: probabilities instead of ratios on chosen tokens, the objective of Critique-GRPO."""

import torch
from torch import Tensor

from creditgraph.components.learner.objective.base import LossInputs
from creditgraph.components.learner.objective.meters import Meters
from creditgraph.components.learner.objective.ppo_clip import PPOClip
from creditgraph.components.learner.objective.ratio import RATIO_METRICS
from creditgraph.pipeline.core.metric import Metric

GAMMA = "shaping"


class ShapedProbability(PPOClip):
    """−f(p_t) A_t with f(p) = p/(p + γ), p_t = π_θ(y_t), on tokens with a γ > 0; `ppo_clip` on the others.

    Column "shaping" of the credit is γ. The gradient is A γ p/(p + γ)² ∇log p: largest at p = γ, small for tokens that
    are already likely and for very unlikely ones. These tokens have no ratio and no clip. Ratio metrics are over the
    other tokens. Source: Critique-GRPO (2506.03106) with γ = 0.1 on refinement tokens; second-hand, and the authors'
    released code, where f(π_θ) takes the place of the ratio and carries the gradient.
    """

    metrics = (
        *RATIO_METRICS,
        Metric("shaped_weight", "ratio", "mean shaped weight p/(p + γ) over shaped tokens"),
        Metric("shaped_share", "share", "trained tokens that are shaped"),
    )

    def terms(self, inputs: LossInputs, meters: Meters) -> Tensor:
        """Loss per token."""
        gamma = inputs.columns.get(GAMMA)
        if gamma is None:
            return super().terms(inputs, meters)
        mask = inputs.mask.values
        shaped = gamma.values > 0
        ratio_loss = super().terms(inputs.replace(mask=inputs.mask.with_values(mask & ~shaped)), meters)
        p = inputs.logprobs.values.clamp(max=0.0).exp()
        weight = p / (p + torch.where(shaped, gamma.values, 1.0))
        meters.mean("shaped_weight", weight, mask & shaped)
        meters.share("shaped_share", shaped, mask)
        return torch.where(shaped, -weight * inputs.advantage.values, ratio_loss)
