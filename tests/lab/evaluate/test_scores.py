"""From records to metrics and differences: by hand."""

import dataclasses

import numpy as np
import pytest

from creditgraph.lab.evaluate.items import ItemStore, plan
from creditgraph.lab.evaluate.scores import (
    TaskScores,
    estimates,
    mean_results,
    metric_order,
    paired,
    read_scores,
    task_results,
)
from creditgraph.lab.evaluate.suite import Suite, SuiteTask

SUITE = Suite(name="s", title="t", version=1, resamples=200)


def store(folder, task, right, reward=None, answers=None, flagged=None):
    """Records of a task; `right` is [P][n], the greedy response of a problem being its first sample."""
    result, chunks = ItemStore(folder, {"task": "t"}, 3), plan(len(right), task.greedy, task.samples, 3)
    for chunk in chunks:
        cells = [(i, j) for i in range(chunk.first, chunk.last) for j in range(chunk.samples)]
        columns = {name: [0] * len(cells) for name in ("sample", "seed")} | {
            name: [""] * len(cells) for name in ("task", "text", "prompt_hash")
        }
        columns |= {
            "pass": [chunk.part] * len(cells),
            "problem": [i for i, _ in cells],
            "problem_id": [f"id{i}" for i, _ in cells],
        }
        columns |= {"tokens": [[1]] * len(cells), "reason": [""] * len(cells), "logprob": [0.0] * len(cells)}
        columns |= {"correct": [right[i][j] for i, j in cells], "valid": [j != 1 for _, j in cells]}
        columns |= {
            "reward": [(reward or right)[i][j] for i, j in cells],
            "finish_reason": ["length" if j else "eos" for _, j in cells],
        }
        columns |= {
            "answer": [answers[i][j] if answers else None for i, j in cells],
            "flagged": [flagged and flagged[i] for i, _ in cells],
        }
        result.write(chunk, columns)
    return read_scores(result, chunks, task)


def values(scores):
    return {name: v.tolist() for name, v in scores.metrics.items()}


def test_metrics_of_each_problem(tmp_path):
    task = SuiteTask(samples=4, k=(2, 4))
    right = [[True, False, False, False], [True] * 4, [False] * 4]
    answers = [["7", "8", "8", None], ["1"] * 4, ["1", "2", "3", "3"]]
    scores = store(tmp_path / "s", task, right, answers=answers)
    assert values(scores) == {
        "greedy pass@1": [1, 1, 0],
        "avg@4": [0.25, 1, 0],
        "pass@2": [pytest.approx(0.5), 1, 0],
        "pass@4": [1, 1, 0],
        "maj@4": [0, 1, 0],
    }
    assert scores.ids == ["id0", "id1", "id2"]
    # 3 greedy and 12 sampled responses; sample 1 of each problem is invalid, all but the first are cut off.
    assert scores.counts == {"responses": 15, "invalid": 3, "no_answer": 1, "cut": 9}
    assert scores.flagged is None


def test_rewards_that_are_more_than_right_or_wrong_are_reported(tmp_path):
    task = SuiteTask(samples=2, majority=False, k=(1,))
    scores = store(tmp_path / "s", task, [[True, False], [False, False]], reward=[[1.0, 0.5], [0.25, 0.0]])
    assert values(scores) == {
        "greedy pass@1": [1, 0],
        "avg@2": [0.5, 0],
        "pass@1": [0.5, 0],
        "greedy reward": [1, 0.25],
        "avg@2 reward": [0.75, 0.125],
    }


def test_results_without_flagged_problems(tmp_path):
    scores = store(tmp_path / "s", SuiteTask(), [[True], [False], [True]], flagged=[True, False, False])
    result = task_results("t", scores, SUITE)
    assert (result["problems"], result["flagged"], result["without_flagged"]["problems"]) == (3, 1, 2)
    assert result["metrics"]["greedy pass@1"]["value"] == pytest.approx(2 / 3)
    assert result["without_flagged"]["metrics"]["greedy pass@1"]["value"] == 0.5
    everything = store(tmp_path / "all", SuiteTask(), [[True]], flagged=[True])
    assert task_results("t", everything, SUITE)["without_flagged"] == {"problems": 0, "metrics": {}}
    assert "without_flagged" not in task_results(
        "t", store(tmp_path / "none", SuiteTask(), [[True]], flagged=[False]), SUITE
    )


def scores_of(ids, **metrics):
    return TaskScores(
        ids=ids,
        flagged=None,
        metrics={n.replace("_", "@"): np.array(v, dtype=float) for n, v in metrics.items()},
        counts={},
    )


def test_differences_are_paired_by_problem_and_not_by_place():
    first = scores_of(["a", "b", "c"], avg_4=[0.25, 0.5, 1.0], pass_2=[1, 1, 1])
    second = scores_of(["c", "a", "d"], avg_4=[1.0, 0.5, 0.0])
    result = paired("t", first, second, SUITE)
    assert (result["problems"], result["only_first"], result["only_second"]) == (2, 1, 1)
    assert list(result["metrics"]) == ["avg@4"]  # pass@2 is in one of them only
    gap = result["metrics"]["avg@4"]
    assert gap["value"] == pytest.approx((0.25 + 0.0) / 2)  # a: .5 − .25, c: 1 − 1
    assert (gap["low"], gap["high"], gap["resolved"]) == (0.0, 0.25, False)
    assert paired("t", first, scores_of(["x"], avg_4=[1]), SUITE)["metrics"] == {}


def test_pairs_resolve_what_two_intervals_do_not():
    """Problems differ far more than the two subjects do."""
    easy = np.linspace(0, 0.9, 60)
    ids = [str(i) for i in range(60)]
    first, second = scores_of(ids, avg_4=easy), scores_of(ids, avg_4=easy + 0.05)
    one, other = (estimates("t", s.metrics, SUITE)["avg@4"] for s in (first, second))
    assert other.low < one.high  # apart, they overlap
    gap = paired("t", first, second, SUITE)["metrics"]["avg@4"]
    assert gap["resolved"]
    assert (gap["low"], gap["high"]) == (pytest.approx(0.05), pytest.approx(0.05))


def test_the_mean_of_tasks_is_unweighted_and_of_common_metrics():
    few, many = scores_of(["a"], avg_4=[1.0], pass_2=[1.0]), scores_of(["b", "c", "d"], avg_4=[0.0, 0.0, 0.3])
    tasks = {"few": SuiteTask(), "many": SuiteTask(), "code": SuiteTask(in_mean=False)}
    suite = dataclasses.replace(SUITE, tasks=tasks)
    result = mean_results({"few": few, "many": many, "code": scores_of(["e"], avg_4=[0.5])}, suite)["metrics"]
    assert list(result) == ["avg@4"]
    assert result["avg@4"]["value"] == pytest.approx((1.0 + 0.1) / 2)
    assert mean_results({"few": few, "code": many}, suite) == {}


def test_order_of_metrics():
    names = ["maj@8", "avg@16 reward", "pass@16", "pass@2", "avg@16", "greedy reward", "greedy pass@1"]
    assert metric_order(names) == [
        "greedy pass@1",
        "avg@16",
        "pass@2",
        "pass@16",
        "maj@8",
        "greedy reward",
        "avg@16 reward",
    ]
