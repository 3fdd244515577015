"""Metrics of each task with intervals, means over tasks, and paired differences of two subjects."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from creditgraph.lab.evaluate.estimates import (
    Estimate,
    Floats,
    estimate,
    majority_at,
    pass_values,
    resampled_means,
)
from creditgraph.lab.evaluate.items import Chunk, ItemStore
from creditgraph.lab.evaluate.suite import Suite, SuiteTask
from creditgraph.pipeline.core.streams import Stream

COLUMNS = ("problem", "problem_id", "answer", "correct", "valid", "reward", "finish_reason", "flagged")
GREEDY = "greedy pass@1"


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """Numbers per problem of one task.

    Attributes:
        ids: [P] problem ids.
        flagged: [P], None when the training data was not searched.
        metrics: name → float64 [P].
        counts: numbers of responses: all, invalid, without an answer, cut off.
    """

    ids: list[str]
    flagged: list[bool] | None
    metrics: dict[str, Floats]
    counts: dict[str, int]


def read_scores(store: ItemStore, chunks: Sequence[Chunk], task: SuiteTask) -> TaskScores:
    """Numbers per problem from the records of a task; one chunk is in memory at a time."""
    ids: list[str] = []
    flagged: list[Any] = []
    values: dict[str, list[float]] = {}
    counts = dict.fromkeys(("responses", "invalid", "no_answer", "cut"), 0)
    for chunk, table in zip(chunks, store.tables(chunks, COLUMNS), strict=True):
        rows = table.to_pydict()
        counts["responses"] += chunk.rows
        counts["invalid"] += rows["valid"].count(False)
        counts["no_answer"] += rows["answer"].count(None)
        counts["cut"] += sum(reason in ("length", "thoughts") for reason in rows["finish_reason"])
        first_pass = chunk.part == chunks[0].part
        for at in range(0, chunk.rows, chunk.samples):
            one = slice(at, at + chunk.samples)
            if first_pass:
                ids.append(rows["problem_id"][at])
                flagged.append(rows["flagged"][at])
            for name, value in _of_problem(
                chunk, task, rows["correct"][one], rows["reward"][one], rows["answer"][one]
            ).items():
                values.setdefault(name, []).append(value)
    metrics = {name: np.array(column) for name, column in values.items()}
    # All problems at once, because pass@k is a table over the number of right samples.
    for k in task.k:
        metrics[f"pass@{k}"] = pass_values([round(c) for c in metrics["right"]], task.samples, k)
    metrics.pop("right", None)
    for name in [n for n in metrics if n.endswith("reward")]:
        # Only where a reward is more than right or wrong.
        if np.array_equal(metrics[name], metrics[GREEDY if name.startswith("greedy") else f"avg@{task.samples}"]):
            metrics.pop(name)
    known = None if any(f is None for f in flagged) else [bool(f) for f in flagged]
    return TaskScores(ids=ids, flagged=known, metrics={n: metrics[n] for n in metric_order(metrics)}, counts=counts)


def _of_problem(
    chunk: Chunk, task: SuiteTask, correct: list[bool], reward: list[float], answer: list[str | None]
) -> dict[str, float]:
    if chunk.part == "greedy":
        return {GREEDY: float(correct[0]), "greedy reward": float(reward[0])}
    n = chunk.samples
    votes = {f"maj@{k}": majority_at(answer, correct, k) for k in task.k if k > 2} if task.majority else {}
    return {
        "right": float(sum(correct)),
        f"avg@{n}": sum(correct) / n,
        f"avg@{n} reward": float(np.mean(reward, dtype=np.float64)),
        **votes,
    }


def metric_order(names: Iterable[str]) -> list[str]:
    """Greedy first, then avg@n, pass@k, maj@k, each by its number, and mean rewards last.

    >>> metric_order(["pass@16", "pass@2", "avg@16 reward", "greedy pass@1"])
    ['greedy pass@1', 'pass@2', 'pass@16', 'avg@16 reward']
    """
    names = list(names)
    ranks = {"greedy": 0, "avg": 1, "pass": 2, "maj": 3}
    number = {n: int("".join(c for c in n.partition("@")[2] if c.isdigit()) or 0) for n in names}
    return sorted(names, key=lambda n: (n.endswith("reward"), ranks[n.partition("@")[0].split()[0]], number[n]))


def task_results(name: str, scores: TaskScores, suite: Suite) -> dict[str, Any]:
    """The results of a task as JSON values: every metric with its interval, and again without the flagged problems."""
    results: dict[str, Any] = {
        "problems": len(scores.ids),
        **scores.counts,
        "metrics": _plain(estimates(name, scores.metrics, suite)),
        "flagged": None if scores.flagged is None else sum(scores.flagged),
    }
    if results["flagged"]:
        kept = ~np.array(scores.flagged, dtype=bool)
        rest = {n: v[kept] for n, v in scores.metrics.items()}
        results["without_flagged"] = {
            "problems": int(kept.sum()),
            "metrics": _plain(estimates(name, rest, suite)) if kept.any() else {},
        }
    return results


def mean_results(scores: Mapping[str, TaskScores], suite: Suite) -> dict[str, Any]:
    """Unweighted means over tasks of the metrics that all of them have; problems are drawn within each task.

    Tasks with `in_mean` off are left out.
    """
    scores = {name: score for name, score in scores.items() if suite.tasks[name].in_mean}
    if len(scores) < 2:
        return {}
    names = [n for n in next(iter(scores.values())).metrics if all(n in s.metrics for s in scores.values())]
    if not names:
        return {}
    values = np.mean([[s.metrics[n].mean() for n in names] for s in scores.values()], axis=0)
    drawn = np.mean([_means(task, _matrix(s.metrics, names), suite) for task, s in scores.items()], axis=0)
    means = estimate(values[None, :], drawn, suite.confidence)
    return {"metrics": _plain(dict(zip(names, means, strict=True)))}


def estimates(task: str, metrics: Mapping[str, Floats], suite: Suite) -> dict[str, Estimate]:
    """One estimate per metric; all metrics of a task share their draws."""
    matrix = _matrix(metrics, list(metrics))
    return dict(zip(metrics, estimate(matrix, _means(task, matrix, suite), suite.confidence), strict=True))


def paired(task: str, first: TaskScores, second: TaskScores, suite: Suite) -> dict[str, Any]:
    """Differences second − first over the problems both have, drawn in pairs: easy and hard problems cancel.

    "resolved" says whether the interval leaves out 0.
    """
    place = {i: n for n, i in enumerate(second.ids)}
    common = [(n, place[i]) for n, i in enumerate(first.ids) if i in place]
    names = [n for n in first.metrics if n in second.metrics]
    gaps: dict[str, Estimate] = {}
    if common and names:
        left, right = np.array(common).T
        gaps = estimates(task, {n: second.metrics[n][right] - first.metrics[n][left] for n in names}, suite)
    return {
        "problems": len(common),
        "only_first": len(first.ids) - len(common),
        "only_second": len(second.ids) - len(common),
        "metrics": {n: {**vars(e), "resolved": e.low > 0 or e.high < 0} for n, e in gaps.items()},
    }


def _matrix(metrics: Mapping[str, Floats], names: Sequence[str]) -> Floats:
    return np.stack([metrics[n] for n in names], axis=1)


def _means(task: str, matrix: Floats, suite: Suite) -> Floats:
    # Keyed by task, not by subject: subjects that are compared draw the same problems.
    generator = Stream(suite.seed, "evaluation", "bootstrap", task).generator()
    return resampled_means(matrix, generator, suite.resamples)


def _plain(by_name: Mapping[str, Estimate]) -> dict[str, dict[str, float]]:
    return {name: dict(vars(e)) for name, e in by_name.items()}
