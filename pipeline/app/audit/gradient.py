"""The expected gradient of an estimator against the true one, by enumeration of every group of responses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from creditgraph.pipeline.app.audit.batch import Batch, Floats
from creditgraph.pipeline.app.audit.checks import Check, Finding, passed, skipped
from creditgraph.pipeline.app.audit.problems import PROBLEMS, Problem
from creditgraph.pipeline.app.audit.targets import AdvantageTarget

GROUP = 4  # responses per group


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

    @property
    def reads(self) -> frozenset[str]:
        """Columns that the function is given."""
        return self.target.reads

    def gradient(self, problem: Problem, chosen: tuple[int, ...]) -> Floats:
        """The sum over one group."""
        batch: Batch = problem.batch(chosen)
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
        norms = float(np.linalg.norm(self.expected) * np.linalg.norm(self.true))
        return float((self.expected * self.true).sum()) / norms if norms > 1e-12 else 0.0

    @property
    def scale(self) -> float:
        """c of the best E[g] ≈ c ∇J."""
        return float((self.expected * self.true).sum() / (self.true**2).sum())


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


def expected_gradient(target: AdvantageTarget, problem: Problem) -> Finding:
    """The check of one problem."""
    return judged(OfAdvantages(target=target), problem)


def judged(estimator: Estimator, problem: Problem) -> Finding:
    """A finding with both gradients, state by state."""
    try:
        result = compare(estimator, problem)
    except Exception as error:  # a function from outside may refuse a problem in any way
        return skipped(f"the function raises {type(error).__name__} on it: {str(error).splitlines()[0][:100]}")
    numbers = f"cosine {result.cosine:.4f}, scale {result.scale:.3g}, noise {result.noise:.3g} per group of {GROUP}"
    if result.cosine >= problem.least:
        return passed(numbers)
    example = {
        "problem": problem.title,
        "expected": np.round(result.expected, 4).tolist(),
        "true": np.round(result.true, 4).tolist(),
    }
    return Finding(
        verdict="fail",
        message=f"the expected gradient is not along ∇J: {numbers}",
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
