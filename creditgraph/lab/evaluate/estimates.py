"""Estimates from a table of right and wrong samples: pass@k, avg@n, maj@k, and bootstrap intervals over problems.

Every estimate is first a number per problem; a task's value is their mean, and its interval comes from drawing problems
with replacement. Problems are the population: the interval covers the variation over problems of the same kind, not
over samples of these problems.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from creditgraph.components.evaluator.accuracy import pass_at_k

Floats = NDArray[np.float64]
_BLOCK = 4_000_000  # drawn indices in memory at once


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over problems and its interval.

    Attributes:
        value: mean over the problems.
        low, high: ends of the interval.
    """

    value: float
    low: float
    high: float


def pass_values(num_correct: Sequence[int], num_samples: int, k: int) -> Floats:
    """float64 [P]: the unbiased pass@k of each problem, from its number of right samples (2107.03374).

    >>> pass_values([0, 1, 4], 4, 2).round(3).tolist()
    [0.0, 0.5, 1.0]
    """
    table = np.array([pass_at_k(num_samples, c, k) for c in range(num_samples + 1)])
    return table[np.asarray(num_correct, dtype=np.int64)] if len(num_correct) else np.zeros(0)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Whether the most frequent answer is right; of several equally frequent ones, the share that is (2203.11171).

    Answers are the same when their text is; a response without an answer (None) has no vote. No vote at all is wrong.

    >>> majority(["7", "7", "8", None], [True, True, False, False]), majority(["7", "8"], [True, False])
    (1.0, 0.5)
    """
    votes: dict[str, list[bool]] = {}
    for answer, right in zip(answers, correct, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(right)
    most = max((len(v) for v in votes.values()), default=0)
    leaders = [sum(v) / len(v) for v in votes.values() if len(v) == most]
    return sum(leaders) / len(leaders) if leaders else 0.0


def majority_at(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Majority vote of k samples, averaged over the ⌊n/k⌋ blocks of k consecutive ones.

    Unbiased, because the blocks are independent.

    >>> majority_at(["7", "8", "7", "7"], [True, False, True, True], 2)
    0.75
    """
    starts = range(0, len(answers) - k + 1, k)
    return sum(majority(answers[i : i + k], correct[i : i + k]) for i in starts) / len(starts)


def resampled_means(values: Floats, generator: np.random.Generator, resamples: int) -> Floats:
    """float64 [B, M]: means of `values` [P, M] over P problems drawn with replacement, B times.

    The columns share their draws, so that differences between them are paired.
    """
    problems = len(values)
    means = []
    block = max(1, _BLOCK // problems)
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        # Row b draws from [b·P, (b + 1)·P), so that one bincount counts the draws of all rows.
        drawn = generator.integers(0, problems, size=(rows, problems)) + np.arange(rows)[:, None] * problems
        times = np.bincount(drawn.ravel(), minlength=rows * problems).reshape(rows, problems)
        means.append(times @ values / problems)
    return np.concatenate(means)


def estimate(values: Floats, means: Floats, confidence: float) -> list[Estimate]:
    """One estimate per column of `values` [P, M], by the percentile method from resampled `means` [B, M] (Efron 1979).

    The interval runs from the (1 − confidence)/2 to the (1 + confidence)/2 quantile of the resampled means. Where all
    problems agree it has no width, and with few problems (below about 30) it is too narrow.
    """
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail], axis=0)
    return [
        Estimate(value=float(v), low=float(a), high=float(b))
        for v, a, b in zip(values.mean(axis=0), low, high, strict=True)
    ]
