"""Credit per thought beside the true advantage, and the numbers that compare them."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from creditgraph.components.rollouts.segments import increments, segment_of_token
from creditgraph.lab.bench.statistics import offset, share_within, sign_agreement, spearman
from creditgraph.pipeline.app.credit.thought_credit import Floats, own_tokens, pearson, per_thought
from creditgraph.pipeline.app.credit.truth import Truth
from creditgraph.pipeline.core.jagged import Jagged

LEAST_EFFECT = 0.1  # a thought that moves the chance of success by less has no clear sign


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
    named: float

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
            "named": self.named,
            "bias": offset(self.credit, self.truth),
            "zero_share": float((self.credit == 0).mean()) if len(self.credit) else math.nan,
            "thoughts": float(len(self.credit)),
        }


def thought_credit(credit: Jagged, mask: Jagged, inherited: torch.Tensor, truth: Truth) -> ThoughtCredit:
    """Means of token credit over each thought's own tokens (`own_tokens`), and their true advantage.

    `error_share` is the mean over failed chains, with some credit and an own first
    wrong thought, of the share of |credit| on that thought; `uniform_share` the same, over the same chains, for equal
    credit on all own tokens. `named` is `naming` over responses.

    Args:
        credit: float64 over response tokens.
        mask: bool over response tokens.
        inherited: int64 [N].
        truth: true values of the same rows.
    """
    rows = credit.row_ids
    own = own_tokens(credit, mask, inherited, truth)
    thought = segment_of_token(truth.ends, credit)
    means, kept = per_thought(credit, own, truth)
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
        credit=means,
        truth=truth.advantage.values[kept].numpy(),
        third=((2 * truth.ends.positions + 1) * 3 // (2 * truth.ends.lengths[truth.ends.row_ids]))[kept].numpy(),
        halves=(first.values[kept].numpy(), second.values[kept].numpy()),
        error_share=float(on_error[credited].mean()) if credited.any() else math.nan,
        uniform_share=float(uniform[credited].mean()) if credited.any() else math.nan,
        named=naming(means, truth.advantage.values[kept].numpy(), truth.ends.row_ids[kept].numpy()),
    )


def naming(credit: Floats, truth: Floats, row: NDArray[np.int64]) -> float:
    """How often the largest |credit| of a response is on the thought that mattered most, above chance.

    (hits − chance) / (rows − chance) over responses whose trained thoughts differ in true |A|, one of which is
    `LEAST_EFFECT` or more: 0 is chance, 1 always. n thoughts with equally large credit hit with 1/n, so uniform credit
    is at chance. NaN without such responses. Our reading of the executed-replay protocol of 2608.19760, known to us by
    its abstract: the thought that mattered is the one around which continuations differ most.

    Args:
        credit, truth: of each thought [n].
        row: int64 [n], its response.
    """
    hits, chance, rows = 0.0, 0.0, 0
    for own in (np.flatnonzero(row == r) for r in np.unique(row)):
        effect, size = np.abs(truth[own]), np.abs(credit[own])
        largest, mattered = size == size.max(), effect == effect.max()
        if effect.max() >= LEAST_EFFECT and not mattered.all():
            hits += float((largest & mattered).sum() / largest.sum())
            chance += float(mattered.mean())
            rows += 1
    return (hits - chance) / (rows - chance) if rows else math.nan
