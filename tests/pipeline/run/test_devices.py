"""Which GPU a process and its threads use, with mocked devices; no test here needs one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import toy_graph as toy

from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.ranks import Ranks, same_device, use_device
from creditgraph.pipeline.run.distributed.processes import _check_own_gpus
from creditgraph.pipeline.run.distributed.team import DistributedError, Team
from creditgraph.pipeline.run.executor import Executor, RunSettings
from creditgraph.pipeline.run.run_settings import resolve_device


class Gpus:
    """A host of `count` GPUs whose current one belongs to the thread, as CUDA's does."""

    def __init__(self, count):
        self.count = count
        self.held = threading.local()
        self.used = {}

    def set_device(self, device):
        self.held.number = torch.device(device).index
        self.used.setdefault(threading.current_thread().name, set()).add(self.held.number)

    def current_device(self):
        return getattr(self.held, "number", 0)


@pytest.fixture
def gpus(monkeypatch):
    def make(count):
        host = Gpus(count)
        for name, value in (
            ("is_available", lambda: True),
            ("is_initialized", lambda: True),
            ("device_count", lambda: count),
            ("set_device", host.set_device),
            ("current_device", host.current_device),
            ("max_memory_allocated", lambda device: 0),
            ("max_memory_reserved", lambda device: 0),
            ("reset_peak_memory_stats", lambda device: None),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        return host

    return make


@pytest.mark.parametrize(
    ("visible", "name", "local_rank", "device"),
    [
        (8, "auto", 5, "cuda:5"),
        (8, "cuda", 0, "cuda:0"),
        (1, "cuda", 5, "cuda:0"),  # each process sees its own GPU alone
        (1, "auto", None, "cuda"),
        (8, "cuda:3", None, "cuda:3"),
        (8, "cpu", 5, "cpu"),
    ],
)
def test_the_gpu_of_a_process(gpus, visible, name, local_rank, device):
    gpus(visible)
    assert resolve_device(name, local_rank) == device


@pytest.mark.parametrize(
    ("name", "local_rank", "text"),
    [
        ("cuda", 2, "process 3 of its host, which has 2 GPUs; expected a GPU per process"),
        ("cuda:2", None, "expected cuda:0 to cuda:1, which torch sees here, got 'cuda:2'"),
    ],
)
def test_a_gpu_that_is_not_there(gpus, name, local_rank, text):
    gpus(2)
    with pytest.raises(ConfigError, match=text):
        resolve_device(name, local_rank)


def test_components_run_on_their_ranks_gpu_in_every_lane(gpus, tmp_path):
    host = gpus(4)
    seen = set()

    class Watch:
        def node_started(self, node, iteration): ...
        def iteration_done(self, iteration, metrics): ...

    graph = toy.make_graph(2)
    ranks = Ranks(local_rank=0)
    settings = RunSettings(iterations=4, device="cuda:3")
    with Executor(graph, settings, observer=Watch(), team=Team(ranks)) as executor:
        for runner in executor._runners.values():
            runner.setup()
            own = runner.component.run
            runner.component.run = lambda own=own, **inputs: seen.add(host.current_device()) or own(**inputs)
        executor.restore()
        executor.run()
    assert host.used == {"MainThread": {3}, "generation": {3}}
    assert seen == {3}


def test_threads_of_a_component_use_its_gpu(gpus):
    host = gpus(4)
    host.set_device("cuda:2")
    with ThreadPoolExecutor(1, "plain") as plain, ThreadPoolExecutor(1, "own", same_device()) as own:
        assert (plain.submit(host.current_device).result(), own.submit(host.current_device).result()) == (0, 2)


def test_two_ranks_on_one_gpu_are_named(monkeypatch):
    class Properties:
        uuid = "GPU-a"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())

    def gathers(others):
        def gather(out, own, group):
            out[:] = others

        return gather

    monkeypatch.setattr(dist, "all_gather_object", gathers(["GPU-b", "GPU-a"]))
    _check_own_gpus(Ranks(rank=1, world=2), "cuda:0", None)
    monkeypatch.setattr(dist, "all_gather_object", gathers(["GPU-a", "GPU-a"]))
    with pytest.raises(DistributedError, match=r"rank 1: its GPU \(cuda:0, GPU-a\) is rank 0's too"):
        _check_own_gpus(Ranks(rank=1, world=2), "cuda:0", None)


def test_a_gpu_is_made_current_in_one_place():
    """torch refuses "cuda" without a number there, which is the device of a run of one process."""
    root = Path(__file__).parents[3]
    files = [f for folder in ("pipeline", "components") for f in (root / folder).rglob("*.py")]
    assert [f.name for f in files if "cuda.set_device(" in f.read_text()] == ["ranks.py"]
    use_device("cuda")
