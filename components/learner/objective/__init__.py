"""Objectives: pure functions from per-token log-probs and credit to per-token loss terms, shared by every learner.

A learner calls, once per rollout batch and once per optimiser step:

    inputs = prepare(inputs, objective, identity_sum)           # batch-wide columns; may change the mask; no gradient
    denominators = counts(inputs.mask, objective)               # of the rows of one optimiser step, all replicas
    for rows in micro_batches:                                  # whole trajectories
        part = inputs.select(rows).replace(logprobs=…, entropies=…)
        terms = loss_terms(part, objective)
        aggregate(terms.loss, part.mask, objective, denominators).backward()

A learner that holds only its replica's part of the batch passes a sum over replicas to `prepare`, and sums `counts`
with it.

A new objective is one file with `terms` (and `prepare` when it needs statistics of the whole batch) and one line in
`KINDS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from components.learner.objective import entropy_mask, reinforce, sequence, shaped, token, trace
from components.learner.objective.aggregate import aggregate, counts, weights
from components.learner.objective.base import MAX_LOG_RATIO, AllSum, Inputs, Meters, Terms
from components.learner.objective.config import KL, EntropyMask, Objective, Trace
from components.learner.objective.kl import kl_estimate

__all__ = [
    "KINDS",
    "KL",
    "AllSum",
    "EntropyMask",
    "Inputs",
    "Kind",
    "Meters",
    "Objective",
    "Terms",
    "Trace",
    "aggregate",
    "counts",
    "loss_terms",
    "prepare",
    "weights",
]


@dataclass(frozen=True)
class Kind:
    """An objective: its per-token terms, and optionally what it needs to know about the whole batch first.

    Attributes:
        terms: (inputs of some whole trajectories, settings) → per-token loss.
        prepare: (inputs of the whole local batch with logprobs = old_logprobs, settings, sum over replicas) → inputs
            with further `columns`, or with another mask. Runs without gradient before any optimiser step.
    """

    terms: Callable[[Inputs, Objective], Terms]
    prepare: Callable[[Inputs, Objective, AllSum], Inputs] | None = None


KINDS: dict[str, Kind] = {
    "reinforce": Kind(reinforce.terms),
    "token": Kind(token.terms),
    "sequence": Kind(sequence.terms),
    "gated_sequence": Kind(sequence.gated_terms),
    "trace": Kind(trace.terms, trace.prepare),
    "shaped": Kind(shaped.terms),
}


def kind_of(name: str) -> Kind:
    """The objective of a registered name or "package.module:NAME"."""
    if name in KINDS:
        return KINDS[name]
    module, attribute = name.split(":")
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, Kind):
        raise ValueError(f"objective '{name}' is {type(found).__name__}; wanted a components.learner.objective.Kind.")
    return found


def prepare(inputs: Inputs, objective: Objective, all_sum: AllSum) -> Inputs:
    """The entropy mask, then the objective's own batch-wide columns; see `Kind.prepare`. Every replica must call it."""
    kind = kind_of(objective.kind)
    with torch.no_grad():
        inputs = entropy_mask.add_column(inputs, objective.entropy_mask, all_sum)
        return inputs if kind.prepare is None else kind.prepare(inputs, objective, all_sum)


def loss_terms(inputs: Inputs, objective: Objective) -> Terms:
    """Per-token loss with every optional term: importance weight, KL penalty, entropy bonus."""
    made = kind_of(objective.kind).terms(inputs, objective)
    loss, meters, mask = made.loss.values, made.meters, inputs.mask.values
    high = inputs.columns.get(entropy_mask.COLUMN)
    if high is not None:
        meters.share("high_entropy", high.values, mask)
        if objective.entropy_mask.where != "trace":
            loss = torch.where(high.values, loss, 0.0)
    if objective.importance_cap:
        mismatch = (inputs.old_logprobs.values - inputs.engine_logprobs.values).clamp(max=MAX_LOG_RATIO)
        weight = mismatch.exp().clamp(max=objective.importance_cap)
        meters.mean("importance_weight", weight, mask)
        meters.share("importance_capped", mismatch.exp() > objective.importance_cap, mask)
        loss = loss * weight
    if objective.kl.coefficient:
        if inputs.reference_logprobs is None:
            raise ValueError("objective: kl.coefficient is set, but the learner gave no reference log-probs.")
        penalty = kl_estimate(inputs.logprobs.values, inputs.reference_logprobs.values, objective.kl.estimator)
        meters.mean("kl_reference", penalty, mask)
        # Column "kl_weight" of the credit: a multiple of the coefficient per token (SCoRe holds first attempts back
        # harder).
        per_token = inputs.columns.get("kl_weight")
        loss = loss + objective.kl.coefficient * (penalty if per_token is None else per_token.values * penalty)
    if inputs.entropies is not None:
        meters.mean("entropy", inputs.entropies.values, mask)
        if objective.entropy_bonus:
            loss = loss - objective.entropy_bonus * inputs.entropies.values
    # k3 of KL(π_old ‖ π_θ) with samples of π_old: e^l − 1 − l.
    meters.mean("approx_kl", kl_estimate(inputs.old_logprobs.values, inputs.logprobs.values.detach(), "k3"), mask)
    return Terms(loss=made.loss.with_values(loss), meters=meters)
