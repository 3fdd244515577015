"""Statistics of credit and truth, on NumPy arrays; one entry per thought unless noted otherwise."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from creditgraph.pipeline.app.credit.thought_credit import pearson

Floats = NDArray[np.float64]


def ranks(x: Floats) -> Floats:
    """Ranks from 1; equal numbers share the mean of their places.

    >>> ranks(np.array([3.0, 1.0, 3.0])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, place, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts).astype(np.float64)
    shared: Floats = (last - (counts - 1) / 2)[place]
    return shared


def spearman(x: Floats, y: Floats) -> float:
    """Rank correlation with shared ranks for ties; NaN where one side is constant."""
    return pearson(ranks(x), ranks(y))


def sign_agreement(credit: Floats, truth: Floats, least: float) -> float:
    """Share of the places with |truth| ≥ `least` whose credit has the same sign (zero has none); NaN without any."""
    clear = np.abs(truth) >= least
    return float((np.sign(credit[clear]) == np.sign(truth[clear])).mean()) if clear.any() else math.nan


def offset(credit: Floats, truth: Floats) -> float:
    """Bias of credit: mean/rms of credit − mean/rms of truth, in [−2, 2], free of scale; NaN when one is all zero."""

    def lean(x: Floats) -> float:
        size = math.sqrt(float((x * x).mean())) if len(x) else 0.0
        return float(x.mean()) / size if size else math.nan

    return lean(credit) - lean(truth)


def share_within(size: Floats, row: NDArray[np.int64], inside: NDArray[np.bool_], num_rows: int) -> Floats:
    """Per row, the share of Σ size over the places with `inside`; NaN for rows whose sum is 0.

    Args:
        size: non-negative [places].
        row: row of each place [places].
        inside: [places].
        num_rows: length of the result.
    """
    whole = np.bincount(row, weights=size, minlength=num_rows)
    part = np.bincount(row, weights=size * inside, minlength=num_rows)
    share: Floats = np.divide(part, whole, out=np.full(num_rows, np.nan), where=whole > 0)
    return share


def reliability(half: float) -> float:
    """Largest correlation with a noisy truth whose halves correlate by h: √(2h/(1 + h)), the root of Spearman-Brown."""
    return math.sqrt(2 * half / (1 + half)) if half > 0 else math.nan


def mean_sd(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation of the numbers that are not NaN; NaN where there are none, or too few."""
    kept = np.array([v for v in values if not math.isnan(v)])
    mean = float(kept.mean()) if len(kept) else math.nan
    return mean, float(kept.std(ddof=1)) if len(kept) > 1 else math.nan


def jackknife(leave_one_out: Sequence[float]) -> float:
    """Standard error from estimates that each leave out one of S independent parts; NaN for S < 2 or with a NaN."""
    parts = np.array(leave_one_out)
    if len(parts) < 2 or not np.isfinite(parts).all():
        return math.nan
    return math.sqrt((len(parts) - 1) / len(parts) * float(((parts - parts.mean()) ** 2).sum()))
