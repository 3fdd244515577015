"""Learning curves read from metrics.jsonl, and the test of two methods on a few seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from pipeline.app.bench.statistics import Floats, mean_sd
from pipeline.app.progress import ACCURACY, SAMPLED_TOKENS

EVALUATOR = ACCURACY.rpartition("/")[0]  # node whose seconds and tokens are not training
NO_DIFFERENCE = "no significant difference"
# One-sided 95 % quantile of Student's t by degrees of freedom; beyond the list the normal one.
T_95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)


@dataclass(frozen=True)
class Curve:
    """Held-out accuracy of one run over the tokens and seconds of training before each evaluation.

    Attributes:
        tokens: sampled tokens, evaluation not counted; rising, from 0.
        seconds: wall time, evaluation not counted.
        accuracy: [points].
        iterations: iterations done.
        total_tokens: sampled tokens of all iterations done.
    """

    tokens: Floats
    seconds: Floats
    accuracy: Floats
    iterations: int
    total_tokens: float

    def at(self, tokens: float) -> float:
        """Accuracy after so many sampled tokens, interpolated; NaN beyond the last evaluation."""
        if not len(self.tokens) or tokens > self.tokens[-1]:
            return math.nan
        return float(np.interp(tokens, self.tokens, self.accuracy))

    def seconds_at(self, tokens: float) -> float:
        """Wall time of training up to so many sampled tokens, interpolated; NaN without any evaluation."""
        return float(np.interp(tokens, self.tokens, self.seconds)) if len(self.tokens) else math.nan

    def reaches(self, threshold: float, budget: float) -> float:
        """Sampled tokens at which accuracy first reaches `threshold`, interpolated; NaN when not within `budget`."""
        above = np.flatnonzero(self.accuracy >= threshold)
        if not len(above):
            return math.nan
        i = int(above[0])
        if i == 0:
            return float(self.tokens[0])
        around = slice(i - 1, i + 1)
        crossing = float(np.interp(threshold, self.accuracy[around], self.tokens[around]))
        return crossing if crossing <= budget else math.nan


def training_tokens(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Tokens sampled for training in each iteration.

    The engine counts every token, including those of evaluation. So in iterations with an evaluation the nodes' counts
    ("node/sampled_tokens") are used, scaled by the ratio of engine to nodes in the other iterations (1 when every node
    reports).
    """
    left_out = (SAMPLED_TOKENS, f"{EVALUATOR}/sampled_tokens")
    own = [sum(v for k, v in row.items() if k.endswith("/sampled_tokens") and k not in left_out) for row in rows]
    engine = [math.nan if ACCURACY in row else row.get(SAMPLED_TOKENS, math.nan) for row in rows]
    ratios = [e / o for e, o in zip(engine, own, strict=True) if o > 0 and not math.isnan(e)]
    scale = median(ratios) if ratios else 1.0
    return [o * scale if math.isnan(e) else e for e, o in zip(engine, own, strict=True)]


def read_curve(rows: Sequence[dict[str, Any]]) -> Curve:
    """The curve of a run.

    An evaluation belongs to the weights at the start of its iteration, the final pass to the last weights.
    """
    iterations = [row for row in rows if "seconds/iteration" in row]
    number = [row["iteration"] for row in iterations]
    tokens = dict(zip(number, training_tokens(iterations), strict=True))
    seconds = {r["iteration"]: r["seconds/iteration"] - r.get(f"seconds/{EVALUATOR}", 0.0) for r in iterations}
    points = []
    for row in rows:
        accuracy = row.get(ACCURACY, math.nan)
        if not math.isnan(accuracy):
            before = [i for i in number if i < row["iteration"]]
            points.append((sum(tokens[i] for i in before), sum(seconds[i] for i in before), accuracy))
    columns = np.array(points, dtype=np.float64).reshape(-1, 3)
    return Curve(
        tokens=columns[:, 0],
        seconds=columns[:, 1],
        accuracy=columns[:, 2],
        iterations=len(iterations),
        total_tokens=float(sum(tokens.values())),
    )


def next_iterations(curve: Curve, budget: float) -> int:
    """Iterations that a run needs so that its tokens pass `budget`; the present number when they already do.

    From the mean tokens per iteration so far, 5 % more and at least one more.
    """
    if curve.total_tokens >= budget:
        return curve.iterations
    if not curve.total_tokens:
        raise ValueError(f"the run sampled no token in {curve.iterations} iterations; expected a method that samples.")
    # Tokens per iteration fall or rise while the policy learns, so 5 % are added.
    missing = (budget - curve.total_tokens) / (curve.total_tokens / curve.iterations)
    return curve.iterations + max(1, math.ceil(1.05 * missing))


@dataclass(frozen=True)
class Verdict:
    """A method against the baseline at the budget, by seed.

    Attributes:
        difference: mean of paired differences in accuracy.
        error: its standard error, NaN for fewer than two seeds.
        word: "above", "below" or `NO_DIFFERENCE` (one-sided t test at 5 % each way).
    """

    difference: float
    error: float
    word: str


def paired_test(method: dict[int, float], baseline: dict[int, float]) -> Verdict:
    """Compares accuracies paired by seed; NaN entries and seeds that only one of them has are left out."""
    seeds = [s for s in method if s in baseline and not math.isnan(method[s]) and not math.isnan(baseline[s])]
    differences = [method[s] - baseline[s] for s in seeds]
    mean, spread = mean_sd(differences)
    if len(differences) < 2:
        return Verdict(mean, math.nan, NO_DIFFERENCE)
    error = spread / math.sqrt(len(differences))
    bar = T_95[len(differences) - 2] if len(differences) - 2 < len(T_95) else 1.645
    if abs(mean) <= bar * error:
        return Verdict(mean, error, NO_DIFFERENCE)
    return Verdict(mean, error, "above" if mean > 0 else "below")


def default_threshold(baseline: Sequence[Curve], budget: float) -> float:
    """Three quarters of the way from the baseline's first accuracy to its mean accuracy at the budget."""
    first = mean_sd([float(c.accuracy[0]) for c in baseline if len(c.accuracy)])[0]
    last = mean_sd([c.at(budget) for c in baseline])[0]
    return first + 0.75 * (last - first)
