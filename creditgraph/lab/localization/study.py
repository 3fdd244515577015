"""Statistics of localised steps against true first errors: shares, deviations, correction rates.

The deviation of a reset is its localised step less the true first error: a reset at or before the error (≤ 0) is
clean, because the steps that it keeps hold no error; 0 is exact.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from creditgraph.components.tasks.base import bare_step
from creditgraph.lab.localization.records import Failure

Z95 = 1.959963984540054  # 97.5 % point of the normal distribution
FAR = 4  # deviations of this size and more share a bin


@dataclass(frozen=True)
class Share:
    """`count` of `total`, with its Wilson 95 % interval; all three numbers are NaN for a total of 0."""

    count: int
    total: int

    @property
    def value(self) -> float:
        """The share."""
        return self.count / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the interval."""
        return wilson(self.count, self.total)

    def numbers(self) -> dict[str, float]:
        """For JSON."""
        low, high = self.interval
        return {"count": self.count, "total": self.total, "share": self.value, "low": low, "high": high}


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What became of resets of a kind.

    Attributes:
        name: of the kind.
        failures: number of failures.
        suffixes: share of their suffixes that end correct. The interval treats suffixes as independent; those of a
            failure share a prefix, so it is too narrow.
        corrected: share of failures with a suffix that ends correct (pass@b for b suffixes), of those with a suffix.
    """

    name: str
    failures: int
    suffixes: Share
    corrected: Share


@dataclass(frozen=True, kw_only=True)
class Study:
    """Results over the labelled failures.

    Attributes:
        clean, exact: shares of failures.
        random_clean, random_exact: the shares expected of uniformly random steps on the same failures (RRPO's).
        deviations: deviation → number of failures.
        corrections: of clean and of erroneous resets, then by deviation.
    """

    clean: Share
    exact: Share
    random_clean: float
    random_exact: float
    deviations: dict[int, int]
    corrections: list[Correction]


def wilson(count: int, total: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a binomial share (Wilson 1927); NaN for a total of 0.

    >>> [round(end, 4) for end in wilson(5, 10)]
    [0.2366, 0.7634]
    """
    if not total:
        return math.nan, math.nan
    share = count / total
    center = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (center - half) / scale), min(1.0, (center + half) / scale)


def deviation(steps: Sequence[str], step: int, first_error: int, min_words: int = 0) -> int:
    """Localised step less the true first error, counted in steps of at least `min_words` words.

    >>> deviation(["a", "let x be three", "so", "x is four"], 4, 2), deviation(["a b", "let", "so", "x is"], 4, 2, 2)
    (2, 0)
    """
    low, high = sorted((step, first_error))
    between = sum(len(bare_step(text).split()) >= min_words for text in steps[low - 1 : high - 1])
    return between if step > first_error else -between


def study(failures: Sequence[Failure], first_error: Mapping[int, int], min_words: int = 0) -> Study:
    """Compares the localised steps of failures with their true first errors.

    Args:
        failures: those with a label; others are not counted.
        first_error: uid → true first error, from 1.
        min_words: shorter steps do not count in a deviation.
    """
    labelled = [f for f in failures if f.uid in first_error]
    away = [deviation(f.steps, f.step, first_error[f.uid], min_words) for f in labelled]
    # What a uniform draw gives: per failure, over all of its steps.
    drawn = [
        [deviation(f.steps, step, first_error[f.uid], min_words) for step in range(1, len(f.steps) + 1)]
        for f in labelled
    ]
    corrections = [
        _correction(name, [f for f, d in zip(labelled, away, strict=True) if low <= d <= high])
        for name, low, high in _kinds()
    ]
    return Study(
        clean=Share(sum(d <= 0 for d in away), len(away)),
        exact=Share(away.count(0), len(away)),
        random_clean=_mean([sum(d <= 0 for d in row) / len(row) for row in drawn]),
        random_exact=_mean([row.count(0) / len(row) for row in drawn]),
        deviations=dict(sorted(Counter(away).items())),
        corrections=corrections,
    )


def bin_names() -> list[str]:
    """Names of the deviations' bins, as `Study.corrections` has them after clean and erroneous resets."""
    return [name for name, _, _ in _kinds()[2:]]


def _kinds() -> list[tuple[str, float, float]]:
    """Name, smallest and largest deviation."""
    single = [(f"{d:+d}".replace("-", "−") if d else "0", float(d), float(d)) for d in range(1 - FAR, FAR)]
    return [
        ("clean", -math.inf, 0.0),
        ("erroneous", 1.0, math.inf),
        (f"≤ −{FAR}", -math.inf, float(-FAR)),
        *single,
        (f"≥ +{FAR}", float(FAR), math.inf),
    ]


def _correction(name: str, failures: Sequence[Failure]) -> Correction:
    tried = [f for f in failures if f.suffixes]
    return Correction(
        name=name,
        failures=len(failures),
        suffixes=Share(sum(f.correct for f in tried), sum(f.suffixes for f in tried)),
        corrected=Share(sum(f.correct > 0 for f in tried), len(tried)),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
