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
        detectable: the true difference that a test at 5 % finds with probability .8, given the spread of these pairs.
        pairs: number of pairs.
    """

    difference: float
    low: float
    high: float
    p: float
    detectable: float
    pairs: int

    def text(self) -> str:
        """The difference and its interval, to three places; "–" without any pair."""
        if math.isnan(self.difference):
            return "–"
        interval = "" if math.isnan(self.low) else f" [{self.low:+.3f}, {self.high:+.3f}]"
        return f"{self.difference:+.3f}{interval}"


def paired(differences: Sequence[float]) -> Paired:
    """Student's t on differences, one per seed; NaN entries are left out.

    `detectable` is (t_.975 + t_.80) · s/√n, the usual approximation of the power of a t test.
    """
    kept = [d for d in differences if not math.isnan(d)]
    mean, spread = mean_sd(kept)
    if len(kept) < 2:
        return Paired(mean, math.nan, math.nan, 1.0, math.nan, len(kept))
    error = spread / math.sqrt(len(kept))
    freedom = len(kept) - 1
    half = t_quantile(LEVEL, freedom) * error
    p = t_two_sided(mean / error, freedom) if error else float(mean == 0)
    detectable = half + t_quantile(2 * (1 - POWER), freedom) * error
    return Paired(mean, mean - half, mean + half, p, detectable, len(kept))


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
