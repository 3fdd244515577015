"""Servers that give their memory back while a learner learns, and start only when it is theirs."""

import time

import pytest

from creditgraph.components.engine.served.settings import ServerSettings
from creditgraph.components.engine.sglang.engine import SGLangEngine
from creditgraph.components.engine.vllm.engine import VllmEngine
from creditgraph.components.engine.vllm.in_process import InProcess
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import ConfigError, RunError


def calls(run):
    return [(entry["call"], entry.get("tags")) for entry in run.records() if "call" in entry]


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_servers_sleep_and_wake_around_learning(fleet, kind):
    run = fleet(1)
    load = run.load if kind == "file" else run.stream
    for version in (1, 2):
        run.pool.sleep()
        assert run.states() == ["asleep"]
        run.pool.sleep()  # once is enough
        load(version)
        assert run.states() == ["ready"]
        run.generate(version=version)
    # The memory of the weights first, so that they have a place; that of the cache when they are loaded.
    assert calls(run) == [("sleep", None), ("wake_up", "weights"), ("wake_up", "kv_cache")] * 2
    assert {entry["level"] for entry in run.records() if entry.get("call") == "sleep"} == {"2"}
    order = [
        entry.get("call") or f"loaded {entry['loaded']}" for entry in run.records() if entry.keys() & {"call", "loaded"}
    ]
    assert order[:4] == ["sleep", "wake_up", "loaded 1", "wake_up"]


def test_requests_end_before_a_server_sleeps(fleet):
    import threading

    run = fleet(1, options=["--seconds", "0.5"])
    run.load(1)
    sampling = threading.Thread(target=lambda: run.generate(prompts=2, group=2, version=1))
    sampling.start()
    run.until(lambda: run.pool.servers[0].outstanding)
    run.pool.sleep()
    sampling.join(10.0)
    assert not sampling.is_alive()
    assert run.states() == ["asleep"]


def test_a_server_that_cannot_sleep_is_named(fleet):
    run = fleet(1)
    run.fault(0, "insomnia")
    with pytest.raises(
        RunError,
        match=r"server 0 .*: it cannot sleep: expected a server that gives GPU memory back when it sleeps "
        r"\(--enable-sleep-mode\), got 60 free bytes after it and 60 before. Set engine.sleep=never",
    ):
        run.pool.sleep()


def test_no_server_starts_while_the_learner_has_the_memory(fleet):
    run = fleet(2)
    run.load(1)
    run.kill(1)
    run.until(lambda: run.states()[1] == "lost")
    run.pool.sleep()
    run.learning = True
    begun = [server.starts for server in run.pool.servers]
    run.kill(0)  # a sleeping server ends
    run.until(lambda: run.states()[0] == "lost")
    time.sleep(1.0)
    assert [server.starts for server in run.pool.servers] == begun, "none was started"
    assert all(server.process is None or not server.process.running for server in run.pool.servers)
    run.learning = False
    time.sleep(0.5)
    assert [server.starts for server in run.pool.servers] == begun, "nor before the weights come"
    run.load(2)
    run.until(lambda: run.states() == ["ready"] * 2)
    run.generate(version=2)


@pytest.mark.parametrize("engine", [VllmEngine, SGLangEngine])
def test_engines_share_devices_where_gpus_do_not_suffice_for_both(engine, monkeypatch):
    def shares(device="cuda:0", world=1, gpus=1, **settings):
        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
        return engine.shares_devices(engine.Config(**settings), device, world)

    assert shares(servers=1)
    assert not shares(servers=1, gpus=2), "GPU 0 is the learner's, GPU 1 the server's"
    assert shares(servers=2, tensor_parallel=2, gpus=4)
    assert shares(servers=1, world=4, gpus=4), "ranks have all GPUs"
    assert shares(servers=1, gpus=2, sleep="always")
    assert not shares(servers=1, sleep="never")
    assert not shares(device="cpu", servers=1)
    assert not shares(servers=0, addresses=("h:1",), world=4)
    if engine is VllmEngine:
        assert shares(servers=0), "in this process"


def test_servers_of_others_cannot_be_asked_to_sleep():
    with pytest.raises(ValueError, match=r"sleep: expected servers that this run starts, got addresses or rendezvous"):
        ServerSettings(addresses=("h:1",), sleep="always")


def test_a_cpu_has_no_memory_to_give_back():
    with pytest.raises(ConfigError, match=r"engine.sleep: expected GPUs, .* got device 'cpu'. Set engine.sleep=auto"):
        VllmEngine(VllmEngine.Config(sleep="always")).setup(Context(node="engine"))


@pytest.mark.parametrize(("level", "own_after"), [(2, False), (1, True)])
def test_vllm_in_this_process_sleeps_and_wakes_by_tag(level, own_after):
    """The calls, with an object in vLLM's place."""
    done, free = [], [100]

    class Vllm:
        def collective_rpc(self, name):
            assert name == "creditgraph_free_bytes"
            return list(free)

        def sleep(self, level):
            done.append(level)
            free[0] += 50

        def wake_up(self, tags):
            done.append(tags)

    backend = InProcess.__new__(InProcess)
    backend.llm, backend._asleep, backend._level, backend._own, backend._adapter = Vllm(), set(), level, True, "one"
    backend._sleep()
    backend._sleep()  # once is enough
    # Weights that were dropped must come again; those on the CPU come back by waking.
    assert backend.restore() is own_after
    assert done == [level, *([["weights"], ["kv_cache"]] if own_after else [])]
    backend._asleep = set()
    backend.llm.sleep = lambda level: None
    backend._context = Context(node="engine")
    with pytest.raises(
        RunError, match=r"expected vLLM to give GPU memory back .*, got 150 free bytes after it and 150"
    ):
        backend._sleep()
