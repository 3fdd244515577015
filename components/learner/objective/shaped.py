"""Shaped probability on chosen tokens, the token ratio elsewhere: −f(p_t) A with f(p) = p/(p + γ), p_t = π_θ(y_t), no ratio and no clip.

Source: Critique-GRPO (2506.03106) with γ = 0.1 on refinement tokens [S, and the authors' released code: f(π_θ) takes
the place of the ratio and carries the gradient]. Column "shaping" of the credit holds γ per token, 0 for tokens of the
ratio. The gradient is A γ p/(p + γ)² ∇log p: largest at p = γ, small for tokens that are likely already and for very
unlikely ones. Without the column, or with zeros, this is the token objective.
"""

from __future__ import annotations

import torch

from components.learner.objective import token
from components.learner.objective.base import Inputs, Terms
from components.learner.objective.config import Objective

COLUMN = "shaping"


def terms(inputs: Inputs, objective: Objective) -> Terms:
    """Per-token loss; ratio metrics are over the tokens of the ratio, "shaped_weight" is the mean f over the others."""
    column = inputs.columns.get(COLUMN)
    if column is None:
        return token.terms(inputs, objective)
    gamma, mask = column.values, inputs.mask.values
    shaped = gamma > 0
    ratio = token.terms(inputs.replace(mask=inputs.mask.with_values(mask & ~shaped)), objective)
    p = inputs.logprobs.values.clamp(max=0.0).exp()
    weight = p / (p + torch.where(shaped, gamma, 1.0))
    ratio.meters.mean("shaped_weight", weight, mask & shaped)
    ratio.meters.mean("shaped_share", shaped.float(), mask)
    loss = torch.where(shaped, -weight * inputs.advantage.values, ratio.loss.values)
    return Terms(loss=ratio.loss.with_values(loss), meters=ratio.meters)
