"""Learning curves read from metrics.jsonl: held-out accuracy over what training took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from creditgraph.lab.bench.statistics import Floats, mean_sd
from creditgraph.pipeline.app.progress import ACCURACY, SAMPLED_TOKENS, STEPS, TRAINED_TOKENS

EVALUATOR = ACCURACY.rpartition("/")[0]  # node whose seconds and tokens are not training
ENGINE = SAMPLED_TOKENS.rpartition("/")[0]
PROCESSED = ("sampled_tokens", "prefill_tokens", "scored_tokens")  # of an engine, and of the evaluation
FEWEST_STEPS = 2  # a run that took fewer has shown nothing of its method
Axis = Literal["tokens", "processed", "steps", "trained"]
"""Along which methods are equal: sampled tokens, tokens that went through the engine, optimiser steps, or tokens in the
loss."""


@dataclass(frozen=True)
class Curve:
    """Held-out accuracy of one run over what training took before each evaluation; all [points], rising, from 0.

    Attributes:
        tokens: tokens sampled for training, whichever node asked for them; evaluation not counted.
        processed: those, and the tokens of prompts, prefixes and teacher-forced scoring that went through the engine;
            NaN after an evaluation that does not count its prompts.
        steps: optimiser steps.
        trained: tokens in the loss.
        seconds: wall time, evaluation not counted.
        length: tokens of an evaluated response, mean; NaN where the evaluation does not count them.
        accuracy: held-out accuracy.
        iterations: iterations done.
        total_tokens, total_steps: of all iterations done.
    """

    tokens: Floats
    processed: Floats
    steps: Floats
    trained: Floats
    seconds: Floats
    length: Floats
    accuracy: Floats
    iterations: int
    total_tokens: float
    total_steps: float

    def end(self, axis: Axis = "tokens") -> float:
        """Where the last evaluation is; NaN without any."""
        return float(getattr(self, axis)[-1]) if len(self.accuracy) else math.nan

    def at(self, amount: float, axis: Axis = "tokens") -> float:
        """Accuracy after so much of an axis, interpolated; NaN beyond the last evaluation."""
        return self.of("accuracy", amount, axis)

    def of(self, name: str, amount: float, axis: Axis = "tokens") -> float:
        """An attribute [points] after so much of an axis, interpolated; NaN beyond the last evaluation."""
        if not amount <= self.end(axis):
            return math.nan
        return float(np.interp(amount, getattr(self, axis), getattr(self, name)))

    def held_to(self, steps: float) -> Curve:
        """The curve with its last accuracy at so many optimiser steps too, if it ends before them."""
        if not self.end("steps") < steps:
            return self
        others = ("tokens", "processed", "trained", "seconds", "length", "accuracy")
        held: dict[str, Any] = {name: np.append(getattr(self, name), getattr(self, name)[-1]) for name in others}
        return replace(self, steps=np.append(self.steps, steps), **held)

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


def read_curve(rows: Sequence[dict[str, Any]], metric: str = ACCURACY) -> Curve:
    """The curve of a run, its accuracy being this metric of the evaluator.

    An evaluation belongs to the weights at the start of its iteration, the final pass to the last weights. The engine
    counts every token that it samples, for whichever node; those of the evaluation are taken off.
    """
    done = [row for row in rows if "seconds/iteration" in row]
    spent = np.array(
        [
            (
                _trained_on(row, PROCESSED[:1]),
                _trained_on(row, PROCESSED),
                row.get(STEPS, 0.0),
                row.get(TRAINED_TOKENS, 0.0),
                row["seconds/iteration"] - row.get(f"seconds/{EVALUATOR}", 0.0),
            )
            for row in done
        ],
        dtype=np.float64,
    ).reshape(-1, 5)
    points = [row for row in rows if not math.isnan(row.get(metric, math.nan))]
    before = [np.array([r["iteration"] < row["iteration"] for r in done], dtype=bool) for row in points]
    at = np.array([spent[earlier].sum(0) for earlier in before], dtype=np.float64).reshape(-1, 5)
    return Curve(
        tokens=at[:, 0],
        processed=at[:, 1],
        steps=at[:, 2],
        trained=at[:, 3],
        seconds=at[:, 4],
        length=np.array([_length(row) for row in points], dtype=np.float64),
        accuracy=np.array([row[metric] for row in points], dtype=np.float64),
        iterations=len(done),
        total_tokens=float(spent[:, 0].sum()),
        total_steps=float(spent[:, 2].sum()),
    )


def _trained_on(row: dict[str, Any], names: Sequence[str]) -> float:
    """Tokens of an engine in an iteration, those of its evaluation taken off."""
    evaluated = f"{EVALUATOR}/{names[0]}" in row
    own = float(sum(row.get(f"{ENGINE}/{name}", 0.0) for name in names))
    others = [row.get(f"{EVALUATOR}/{name}", math.nan if name == "prefill_tokens" else 0.0) for name in names]
    return own - sum(others) if evaluated else own


def _length(row: dict[str, Any]) -> float:
    """Tokens per response of an evaluation: greedy ones, and n further samples of each problem."""
    samples = [int(key.rpartition("_")[2]) for key in row if key.startswith(f"{EVALUATOR}/mean_at_")]
    responses = row.get(f"{EVALUATOR}/problems", math.nan) * (1 + sum(samples))
    return float(row.get(f"{EVALUATOR}/sampled_tokens", math.nan) / responses)


def next_iterations(curve: Curve, budget: float, steps: float = 0) -> int:
    """Iterations that a run needs so that its tokens pass `budget`, and its optimiser steps `steps`.

    From the means per iteration so far, 5 % more and at least one more; the present number when it has both.
    """
    more = 0
    for name, wanted, spent in (("token", budget, curve.total_tokens), ("optimiser step", steps, curve.total_steps)):
        if spent >= wanted:
            continue
        if not spent:
            raise ValueError(f"the run took no {name} in {curve.iterations} iterations; expected a method that does.")
        # What an iteration takes falls or rises while the policy learns, so 5 % are added.
        more = max(more, math.ceil(1.05 * (wanted - spent) / (spent / curve.iterations)), 1)
    return curve.iterations + more


def default_threshold(baseline: Sequence[Curve], budget: float) -> float:
    """Three quarters of the way from the baseline's first accuracy to its mean accuracy at the budget."""
    first = mean_sd([float(c.accuracy[0]) for c in baseline if len(c.accuracy)])[0]
    last = mean_sd([c.at(budget) for c in baseline])[0]
    return first + 0.75 * (last - first)
