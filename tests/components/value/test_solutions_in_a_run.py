"""A column of solutions in a file reaches values by loading, wires and records, and replay reads it again."""

import json

import pytest
import torch

from creditgraph.components.data.loading import load_data
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.sockets import Wire
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose
from creditgraph.pipeline.run.executor import Executor
from creditgraph.pipeline.run.replay import Replay
from creditgraph.pipeline.run.run_directory import RunDirectory


@pytest.mark.slow
def test_solutions_are_carried_recorded_and_replayed(tmp_path):
    rows = load_data({"source": "chains", "size": 4}, Context()).rows[:]
    data = [{"question": r.metadata["question"], "answer": r.answer, "worked": r.solution} for r in rows]
    data[0]["worked"] = None
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    config = compose(
        [
            "recipe=toy_rredcot_solution",
            "run.iterations=1",
            "run.record.every=1",
            "prompts.batch=4",
            "sampler.group_size=2",
            "evaluator.every=0",
        ]
    )
    config["data"] = {
        "train": {"source": "file", "path": str(path), "template": "chains", "solution": "worked"},
        "eval": {"source": "chains", "split": "eval", "size": 4},
    }
    run_dir = tmp_path / "run"
    experiment = build_experiment(config, "test")
    with (
        RunDirectory.open(run_dir, config) as run,
        Executor(experiment.graph, experiment.run, run=run, model=experiment.model, data=experiment.data) as executor,
    ):
        executor.setup()
        executor.restore()
        executor.run()
    with Replay(run_dir) as replay:
        prompts = replay.value(Wire("prompts", "batch"), 0)
        by_question = {m["question"]: s for m, s in zip(prompts.metadata, prompts.solution, strict=True)}
        assert by_question == {row["question"]: row["worked"] or "" for row in data}
        again = replay.again("value", 0)
    recorded = again.recorded["values"]
    assert torch.equal(recorded.logs.values, again.outputs["values"].logs.values)
    assert torch.equal(recorded.values.values, again.outputs["values"].values.values)
    assert json.loads((run_dir / "data_card.json").read_text())["data.train"]["rows"]["with_solution"] == 3
