"""Objectives: from per-token log-probs and credit to a loss, the same for every learner.

A learner calls, once per rollout batch and once per optimiser step:

    inputs = prepare(inputs, settings, meters, all_sum)         # batch-wide columns; may change the mask; no gradient
    denominators = counts(inputs.mask.sum())          # of the rows of one optimiser step, all replicas
    for rows in micro_batches:                                  # whole trajectories
        part = inputs.select(rows).replace(logprobs=…, entropies=…)
        loss = loss_terms(part, settings, meters)
        aggregate(loss, part.mask, settings, denominators).backward()

A rank has some of the rows here; what it computes of them is summed over replicas.

A new objective is one file with a subclass of `Objective`, and one line in `settings.OBJECTIVES`.
"""

from creditgraph.components.learner.objective.base import LossInputs, Objective
from creditgraph.components.learner.objective.entropy_mask import EntropyMask
from creditgraph.components.learner.objective.importance import Importance
from creditgraph.components.learner.objective.kl import KL, kl_estimate
from creditgraph.components.learner.objective.loss import aggregate, counts, credited, loss_terms, prepare, weights
from creditgraph.components.learner.objective.meters import AllSum, Meters
from creditgraph.components.learner.objective.settings import (
    OBJECTIVES,
    ObjectiveSettings,
    load_objective,
    shipped_metrics,
)

__all__ = [
    "KL",
    "OBJECTIVES",
    "AllSum",
    "EntropyMask",
    "Importance",
    "LossInputs",
    "Meters",
    "Objective",
    "ObjectiveSettings",
    "aggregate",
    "counts",
    "credited",
    "kl_estimate",
    "load_objective",
    "loss_terms",
    "prepare",
    "shipped_metrics",
    "weights",
]
