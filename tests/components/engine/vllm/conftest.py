"""Two real vLLM servers on the embedded model, started once for all tests of a worker."""

import contextlib
import os
import time

import pytest

from creditgraph.components.engine.guard import descendants
from creditgraph.components.engine.served.addresses import check_port, free_port
from creditgraph.components.engine.served.settings import PoolSettings
from creditgraph.components.engine.vllm.engine import VllmEngine
from creditgraph.components.engine.vllm.settings import AdapterSettings
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.payloads import Weights

CONTEXT = 192
POOL = {"hang_seconds": 10.0, "start_seconds": 400.0, "update_seconds": 120.0}


class Real:
    """An engine that keeps two servers, starting killed ones again, and engines that use them by address."""

    def __init__(self, folder, users_folder):
        pool = PoolSettings(start_seconds=400.0, port=two_ports(), restarts=1)
        lora = AdapterSettings(publish="adapter", rank=8)
        self.keeper = VllmEngine(VllmEngine.Config(servers=2, pool=pool, lora=lora))
        with contextlib.chdir(users_folder):
            self.keeper.setup(self.context(folder))
        self.keeper.run(weights=Weights(version=0))
        self.servers = self.keeper.backend.pool.servers
        self.addresses = [server.address.url.removeprefix("http://") for server in self.servers]
        self.key_file = folder / "key"
        self.key_file.touch(mode=0o600)
        self.key_file.write_text(self.servers[0].address.key)

    def context(self, folder=None):
        return Context(node="engine", model=ModelSpec(path="tiny", max_context=CONTEXT), run_dir=folder)

    def settings(self, root, name, iterations, servers=2):
        """Of a training run on the first servers."""
        addresses = ",".join(f"'{a}'" for a in self.addresses[:servers])
        where = [
            f"engine.addresses=[{addresses}]",
            f"engine.key_file={self.key_file}",
            "engine.pool.start_seconds=400",
            "engine.pool.hang_seconds=10",
        ]
        small = ["prompts.batch=4", "evaluator.num_problems=4", "evaluator.every=0", f"model.max_context={CONTEXT}"]
        run = [f"run.root={root}", f"run.name={name}", f"run.iterations={iterations}"]
        return ["train", "recipe=toy_srpo", "engine=vllm", *run, *where, *small]

    def engine(self, first=0, servers=2, pool=(), **settings):
        """An engine on some of the servers."""
        addresses = tuple(self.addresses[first : first + servers])
        config = VllmEngine.Config(
            addresses=addresses, key_file=str(self.key_file), pool=PoolSettings(**POOL | dict(pool)), **settings
        )
        engine = VllmEngine(config)
        engine.setup(self.context())
        return engine

    def signal(self, index, number):
        for pid in descendants(self.servers[index].process.pid)[1:]:  # without the guard
            os.kill(pid, number)

    def until_ready(self, server, starts=0, seconds=200.0):
        """Waits for a server to hold weights, in its `starts`-th process."""
        deadline = time.monotonic() + seconds
        while server.state != "ready" or server.starts < starts:
            assert time.monotonic() < deadline, server.reason
            time.sleep(0.1)


def two_ports():
    while True:
        port = free_port()
        try:
            check_port(port + 1, "127.0.0.1", "")
        except ConfigError:
            continue
        return port


@pytest.fixture(scope="session")
def real(tmp_path_factory, users_folder):
    servers = Real(tmp_path_factory.mktemp("servers"), users_folder)
    yield servers
    guards = [server.process.pid for server in servers.servers if server.process is not None]
    trees = [p for guard in guards for p in (guard, *descendants(guard))]
    servers.keeper.close()
    assert not [pid for pid in trees if os.path.exists(f"/proc/{pid}")]


@pytest.fixture
def connected(real):
    """connected(first=0, servers=2, pool={…}, …) → an engine on the real servers, closed after the test."""
    engines = []

    def make(**settings):
        engines.append(real.engine(**settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
