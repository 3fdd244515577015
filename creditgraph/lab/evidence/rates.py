"""What the choice of a learning rate by few runs adds to the error of a result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from creditgraph.lab.bench.statistics import Floats, mean_sd
from creditgraph.pipeline.core.streams import Stream

DRAWS = 4096


def rate_variance(row: Mapping[str, Any], sweep_seeds: int) -> float:
    """Variance of a method's accuracy because another sweep would have chosen another point.

    The sweep's seeds are resampled in all n^n ways, or in 4,096 drawn ones of more; each way chooses its best point,
    which counts with its mean over all seeds. Results that kept only the means of their sweep have the spread of their
    fresh seeds in place of the sweep's, and normal draws in place of resamples.

    Args:
        row: a method of results.json: `tried` is point → accuracy by sweep seed, or their mean.
        sweep_seeds: seeds of the sweep.
    """
    tried = list(row.get("tried", {}).values())
    if len(tried) < 2:
        return 0.0
    kept = all(isinstance(values, list) for values in tried)
    means = np.array([np.mean(values) for values in tried])
    draws = resampled_means(tried) if kept else _drawn(means, row["accuracy"], sweep_seeds)
    return float(means[draws.argmax(1)].var())


def resampled_means(values: Sequence[Sequence[float]]) -> Floats:
    """Means of every resample of the n columns of [points][n], with replacement: float64 [n^n, points].

    Of more than 4,096 ways as many are drawn.

    >>> resampled_means([[0.0, 1.0]]).ravel().tolist()
    [0.0, 0.5, 0.5, 1.0]
    """
    table = np.array(values, np.float64)
    n = table.shape[1]
    if n**n <= DRAWS:
        ways = np.array(list(product(range(n), repeat=n)))
    else:
        ways = Stream("sweep", 0).generator().integers(n, size=(DRAWS, n))
    means: Floats = table[:, ways].mean(-1).T
    return means


def _drawn(means: Floats, fresh: Sequence[float], sweep_seeds: int) -> Floats:
    error = mean_sd(list(fresh))[1] / math.sqrt(sweep_seeds)
    noise = Stream("sweep", 0).generator().standard_normal((DRAWS, len(means)))
    drawn: Floats = means + (0.0 if math.isnan(error) else error) * noise
    return drawn
