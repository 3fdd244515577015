"""Values that a node of a finished run gives out again, from its checkpoints."""

import pytest
import torch

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.core.sockets import Wire
from creditgraph.pipeline.run.checkpoint import CheckpointSettings
from creditgraph.pipeline.run.compose.experiment import build_experiment
from creditgraph.pipeline.run.executor import Executor, RunSettings
from creditgraph.pipeline.run.replay import Replay
from creditgraph.pipeline.run.run_directory import RunDirectory

NODES = {
    "source": {"use": "toy_graph:Source"},
    "score": {"use": "toy_graph:Score", "in": {"batch": "source.batch", "weights": "learner.weights@1"}},
    "learner": {"use": "toy_graph:ShardedLearn", "in": {"batch": "source.batch", "rewards": "score.rewards"}},
}


def test_weights_come_from_shards(tmp_path):
    config = {"nodes": NODES}
    settings = RunSettings(iterations=4, checkpoint=CheckpointSettings(every=2))
    graph = build_experiment(config, "toy").graph
    with RunDirectory.open(tmp_path, config) as run, Executor(graph, settings, run=run) as executor:
        executor.setup()
        executor.restore()
        executor.run()
        trained = executor.components["learner"].publish()
    with Replay(tmp_path) as replay:
        weights = replay.value(Wire("learner", "weights", 1), 4)
        initial = replay.value(Wire("learner", "weights", 1), 0)
    assert weights.version == 4
    assert torch.equal(weights.tensors["w"], trained.tensors["w"])
    assert not torch.equal(weights.tensors["w"], initial.tensors["w"])
    assert not replay.notes


@pytest.mark.slow
def test_weights_that_are_made_of_others_are_computed_again(tmp_path, capsys):
    small = ["prompts.batch=2", "sampler.group_size=2", "evaluator.every=0", "evaluator.num_problems=4"]
    small += ["run.iterations=2", "run.record.every=1", "run.checkpoint.every=1", "run.device=cpu"]
    assert main(["train", "recipe=toy_sdpo", f"run.root={tmp_path}", "run.name=r", *small]) == 0
    assert main(["replay", str(tmp_path / "r"), "--iteration", "1", "--node", "advantage"]) == 0
    assert "advantage.credit: the same bits as recorded" in capsys.readouterr().out
