"""Peaks of GPU memory over spans, with a counter in place of torch.cuda's."""

import threading

import pytest
import torch

from creditgraph.pipeline.core.component import Component, Context
from creditgraph.pipeline.core.sockets import Node
from creditgraph.pipeline.run.node_runner import NodeRunner
from creditgraph.pipeline.run.placement import _fold, _unpacked
from creditgraph.pipeline.run.timeline.memory import peak_memory


class Gpu:
    """Counts as torch's allocator does: what is held, and the most since the last reset."""

    def __init__(self, monkeypatch):
        self.held = self.most = 0.0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.most * 1e9)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: (self.most + 1) * 1e9)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self, device):
        assert device == "cuda:1"
        self.most = self.held

    def take(self, gigabytes):
        """Allocates (or frees) memory."""
        self.held += gigabytes
        self.most = max(self.most, self.held)


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def test_spans_in_each_other_and_after_each_other(gpu):
    gpu.take(9)
    gpu.take(-8)
    with peak_memory("cuda:1") as whole:
        with peak_memory("cuda:1") as first:
            gpu.take(5)
            gpu.take(-5)
        with peak_memory("cuda:1") as second:
            gpu.take(2)
    assert (first.allocated, second.allocated, whole.allocated) == (6, 3, 6)
    assert (first.reserved, second.reserved, whole.reserved) == (7, 4, 7)
    with peak_memory("cuda:1") as after:
        pass
    assert after.allocated == 3


def test_spans_of_two_threads_overlap(gpu):
    with peak_memory("cuda:1") as mine:
        gpu.take(1)
        begun, taken, closed = threading.Event(), threading.Event(), threading.Event()

        def other():
            with peak_memory("cuda:1") as theirs:
                begun.set()
                taken.wait(10)
            results.append(theirs.allocated)
            closed.set()

        results = []
        threading.Thread(target=other).start()
        assert begun.wait(10)
        gpu.take(3)
        gpu.take(-3)
        taken.set()
        assert closed.wait(10)
    assert results == [4]
    assert mine.allocated == 4


def test_without_a_gpu_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: pytest.fail("asked"))
    with peak_memory("cpu") as peak:
        pass
    assert (peak.allocated, peak.reserved) == (0, 0)


class Hungry(Component):
    """Takes two gigabytes for a while."""

    gpu: Gpu

    def run(self) -> None:
        """Runs."""
        self.gpu.take(2)
        self.gpu.take(-2)


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_a_node_logs_its_peak(gpu, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    Hungry.gpu = gpu
    context = Context(node="hungry", device=device)
    runner = NodeRunner(Node(name="hungry", use="hungry", cls=Hungry, config=None, wires={}, settings={}), context)
    runner.component = Hungry(None)
    runner.run(0, {})
    metrics = runner.harvest().metrics
    metrics.pop("seconds/hungry")
    assert metrics == ({"memory/hungry": 2, "memory/hungry_reserved": 3} if device != "cpu" else {})


def test_of_several_replicas_the_largest_memory_counts():
    def report(seconds, memory, loss):
        metrics = {"seconds/a": [seconds, 1], "memory/a": [memory, 1], "a/loss": [loss, 1]}
        return {"a": [metrics, [], seconds, []]}

    folded = _fold(report(1.0, 30.0, 2.0), report(2.0, 20.0, 4.0))
    assert _unpacked(*folded["a"]).metrics == {"seconds/a": 2.0, "memory/a": 30.0, "a/loss": 3.0}
