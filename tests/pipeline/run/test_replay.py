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


def trained(folder, recipe):
    """A short run of a recipe, with everything recorded."""
    small = ["prompts.batch=2", "sampler.group_size=2", "evaluator.every=0", "evaluator.num_problems=4"]
    small += ["run.iterations=2", "run.record.every=1", "run.checkpoint.every=1", "run.device=cpu"]
    assert main(["train", f"recipe={recipe}", f"run.root={folder}", "run.name=r", *small]) == 0
    return ["replay", str(folder / "r"), "--iteration", "1", "--node", "advantage"]


@pytest.mark.slow
def test_weights_that_are_made_of_others_are_computed_again(tmp_path, capsys):
    assert main(trained(tmp_path, "toy_sdpo")) == 0
    assert "advantage.credit: the same bits as recorded" in capsys.readouterr().out


@pytest.mark.slow
def test_credit_of_turns_is_computed_again(tmp_path, capsys):
    replay = trained(tmp_path, "toy_gigpo_thoughts")
    assert main(replay) == 0
    assert "advantage.credit: the same bits as recorded" in capsys.readouterr().out
    assert main([*replay, "-s", "normalize=mean"]) == 0
    printed = capsys.readouterr().out
    assert "the same bits" not in printed
    assert " rows differ, largest " in printed
