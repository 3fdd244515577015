"""A checkpoint whose shards are written while the run goes on counts only once the last of them is there."""

import pytest
import torch
import toy_graph as toy

from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.run.checkpoint import CheckpointSettings, numbered
from creditgraph.pipeline.run.executor import Executor, RunSettings
from creditgraph.pipeline.run.node_runner import NodeFailure
from creditgraph.pipeline.run.run_directory import RunDirectory


class Writes:
    """Shards that are on disk only after `polls` calls of `done`."""

    def __init__(self, path, state, polls):
        self.path, self.state, self.polls = path, state, polls

    def done(self):
        self.polls -= 1
        return self.polls <= 0

    def finish(self):
        torch.save(self.state, self.path)


class SlowLearn(toy.ShardedLearn):
    """Its shards take three iterations."""

    placement = "collective"
    polls = 3

    def save_shards(self, folder):
        state = {"weights": self.weights.clone(), "optimizer": {**self.optimizer}}
        state["optimizer"]["state"] = {0: {k: v.clone() for k, v in self.optimizer["state"][0].items()}}
        return Writes(folder / "rank0.pt", state, self.polls)


def graph(fail_at=-1):
    wires = {"batch": "source.batch", "rewards": "score.rewards"}
    nodes = [
        toy.node("learner", SlowLearn, wires, fail_at=fail_at) if n.name == "learner" else n
        for n in toy.make_graph().nodes
    ]
    return Graph(tuple(nodes))


def train(path, iterations, background, fail_at=-1, seen=None):
    checkpoint = CheckpointSettings(every=4, background=background)
    settings = RunSettings(iterations=iterations, checkpoint=checkpoint)

    class Watch:
        def node_started(self, node, iteration): ...

        def iteration_done(self, iteration, metrics):
            if seen is not None:
                seen[iteration] = [int(p.name) for p in numbered(path / "checkpoints")]

    with (
        RunDirectory.open(path, {}) as run,
        Executor(graph(fail_at), settings, run=run, observer=Watch()) as executor,
    ):
        executor.setup()
        first = executor.restore()
        executor.run()
        return first, executor.components["learner"].weights


def test_it_counts_when_the_last_shard_is_written(tmp_path):
    seen = {}
    _, weights = train(tmp_path / "late", 10, background=True, seen=seen)
    # Begun after iteration 3, polled there and after 4 and 5; so before the log of iteration 6.
    assert [3 in seen[i] for i in range(4, 8)] == [False, False, True, True]
    # Begun after 7 and written with the last one: the end of a run waits.
    assert [int(p.name) for p in numbered(tmp_path / "late" / "checkpoints")] == [7, 9]
    _, expected = train(tmp_path / "now", 10, background=False)
    assert torch.equal(weights, expected)
    again, resumed = train(tmp_path / "late", 12, background=True)
    assert again == 10
    assert torch.equal(resumed, train(tmp_path / "now", 12, background=False)[1])


def test_a_run_that_dies_meanwhile_continues_from_the_checkpoint_before(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(NodeFailure, match="diverged"):
        train(path, 12, background=True, fail_at=9)
    # The one after iteration 7 was begun, and is not complete.
    assert [int(p.name) for p in numbered(path / "checkpoints")] == [3]
    assert [p.name for p in (path / "checkpoints").glob(".tmp-*")] == [".tmp-000007"]
    first, weights = train(path, 12, background=True)
    assert first == 4
    assert not list((path / "checkpoints").glob(".tmp-*"))
    assert torch.equal(weights, train(tmp_path / "whole", 12, background=False)[1])
