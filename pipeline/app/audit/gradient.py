"""The expected gradient of an estimator against the true one, by enumeration of every group of responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from creditgraph.pipeline.app.audit.batch import Batch, Floats
from creditgraph.pipeline.app.audit.checks import Check, Finding, passed, skipped
from creditgraph.pipeline.app.audit.problems import PROBLEMS, Problem
from creditgraph.pipeline.app.audit.targets import AdvantageTarget
from creditgraph.pipeline.core.errors import raised_text

GROUP = 4  # responses per group
MOST = 600  # groups that are enumerated where a small group has a bias of its own
EXACT = 1e-5  # 1 − cosine that rounding of float32 and an epsilon in a divisor leave
LIMIT = 2e-3  # 1 − cosine that two group sizes, the second twice the first, leave of a bias of 1 / size
SMALL = 1e-2  # 1 − cosine in the larger of them that passes: some biases vanish otherwise than with 1 / size


class Estimator(Protocol):
    """A target that estimates the gradient of J."""

    @property
    def reads(self) -> frozenset[str]:
        """Columns that it is given."""

    def gradient(self, problem: Problem, chosen: tuple[int, ...]) -> Floats:
        """The ascent direction from one group, float64 [states, actions]."""


@dataclass(frozen=True, kw_only=True)
class OfAdvantages:
    """g = (1/G) Σ_i Σ_t A_it ∇ log π(y_it): the plain sum, with no weight of rows or tokens beside the advantage."""

    target: AdvantageTarget
    noise: float = 0.0  # of the critic

    @property
    def reads(self) -> frozenset[str]:
        """Columns that the function is given."""
        return self.target.reads

    def gradient(self, problem: Problem, chosen: tuple[int, ...]) -> Floats:
        """The sum over one group."""
        batch: Batch = problem.batch(chosen, "turn_rewards" in self.reads, self.noise)
        advantages = self.target.advantages(batch)
        scores = problem.scores()
        total = np.zeros_like(problem.logits)
        for row, response in enumerate(chosen):
            own = scores[response]
            total += np.tensordot(advantages[row, : len(own)], own, axes=1)
        return total / len(chosen)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """E[g] against ∇J.

    Attributes:
        expected, true: float64 [states, actions].
        noise: E|g − E[g]|² / |E[g]|², per group.
    """

    expected: Floats
    true: Floats
    noise: float

    @property
    def cosine(self) -> float:
        """Of the two; 0 if E[g] is zero."""
        return cosine(self.expected, self.true)

    @property
    def scale(self) -> float:
        """c of the best E[g] ≈ c ∇J."""
        return float((self.expected * self.true).sum() / (self.true**2).sum())


def cosine(a: Floats, b: Floats) -> float:
    """Of two gradients; 0 if one of them is zero."""
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float((a * b).sum()) / norms if norms > 1e-12 else 0.0


def compare(estimator: Estimator, problem: Problem, size: int = GROUP) -> Comparison:
    """Sums over every group of `size` responses."""
    first = np.zeros_like(problem.logits)
    second = 0.0
    for probability, chosen in problem.groups(size):
        g = estimator.gradient(problem, chosen)
        first += probability * g
        second += probability * float((g**2).sum())
    square = float((first**2).sum())
    true = problem.true_gradient("turn_rewards" in estimator.reads)
    return Comparison(expected=first, true=true, noise=(second - square) / square if square > 0 else float("inf"))


def of_large_groups(estimator: Estimator, problem: Problem) -> tuple[Floats, Floats]:
    """E[g] of the largest groups that are enumerated, and as groups grow, each float64 [states, actions].

    Means and deviations of a group contain the row itself, so that E[g] of a right estimator may be off by a multiple
    of 1 / size. Of two sizes, the second twice the first, 2 E_2n − E_n is without that term.
    """
    half, double = (compare(estimator, problem, size).expected for size in problem.doubled(MOST))
    return double, 2 * double - half


def expected_gradient(target: AdvantageTarget, problem: Problem) -> Finding:
    """The check of one problem."""
    return judged(OfAdvantages(target=target.undiscounted), problem)


def judged(estimator: Estimator, problem: Problem, others: Mapping[str, Floats] | None = None) -> Finding:
    """A finding with both gradients, state by state.

    Args:
        estimator: the target.
        problem: the problem.
        others: direction beside ∇J that is right as well → the gradient, float64 [states, actions].
    """
    try:
        result = compare(estimator, problem)
        numbers = f"cosine {result.cosine:.4f}, scale {result.scale:.3g}, noise {result.noise:.3g} per group of {GROUP}"
        if result.cosine >= 1 - EXACT:
            return passed(numbers)
        largest, large = of_large_groups(estimator, problem)
    except Exception as error:  # a function from outside may refuse a problem in any way
        return skipped(f"not judged: raises {raised_text(error)}")
    if cosine(large, result.true) >= 1 - LIMIT:
        return passed(f"{numbers}; the bias vanishes as groups grow (cosine {cosine(large, result.true):.4f})")
    if cosine(largest, result.true) >= 1 - SMALL:
        return passed(
            f"{numbers}; the bias of groups of {problem.doubled(MOST)[1]} is small "
            f"(cosine {cosine(largest, result.true):.4f})"
        )
    for words, other in (others or {}).items():
        if cosine(large, other) >= 1 - LIMIT:
            return passed(f"{numbers}; along {words} (cosine {cosine(large, other):.4f})")
    example = {
        "problem": problem.title,
        "expected": problem.by_state(result.expected),
        "true": problem.by_state(result.true),
    }
    grown = f"{cosine(large, result.true):.4f} as groups grow"
    return Finding(
        verdict="fail",
        message=f"the expected gradient is not along ∇J: {numbers}, {grown}",
        example=example,
        size=1.0 - result.cosine,
    )


GRADIENT = tuple(
    Check(
        name=f"gradient_{problem.name}",
        layer="gradient",
        title=f"E[g] is along ∇J: {problem.title}.",
        run=partial(expected_gradient, problem=problem),
    )
    for problem in PROBLEMS
)
