"""Importance weights of the learner against the sampling engine.

Engine and learner compute the same policy with other kernels and precision, and a rollout may have older weights. With
l_t = log π_old(y_t) − log π_engine(y_t) over the n trained tokens of a row (π_old: the learner before a first step):

    token       w_t = min(exp(l_t), cap)            truncated per token: bounded variance, biased over long rows
    sequence    w_t = min(exp(Σ_u l_u), cap)        the row's weight on each of its tokens: unbiased but for the cap

Weights carry no gradient. Truncation is Ionides (2008); the sequence form is that of several trainers, written from its
definition.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from creditgraph.components.learner.objective.base import MAX_LOG_RATIO, LossInputs
from creditgraph.components.learner.objective.meters import Meters

WEIGHT = "importance_weight"
"""column of float32: factor of each token's loss"""


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Weights learner/engine on the loss. Needs old_logprobs: recompute."""

    cap: float = 0.0
    """largest weight; 0 leaves the loss unweighted, 2 is usual"""
    level: Literal["token", "sequence"] = "token"
    """a weight per token, or the product of a row's weights for each of its tokens"""

    def __post_init__(self) -> None:
        if self.cap < 0:
            raise ValueError(f"expected cap ≥ 0 (0 is off), got {self.cap:g}.")

    @property
    def used(self) -> bool:
        """Whether weights are computed at all."""
        return self.cap > 0


def correct(inputs: LossInputs, settings: Importance, meters: Meters) -> LossInputs:
    """Adds the column of weights."""
    if not settings.used:
        return inputs
    mask = inputs.mask.values
    log_weights = torch.where(mask, inputs.old_logprobs.values - inputs.engine_logprobs.values, 0.0)
    # Summed in float64: a row has thousands of terms of both signs.
    per_token = inputs.mask.with_values(log_weights.double())
    logs = per_token if settings.level == "token" else per_token.spread(per_token.sum())
    weight = logs.values.clamp(max=MAX_LOG_RATIO).exp()
    capped = weight.clamp(max=settings.cap).float()
    meters.mean("importance_weight", capped, mask)
    meters.share("importance_capped", weight > settings.cap, mask)
    return inputs.with_columns(**{WEIGHT: inputs.mask.with_values(capped)})
