"""Importance weights of the learner against the sampling engine, and rejection of rows where the two are too far apart.

Engine and learner compute the same policy with other kernels and precision, and a rollout may have older weights. With
l_t = log π_old(y_t) − log π_engine(y_t) over the n trained tokens of a row (π_old: the learner before a first step):

    token       w_t = min(exp(l_t), cap)            truncated per token: bounded variance, biased over long rows
    sequence    w_t = min(exp(Σ_u l_u), cap)        the row's weight on each of its tokens: unbiased but for the cap

Weights carry no gradient. A rejected row leaves the mask, and with it the denominators: by the geometric mean of its
weights exp(Σ l / n), which does not grow with its length, or by its smallest w_t, which finds a token that the
learner would hardly have sampled. Truncation is Ionides (2008); the sequence and rejection forms are those of several
trainers, written from their definitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from creditgraph.components.learner.objective.base import MAX_LOG_RATIO, LossInputs
from creditgraph.components.learner.objective.meters import Meters
from creditgraph.pipeline.core.jagged import Jagged

WEIGHT = "importance_weight"
"""column of float32: factor of each token's loss"""


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Weights learner/engine on the loss, and rows that are not trained on. Needs old_logprobs: recompute."""

    cap: float = 0.0
    """largest weight; 0 leaves the loss unweighted, 2 is usual"""
    level: Literal["token", "sequence"] = "token"
    """a weight per token, or the product of a row's weights for each of its tokens"""
    reject_mean_below: float = 0.0
    """rows whose geometric mean of weights is below this are not trained on; 0 is off, .999 is strict"""
    reject_mean_above: float = 0.0
    """rows whose geometric mean of weights is above this are not trained on; 0 is off, 1.001 is strict"""
    reject_token_below: float = 0.0
    """rows with a token whose weight is below this are not trained on; 0 is off, 1e-4 finds tokens that the learner
    would hardly sample"""

    def __post_init__(self) -> None:
        limits = (self.cap, self.reject_mean_below, self.reject_mean_above, self.reject_token_below)
        if min(limits) < 0:
            raise ValueError(f"expected numbers ≥ 0 (0 is off), got {', '.join(f'{x:g}' for x in limits)}.")
        if self.reject_mean_below > 1 or self.reject_token_below > 1 or 0 < self.reject_mean_above < 1:
            raise ValueError(
                "equal policies have weight 1, and would be rejected; expected reject_mean_below ≤ 1, "
                f"reject_token_below ≤ 1 and reject_mean_above ≥ 1 (or 0), got {self.reject_mean_below:g}, "
                f"{self.reject_token_below:g} and {self.reject_mean_above:g}."
            )

    @property
    def used(self) -> bool:
        """Whether weights are computed at all."""
        return any((self.cap, self.reject_mean_below, self.reject_mean_above, self.reject_token_below))


def correct(inputs: LossInputs, settings: Importance, meters: Meters) -> LossInputs:
    """Adds the column of weights, and takes rejected rows out of the mask; counts both."""
    if not settings.used:
        return inputs
    mask = inputs.mask.values
    log_weights = torch.where(mask, inputs.old_logprobs.values - inputs.engine_logprobs.values, 0.0)
    # Summed in float64: a row has thousands of terms of both signs.
    per_token = inputs.mask.with_values(log_weights.double())
    trained = inputs.mask.sum() > 0
    rejected = _rejected(per_token, inputs.mask.sum(), settings)
    meters.share("importance_rejected", rejected, trained)
    mask = mask & ~inputs.mask.spread(rejected).values
    inputs = inputs.replace(mask=inputs.mask.with_values(mask))
    if not settings.cap:
        return inputs
    logs = per_token if settings.level == "token" else per_token.spread(per_token.sum())
    weight = logs.values.clamp(max=MAX_LOG_RATIO).exp()
    capped = weight.clamp(max=settings.cap).float()
    meters.mean("importance_weight", capped, mask)
    meters.share("importance_capped", weight > settings.cap, mask)
    return inputs.with_columns(**{WEIGHT: inputs.mask.with_values(capped)})


def _rejected(log_weights: Jagged, tokens: Tensor, settings: Importance) -> Tensor:
    """bool [rows]; rows without a trained token have mean 1 and are not rejected."""
    mean = (log_weights.sum() / tokens.clamp(min=1)).exp()
    strange = log_weights.with_values((log_weights.values.exp() < settings.reject_token_below).double()).sum() > 0
    low = mean < settings.reject_mean_below
    high = (mean > settings.reject_mean_above) & (settings.reject_mean_above > 0)
    return strange | low | high
