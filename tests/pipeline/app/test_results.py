import json
import math

from creditgraph.pipeline.app.results import as_table, summarise, write_results
from creditgraph.pipeline.run.metrics import JsonLines

ROWS = [
    {
        "iteration": i,
        "rewards/mean": i / 10,
        "engine/sampled_tokens": 100.0,
        "learner/trained_tokens": 80.0,
        "seconds/engine": 2.0,
        "seconds/learner": 1.0,
        "seconds/waiting_learning": 0.5,
        "seconds/iteration": 3.5,
        "seconds/cpu": 3.0,
        **({"evaluator/accuracy": 0.2} if i == 0 else {}),
    }
    for i in range(20)
] + [{"iteration": 20, "evaluator/accuracy": 0.65, "seconds/evaluator": 4.0}]


def test_summary_by_hand():
    results = summarise(ROWS)
    assert (results.iterations, results.accuracy_before, results.accuracy_after) == (20, 0.2, 0.65)
    assert (results.sampled_tokens, results.trained_tokens) == (2000, 1600)
    # 20 rows: a tenth is 2 of them, (0 + .1) / 2 and (1.8 + 1.9) / 2
    assert (round(results.reward_first, 9), round(results.reward_last, 9)) == (0.05, 1.85)
    assert results.seconds == 20 * 3.5 + 4
    assert results.phases == {"engine": 40.0, "learner": 20.0, "evaluator": 4.0}
    assert results.curve == [(0, 0.2), (20, 0.65)]


def test_an_interrupted_run_claims_no_accuracy_after():
    """Measured before iteration 0 and before 10, ended after 14: nothing measured what the last ones did."""
    rows = [{**row, "evaluator/accuracy": 0.4} if row["iteration"] == 10 else row for row in ROWS[:15]]
    results = summarise(rows)
    assert (results.accuracy_before, results.accuracy_after) == (0.2, None)
    text = "0.200 before, 0.400 before iteration 10; not measured after the last iteration"
    assert f"held-out accuracy  {text}" in as_table(results).splitlines()
    first = as_table(summarise(ROWS[:5])).splitlines()
    assert "held-out accuracy  0.200 before; not measured after the last iteration" in first


def test_table_text():
    lines = as_table(summarise(ROWS)).splitlines()
    assert "held-out accuracy  0.200 before, 0.650 after (+45.0 points)" in lines
    assert "sampled tokens     2,000" in lines
    assert "time               1m14s" in lines
    assert "  engine               40.0 s  62.5 %" in lines


def test_memory_and_rates_of_gpus():
    row = {
        "iteration": 0,
        "learner/mfu": 0.4,
        "learner/tokens_per_second": 3000.0,
        "seconds/engine": 1.0,
        "seconds/learner": 1.0,
    }
    memory = {"memory/engine": 30.0, "memory/engine_reserved": 40.0}
    results = summarise([{**row, **memory}, {**row, **memory, "memory/engine": 35.04, "learner/mfu": 0.5}])
    assert results.memory == {"engine": (35.04, 40.0)}
    lines = as_table(results).splitlines()
    assert "MFU of the learner     45.0%" in lines
    assert "trained per s and GPU  3,000 tokens" in lines
    assert "  engine                    2.0 s  50.0 %  at most 35.0 GB in tensors, 40.0 GB taken" in lines
    assert "  learner                   2.0 s  50.0 %" in lines


def test_missing_metrics_are_left_out():
    text = as_table(summarise([{"iteration": 0, "rewards/mean": math.nan}]))
    assert "accuracy" not in text
    assert "reward" not in text
    assert as_table(summarise([])).startswith("iterations  0")


def test_files_are_written(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    for row in ROWS:
        sink.log(row["iteration"], {k: v for k, v in row.items() if k != "iteration"})
    sink.close()
    table = write_results(tmp_path)
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored["accuracy_after"] == 0.65
    assert "held-out accuracy" in table
