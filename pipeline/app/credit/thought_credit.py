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
from creditgraph.components.rollouts.segments import increments, segment_of_token
from creditgraph.pipeline.app.credit.statistics import Floats, offset, pearson, share_within, sign_agreement, spearman
from creditgraph.pipeline.app.credit.truth import Truth
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Trajectories

LEAST_EFFECT = 0.1  # a thought that moves the chance of success by less has no clear sign


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


@dataclass(frozen=True, eq=False, kw_only=True)
class ThoughtCredit:
    """Credit and truth of the trained thoughts of a batch, one entry each (NumPy), and the tokens of failed chains.

    `third` is 0, 1 or 2: the part of the response in which a thought's middle lies, counted in thoughts.
    """

    credit: Floats
    truth: Floats
    third: NDArray[np.int64]
    halves: tuple[Floats, Floats]
    error_share: float
    uniform_share: float

    def metrics(self) -> dict[str, float]:
        """The columns of docs/lab.md by name; NaN where one is not defined."""
        thirds = [self.third == part for part in range(3)]
        return {
            "spearman": spearman(self.credit, self.truth),
            "pearson": pearson(self.credit, self.truth),
            **{f"pearson_{i}": pearson(self.credit[at], self.truth[at]) for i, at in enumerate(thirds, 1)},
            "sign": sign_agreement(self.credit, self.truth, LEAST_EFFECT),
            "error_share": self.error_share,
            "uniform_share": self.uniform_share,
            "bias": offset(self.credit, self.truth),
            "zero_share": float((self.credit == 0).mean()) if len(self.credit) else math.nan,
            "thoughts": float(len(self.credit)),
        }


def per_thought(credit: Jagged, mask: Jagged, inherited: torch.Tensor, truth: Truth) -> ThoughtCredit:
    """Means of token credit over each thought's own tokens, and their true advantage.

    Own tokens are those sampled for the row (not inherited) or trained on; thoughts without any, and rows whose outcome
    could not be verified, are left out. `error_share` is the mean over failed chains, with some credit and an own first
    wrong thought, of the share of |credit| on that thought; `uniform_share` the same, over the same chains, for equal
    credit on all own tokens.

    Args:
        credit: float64 over response tokens.
        mask: bool over response tokens.
        inherited: int64 [N].
        truth: true values of the same rows.
    """
    rows = credit.row_ids  # [tokens], as all that follow until the sums per thought
    own = ((credit.positions >= inherited[rows]) | mask.values) & truth.valid[rows]
    thought = segment_of_token(truth.ends, credit)
    count = torch.bincount(thought[own], minlength=len(truth.ends.values))
    total = torch.zeros(len(truth.ends.values), dtype=torch.float64).index_add_(0, thought[own], credit.values[own])
    kept = count > 0
    first, second = (increments(half) for half in truth.halves)
    wrong = truth.ends.positions[thought] + 1 == truth.error[rows]
    failed = torch.zeros(len(credit), dtype=torch.bool)
    failed[rows[own & wrong]] = True
    flat = own & failed[rows]

    def shares(size: torch.Tensor) -> Floats:
        return share_within(size[flat].numpy(), rows[flat].numpy(), wrong[flat].numpy(), len(credit))

    on_error = shares(credit.values.abs())
    uniform = shares(torch.ones_like(credit.values))
    credited = np.isfinite(on_error)
    return ThoughtCredit(
        credit=(total[kept] / count[kept]).numpy(),
        truth=truth.advantage.values[kept].numpy(),
        third=((2 * truth.ends.positions + 1) * 3 // (2 * truth.ends.lengths[truth.ends.row_ids]))[kept].numpy(),
        halves=(first.values[kept].numpy(), second.values[kept].numpy()),
        error_share=float(on_error[credited].mean()) if credited.any() else math.nan,
        uniform_share=float(uniform[credited].mean()) if credited.any() else math.nan,
    )
