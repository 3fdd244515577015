"""Clocks of the learners wait for the learner's own GPU, with mocked calls of CUDA."""

from types import SimpleNamespace

import pytest
import torch

from creditgraph.components.learner.step import RolloutTraining


@pytest.fixture
def waited(monkeypatch):
    devices = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: devices.append(device))
    for name in ("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    return devices


def test_a_phase_ends_when_the_learners_gpu_is_done(waited):
    training = SimpleNamespace(_context=SimpleNamespace(device="cuda:3"), seconds={}, memory={})
    with RolloutTraining.clock(training, "optimizer"):
        pass
    assert waited == ["cuda:3"]
    assert training.seconds["optimizer"] >= 0


@pytest.mark.slow
def test_passes_are_marked_on_the_stream_of_the_learners_gpu(waited, monkeypatch):
    pytest.importorskip("megatron.core")
    from creditgraph.components.learner.megatron.schedule import ComputeClock

    streams = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            streams.append(stream)

        def elapsed_time(self, end):
            return 500.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    clock = ComputeClock("cuda:3")
    clock("forward-compute").start()
    clock("forward-compute").stop()
    assert clock.take() == 0.5
    assert waited == ["cuda:3"]
    assert streams == ["stream of cuda:3"] * 2
