"""The loss of a learner: an objective's terms, and what may be added to any of them."""

from __future__ import annotations

import torch

from components.learner.objective import entropy_mask
from components.learner.objective.base import MAX_LOG_RATIO, LossInputs
from components.learner.objective.kl import kl_estimate
from components.learner.objective.meters import AllSum, Meters
from components.learner.objective.settings import ObjectiveSettings
from pipeline.core.jagged import Jagged

KL_WEIGHT = "kl_weight"
"""column of the credit: a multiple of the KL coefficient per token (SCoRe holds first attempts back harder)"""


@torch.no_grad()
def prepare(inputs: LossInputs, settings: ObjectiveSettings, all_sum: AllSum) -> LossInputs:
    """Adds the entropy mask, then what the objective needs to know of the whole batch; all replicas must call it."""
    inputs = entropy_mask.add_columns(inputs, settings.entropy_mask, all_sum)
    return settings.build().prepare(inputs, all_sum)


def loss_terms(inputs: LossInputs, settings: ObjectiveSettings, meters: Meters) -> Jagged:
    """Loss per token with every optional term: entropy mask, importance weight, KL penalty, entropy bonus."""
    loss = settings.build().terms(inputs, meters)
    mask = inputs.mask.values
    if entropy_mask.HIGH in inputs.columns:
        meters.share("high_entropy", inputs.columns[entropy_mask.HIGH].values, mask)
    if entropy_mask.IN_LOSS in inputs.columns:
        loss = torch.where(inputs.columns[entropy_mask.IN_LOSS].values, loss, 0.0)
    if settings.importance_cap:
        log_weight = (inputs.old_logprobs.values - inputs.engine_logprobs.values).clamp(max=MAX_LOG_RATIO)
        weight = log_weight.exp().clamp(max=settings.importance_cap)
        meters.mean("importance_weight", weight, mask)
        meters.share("importance_capped", log_weight.exp() > settings.importance_cap, mask)
        loss = loss * weight
    if settings.kl.coefficient:
        if inputs.reference_logprobs is None:
            raise ValueError("objective: kl.coefficient is set, but the learner gave no reference log-probs.")
        penalty = kl_estimate(inputs.logprobs.values, inputs.reference_logprobs.values, settings.kl.estimator)
        meters.mean("kl_reference", penalty, mask)
        weights = inputs.columns.get(KL_WEIGHT)
        loss = loss + settings.kl.coefficient * (penalty if weights is None else weights.values * penalty)
    if inputs.entropies is not None:
        meters.mean("entropy", inputs.entropies.values, mask)
        if settings.entropy_bonus:
            loss = loss - settings.entropy_bonus * inputs.entropies.values
    # k3 of KL(π_old ‖ π_θ) with samples of π_old: e^l − 1 − l.
    meters.mean("approx_kl", kl_estimate(inputs.old_logprobs.values, inputs.logprobs.values.detach(), "k3"), mask)
    return inputs.logprobs.with_values(loss)
