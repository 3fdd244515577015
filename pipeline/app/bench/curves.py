"""Learning curves read from metrics.jsonl, and what can be said about two methods from a few seeds. Pure."""

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

# One-sided 95 % quantile of Student's t by degrees of freedom; beyond the list the normal one.
T_95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)


@dataclass(frozen=True)
class Curve:
    """Held-out accuracy of one run against what it had spent on training before each evaluation.

    Attributes:
        tokens: sampled tokens, evaluation not counted; rising, from 0.
        seconds: wall time, evaluation not counted.
        accuracy: [points].
        iterations: iterations done.
        total_tokens, total_seconds: of all iterations done.
    """

    tokens: Floats
    seconds: Floats
    accuracy: Floats
    iterations: int
    total_tokens: float
    total_seconds: float

    def at(self, tokens: float) -> float:
        """Accuracy after so many sampled tokens, interpolated; NaN beyond the last evaluation."""
        if not len(self.tokens) or tokens > self.tokens[-1]:
            return math.nan
        return float(np.interp(tokens, self.tokens, self.accuracy))

    def reaches(self, threshold: float, budget: float) -> float:
        """Sampled tokens at which accuracy first gets to `threshold`, interpolated; NaN when it does not within `budget`."""
        tokens, accuracy = self.tokens, self.accuracy
        above = np.flatnonzero(accuracy >= threshold)
        if not len(above):
            return math.nan
        i = int(above[0])
        if i == 0:
            return float(tokens[0])
        found = float(np.interp(threshold, accuracy[i - 1 : i + 1], tokens[i - 1 : i + 1]))
        return found if found <= budget else math.nan


def training_tokens(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Tokens sampled for training in each iteration.

    The engine counts every token, those of evaluation too. So in iterations with an evaluation the nodes' own counts
    ("node/sampled_tokens") stand in, scaled by what engine and nodes counted in the other iterations (1 when every node
    reports).
    """
    own = [
        sum(
            v
            for k, v in row.items()
            if k.endswith("/sampled_tokens") and k not in (SAMPLED_TOKENS, EVALUATOR + "/sampled_tokens")
        )
        for row in rows
    ]
    engine = [row.get(SAMPLED_TOKENS, math.nan) for row in rows]
    plain = [i for i, row in enumerate(rows) if ACCURACY not in row]
    ratios = [engine[i] / own[i] for i in plain if own[i] > 0 and not math.isnan(engine[i])]
    scale = median(ratios) if ratios else 1.0
    return [
        engine[i] if ACCURACY not in row and not math.isnan(engine[i]) else own[i] * scale for i, row in enumerate(rows)
    ]


def read_curve(rows: Sequence[dict[str, Any]]) -> Curve:
    """The curve of a run; an evaluation belongs to the weights at the start of its iteration, the final pass to the last ones."""
    evaluation = "seconds/" + EVALUATOR
    iterations = [row for row in rows if "seconds/iteration" in row]
    spent = dict(zip((r["iteration"] for r in iterations), training_tokens(iterations), strict=True))
    wall = {r["iteration"]: r["seconds/iteration"] - r.get(evaluation, 0.0) for r in iterations}
    points = []
    for row in rows:
        if ACCURACY in row and not math.isnan(row[ACCURACY]):
            before = [i for i in spent if i < row["iteration"]]
            points.append((sum(spent[i] for i in before), sum(wall[i] for i in before), row[ACCURACY]))
    columns = np.array(points, dtype=np.float64).reshape(-1, 3)
    return Curve(
        columns[:, 0],
        columns[:, 1],
        columns[:, 2],
        len(iterations),
        float(sum(spent.values())),
        float(sum(wall.values())),
    )


def next_iterations(curve: Curve, budget: float, pilot: int) -> int:
    """Iterations a run should be given so that its tokens pass `budget`; the present number when they already do.

    Without any iteration: `pilot`. Later: what the mean so far suggests, 5 % more and at least one more.
    """
    if curve.iterations == 0:
        return pilot
    if curve.total_tokens >= budget:
        return curve.iterations
    if not curve.total_tokens:
        raise ValueError(f"the run sampled no token in {curve.iterations} iterations; wanted a method that samples.")
    missing = (budget - curve.total_tokens) / (curve.total_tokens / curve.iterations)
    return curve.iterations + max(1, math.ceil(1.05 * missing))


@dataclass(frozen=True)
class Verdict:
    """A method against the baseline at the budget, by seed.

    Attributes:
        difference: mean of paired differences in accuracy.
        error: its standard error, NaN for fewer than two seeds.
        word: "above", "below" or "not told apart" (one-sided t test at 5 % each way).
    """

    difference: float
    error: float
    word: str


def judge_difference(method: dict[int, float], baseline: dict[int, float]) -> Verdict:
    """Pairs accuracies by seed; NaN entries and seeds that only one has are left out."""
    seeds = [s for s in method if s in baseline and not math.isnan(method[s]) and not math.isnan(baseline[s])]
    differences = [method[s] - baseline[s] for s in seeds]
    mean, spread = mean_sd(differences)
    if len(differences) < 2:
        return Verdict(mean, math.nan, "not told apart")
    error = spread / math.sqrt(len(differences))
    bar = T_95[len(differences) - 2] if len(differences) - 2 < len(T_95) else 1.645
    word = "not told apart" if abs(mean) <= bar * error else "above" if mean > 0 else "below"
    return Verdict(mean, error, word)


def default_threshold(baseline: Sequence[Curve], budget: float) -> float:
    """Three quarters of the way from the baseline's first accuracy to its mean accuracy at the budget."""
    first = mean_sd([float(c.accuracy[0]) for c in baseline if len(c.accuracy)])[0]
    last = mean_sd([c.at(budget) for c in baseline])[0]
    return first + 0.75 * (last - first)
