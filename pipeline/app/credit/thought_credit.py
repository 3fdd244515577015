"""Credit of a batch: per token from the objective's gradient, and per thought against the true advantage."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from creditgraph.components.learner.objective import (
    KL,
    Importance,
    LossInputs,
    Meters,
    ObjectiveSettings,
    aggregate,
    counts,
    loss_terms,
    prepare,
)
from creditgraph.components.rollouts.segments import segment_of_token
from creditgraph.pipeline.app.credit.truth import Truth
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Trajectories

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Effective:
    """The effective credit of an objective at ratio 1, per response token.

    Attributes:
        credit: C_k = −∂(Σ_t loss_t)/∂log π(y_k): A for GRPO, more for early tokens of a trace. Float64, 0 where masked.
        weight: −∂loss/∂log π(y_k) after aggregation over the whole batch: the coefficient in the policy gradient.
            Float64.
    """

    credit: Jagged
    weight: Jagged


def effective_credit(trajectories: Trajectories, credit: Credit, objective: ObjectiveSettings) -> Effective:
    """Differentiates the objective with respect to log-probs, without KL, bonus and mismatch terms.

    At ratio 1 an objective of ratios is the same at any log-probs, so unknown ones (NaN) are taken as 0.
    """
    # At ratio 1 the KL term and the mismatch weights are constants of the policy, not of the credit.
    bare = dataclasses.replace(objective, kl=KL(), entropy_bonus=0.0, importance=Importance())
    sampled = trajectories.engine_logprobs
    sampled = sampled.with_values(torch.nan_to_num(sampled.values, nan=0.0))
    leaf = sampled.values.clone().requires_grad_()
    inputs = LossInputs(
        logprobs=sampled,
        old_logprobs=sampled,
        engine_logprobs=sampled,
        advantage=credit.advantage,
        mask=credit.mask,
        group=trajectories.group,
        old_entropies=trajectories.entropies,
        columns=dict(credit.columns),
    )
    inputs = prepare(inputs, bare, Meters()).replace(logprobs=sampled.with_values(leaf))
    loss = loss_terms(inputs.replace(entropies=trajectories.entropies), bare, Meters())
    tokens = torch.where(inputs.mask.values, loss.values, 0.0).sum()
    whole = aggregate(loss, inputs.mask, bare, counts(inputs.mask.sum()))
    if not tokens.requires_grad:  # every token is masked
        zero = sampled.with_values(torch.zeros(len(leaf), dtype=torch.float64))
        return Effective(credit=zero, weight=zero)
    (plain,) = torch.autograd.grad(tokens, leaf, retain_graph=True)
    (weighted,) = torch.autograd.grad(whole, leaf)
    return Effective(credit=sampled.with_values(-plain.double()), weight=sampled.with_values(-weighted.double()))


def own_tokens(credit: Jagged, mask: Jagged, inherited: torch.Tensor, truth: Truth) -> torch.Tensor:
    """bool [tokens]: those sampled for the row (not inherited) or trained on, of rows whose outcome could be verified.

    Args:
        credit: over response tokens.
        mask: bool over response tokens.
        inherited: int64 [N].
        truth: true values of the same rows.
    """
    rows = credit.row_ids
    return ((credit.positions >= inherited[rows]) | mask.values) & truth.valid[rows]


def per_thought(credit: Jagged, own: torch.Tensor, truth: Truth) -> tuple[Floats, torch.Tensor]:
    """Means of token credit over each thought's own tokens, and which thoughts have any, bool [thoughts].

    Args:
        credit: float64 over response tokens.
        own: see `own_tokens`.
        truth: true values of the same rows.
    """
    thought = segment_of_token(truth.ends, credit)
    count = torch.bincount(thought[own], minlength=len(truth.ends.values))
    total = torch.zeros(len(truth.ends.values), dtype=torch.float64).index_add_(0, thought[own], credit.values[own])
    kept = count > 0
    return (total[kept] / count[kept]).numpy(), kept


def pearson(x: Floats, y: Floats) -> float:
    """Linear correlation; NaN where it is not defined (fewer than two points, or one side constant)."""
    # A constant less its mean is not always exactly 0, so NumPy's own NaN cannot be relied on.
    if len(x) < 2 or not np.ptp(x) or not np.ptp(y):
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])
