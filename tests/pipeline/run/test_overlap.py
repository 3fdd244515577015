"""Overlap changes when things are computed, never what."""

import json
import threading

import pytest
import toy_graph as toy

from creditgraph.pipeline.run.executor import Executor, RunSettings


def stable(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("seconds/", "utilisation/"))} for row in rows]


@pytest.mark.parametrize("delay", [2, 3])
def test_overlapped_and_serial_runs_are_bit_identical(tmp_path, delay):
    toy.train(tmp_path / "serial", 13, delay=delay, overlap=False)
    toy.train(tmp_path / "overlap", 13, delay=delay, overlap=True, sleep=0.003)
    assert stable(tmp_path / "serial") == stable(tmp_path / "overlap")
    for name in ("tensors.safetensors", "state.json"):
        for iteration in (11, 12):
            pair = [
                (tmp_path / run / "checkpoints" / f"{iteration:06d}" / name).read_bytes()
                for run in ("serial", "overlap")
            ]
            assert pair[0] == pair[1]


def test_delay_one_leaves_nothing_to_overlap():
    names = threads_used(toy.make_graph(1))
    assert names == {"MainThread"}


def test_with_delay_two_generation_has_its_own_thread_and_the_learner_the_main_one():
    graph = toy.make_graph(2)
    assert threads_used(graph) == {"MainThread", "generation"}
    assert threads_used(graph, overlap=False) == {"MainThread"}


def threads_used(graph, overlap=True):
    names = set()

    class Watch:
        def node_started(self, node, iteration):
            names.add(threading.current_thread().name)

        def iteration_done(self, iteration, metrics): ...

    with Executor(graph, RunSettings(iterations=3, overlap=overlap), observer=Watch()) as executor:
        executor.setup()
        executor.restore()
        executor.run()
    return names


@pytest.mark.parametrize("delay", [2, 4])
def test_generation_runs_ahead_no_further_than_the_wires_allow(delay):
    ahead, done = [], [-1]

    class Watch:
        def node_started(self, node, iteration):
            if node == "score":
                ahead.append(iteration - done[0])

        def iteration_done(self, iteration, metrics):
            done[0] = iteration

    nodes = {n.name: n for n in toy.make_graph(delay).nodes}
    nodes["learner"] = toy.node("learner", toy.Learn, {"batch": "source.batch", "rewards": "score.rewards"}, sleep=0.05)
    with Executor(toy.Graph(tuple(nodes.values())), RunSettings(iterations=10), observer=Watch()) as executor:
        executor.setup()
        executor.restore()
        executor.run()
    # weights@k: scoring iteration i needs the learner to be done with i − k; its completion is told a little later.
    assert max(ahead) <= delay + 1
    assert max(ahead) >= 2
