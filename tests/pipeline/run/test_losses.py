"""A run that loses what it needs from outside saves what is finished, and goes on from there to the same weights."""

import dataclasses

import pytest
import torch
import toy_graph as toy

from creditgraph.pipeline.core.errors import LostError
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.run.checkpoint import CheckpointSettings
from creditgraph.pipeline.run.executor import Executor, RunSettings
from creditgraph.pipeline.run.run_directory import RunDirectory


class Lossy(toy.Score):
    """Scores as `Score` does, unless the servers behind it are gone."""

    def run(self, *, batch: toy.Prompts, weights: toy.Weights) -> toy.RewardsOut:
        if self.context.iteration == self.config.fail_at:
            raise LostError("all 2 servers are lost")
        return super().run(batch=batch, weights=weights)


def run(path, delay, overlap, fail_at=-1, sleep=0.0):
    base = toy.make_graph(delay)
    lossy = dataclasses.replace(toy.node("score", Lossy, None, fail_at=fail_at, sleep=sleep), wires=base["score"].wires)
    graph = Graph(tuple(lossy if n.name == "score" else n for n in base.nodes))
    settings = RunSettings(iterations=8, overlap=overlap, checkpoint=CheckpointSettings(every=100))
    with (
        RunDirectory.open(path, {"nodes": {"delay": delay}}) as directory,
        Executor(graph, settings, run=directory) as executor,
    ):
        executor.setup()
        first = executor.restore()
        executor.run()
        return first, executor.components["learner"].weights.clone()


@pytest.mark.parametrize(("delay", "overlap"), [(1, False), (2, True)])
def test_what_is_finished_is_saved_and_continued(tmp_path, delay, overlap):
    _, expected = run(tmp_path / "whole", delay, overlap)
    with pytest.raises(LostError, match=r"score .*iteration 4: all 2 servers are lost"):
        run(tmp_path / "cut", delay, overlap, fail_at=4, sleep=0.05)
    first, actual = run(tmp_path / "cut", delay, overlap)
    assert first == 4 if not overlap else first <= 4
    assert torch.equal(actual, expected)


def test_a_loss_in_the_first_iteration_leaves_nothing(tmp_path):
    with pytest.raises(LostError):
        run(tmp_path / "cut", 1, False, fail_at=0)
    assert run(tmp_path / "cut", 1, False)[0] == 0
