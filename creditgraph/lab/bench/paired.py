"""Paired differences of two methods over seeds: t interval, p-value, Holm's correction, and the smallest effect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from creditgraph.lab.bench.statistics import mean_sd

LEVEL = 0.05
POWER = 0.8


@dataclass(frozen=True)
class Paired:
    """Mean of paired differences with its two-sided t interval.

    Attributes:
        difference: mean; NaN without any pair.
        low, high: 95 % interval; NaN for fewer than two pairs.
        p: two-sided p-value of a difference of 0; 1 for fewer than two pairs.
        detectable: the true difference that the test finds with probability .8, given its error.
        pairs: number of pairs.
        error: standard error of the difference.
        narrow: half of the 90 % interval.
    """

    difference: float
    low: float
    high: float
    p: float
    detectable: float
    pairs: int
    error: float
    narrow: float

    def within(self, margin: float) -> bool:
        """Whether two one-sided tests at 5 % exclude a difference of `margin`: the 90 % interval is inside."""
        return abs(self.difference) + self.narrow < margin

    def text(self) -> str:
        """The difference and its interval, to three places; "–" without any pair."""
        if math.isnan(self.difference):
            return "–"
        interval = "" if math.isnan(self.low) else f" [{self.low:+.3f}, {self.high:+.3f}]"
        return f"{self.difference:+.3f}{interval}"


def paired(differences: Sequence[float], variance: float = 0.0, tests: int = 1) -> Paired:
    """Student's t on differences, one per seed; NaN entries are left out.

    `detectable` is (t_{1 − .025/tests} + t_.80) times the error, the usual approximation of the power of a t test.

    Args:
        differences: one per pair.
        variance: of the mean difference, through what all pairs share; the error is √(s²/n + variance).
        tests: number of tests that the correction counts, for `detectable`.
    """
    kept = [d for d in differences if not math.isnan(d)]
    mean, spread = mean_sd(kept)
    if len(kept) < 2:
        return Paired(mean, math.nan, math.nan, 1.0, math.nan, len(kept), math.nan, math.nan)
    return _tested(mean, math.sqrt(spread**2 / len(kept) + variance), len(kept), len(kept) - 1, tests)


def stratified(parts: Sequence[Paired]) -> Paired:
    """The mean of independent differences, each of two pairs or more, with the pairs within each as the units.

    >>> stratified([paired([0.1, 0.3]), paired([-0.2, 0.0])]).text()
    '+0.050 [-0.254, +0.354]'
    """
    error = math.sqrt(sum(part.error**2 for part in parts)) / len(parts)
    pairs = sum(part.pairs for part in parts)
    return _tested(sum(part.difference for part in parts) / len(parts), error, pairs, pairs - len(parts), 1)


def _tested(mean: float, error: float, pairs: int, freedom: int, tests: int) -> Paired:
    half = t_quantile(LEVEL, freedom) * error
    p = t_two_sided(mean / error, freedom) if error else float(mean == 0)
    detectable = (t_quantile(LEVEL / tests, freedom) + t_quantile(2 * (1 - POWER), freedom)) * error
    narrow = t_quantile(2 * LEVEL, freedom) * error
    return Paired(mean, mean - half, mean + half, p, detectable, pairs, error, narrow)


def t_two_sided(t: float, freedom: int) -> float:
    """P(|T| ≥ |t|) of Student's t with an integer number of degrees of freedom (Abramowitz and Stegun, 26.7.3 f.).

    >>> round(t_two_sided(2.262157, 9), 6)
    0.05
    """
    angle = math.atan2(abs(t), math.sqrt(freedom))
    odd = freedom % 2
    term = math.sin(angle) * (math.cos(angle) if odd else 1.0)
    total = 0.0
    for power in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power - 1) / power
    inside = 2 / math.pi * (angle + total) if odd else total
    return min(max(1.0 - inside, 0.0), 1.0)


def t_quantile(p: float, freedom: int) -> float:
    """The t that |T| exceeds with probability p, to 1e-9.

    >>> round(t_quantile(0.05, 2), 3)
    4.303
    """
    low, high = 0.0, 1.0
    while t_two_sided(high, freedom) > p:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_two_sided(middle, freedom) > p else (low, middle)
    return high


def holm(values: Sequence[float], tests: int = 0) -> list[float]:
    """p-values corrected for the number of tests by Holm's step-down method, in the order given.

    Args:
        values: p-values.
        tests: number of tests planned, those without a value included, as if their p-value were 1; at least the number
            of values.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    count = max(tests, len(values))
    corrected = [0.0] * len(values)
    largest = 0.0
    for place, i in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        largest = max(largest, min((count - place) * values[i], 1.0))
        corrected[i] = largest
    return corrected
