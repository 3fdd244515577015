"""Keys of servers: who has none is refused, and no key is where another user can read it."""

import asyncio
import dataclasses
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from http_server import serving

from creditgraph.components.engine.served.addresses import Address, find_servers, read_key
from creditgraph.components.engine.served.connection import new_client
from creditgraph.components.engine.served.dialect import ServedModel
from creditgraph.components.engine.served.process import KEY_VARIABLE
from creditgraph.components.engine.served.settings import ServerSettings
from creditgraph.components.engine.sglang.dialect import SGLangDialect
from creditgraph.components.engine.sglang.settings import SGLangSettings
from creditgraph.components.engine.vllm.dialect import VllmDialect
from creditgraph.components.engine.vllm.key import KeyMiddleware
from creditgraph.components.engine.vllm.settings import VllmSettings
from creditgraph.pipeline.core.errors import ConfigError, RunError

KEY = "k" * 32


def ask(app, path, headers=(), kind="http"):
    """What an ASGI application sends back."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "method": "POST", "headers": list(headers)}
    # In a thread of its own: a browser of other tests leaves an event loop running in this one.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, app(scope, None, send)).result()
    return sent


def test_the_middleware_passes_only_requests_with_the_key(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)

    async def inner(scope, receive, send):
        await send("passed")

    app = KeyMiddleware(inner)
    right = (b"authorization", f"Bearer {KEY}".encode())
    wrong = [
        [],
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", f"Bearer {KEY[:-1]}".encode())],
        [(b"authorization", f"Basic {KEY}".encode())],
        [right, right],
    ]
    # vLLM's own key would leave all of these open but the last.
    paths = ["/collective_rpc", "/pause", "/update_weight_version", "/sleep", "/server_info", "/health", "/v1/models"]
    for path in paths:
        assert ask(app, path, [right]) == ["passed"]
        for headers in wrong:
            assert ask(app, path, headers)[0]["status"] == 401
    assert ask(app, "/v1/realtime", [], "websocket") == [{"type": "websocket.close", "code": 1008}]
    assert ask(app, "", [], "lifespan") == ["passed"]
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(SystemExit, match=f"expected the server's key in the variable {KEY_VARIABLE}, got none"):
        KeyMiddleware(inner)


def test_servers_refuse_those_without_the_key_and_nobody_else_can_read_it(fleet, tmp_path):
    run = fleet(2)
    run.load(1)
    addresses = [server.address for server in run.pool.servers]
    assert len({address.key for address in addresses}) == 1
    key = addresses[0].key
    assert len(key) == 64
    assert key not in repr(addresses)
    for address in addresses:
        for headers in ({}, {"Authorization": f"Bearer {key[:-1]}x"}):
            body = {"method": "creditgraph_state"}
            for path in ("/collective_rpc", "/pause?mode=abort", "/update_weight_version"):
                response = httpx.post(address.url + path, json=body, headers=headers, trust_env=False)
                assert response.status_code == 401
    listed = run.folder / "engines.json"
    assert stat.S_IMODE(listed.stat().st_mode) == 0o600
    assert {server["key"] for server in json.loads(listed.read_text())["servers"]} == {key}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                assert key.encode() not in Path("/proc", entry, "cmdline").read_bytes()
            except OSError:
                continue
    assert not [log for log in (run.folder / "logs").iterdir() if key in log.read_text()]
    assert fleet(0, addresses=[dataclasses.replace(addresses[0], identity="")]).states() == ["starting"]
    with pytest.raises(
        RunError, match=r"it refuses this run's key \(.*status 401.* Name the file with its key in engine.key_file"
    ):
        fleet(0, addresses=[dataclasses.replace(addresses[0], key="x" * 64)])


def test_a_server_without_a_key_is_reported(fleet, tmp_path, caplog):
    with serving(lambda how, path, body: (200, '{"data": []}')) as server:
        fleet(0, addresses=[Address(url=server.url, name="server 0")])
    assert "it responds without a key, so whoever reaches it can change its weights. Start it with a key" in caplog.text


def test_a_socket_is_an_address(tmp_path):
    (address,) = find_servers(ServerSettings(addresses=("unix:/tmp/x/http",)))
    first, second = new_client(address), new_client(dataclasses.replace(address, url="unix:/tmp/y/http", key=KEY))
    assert first.base_url != second.base_url, "the dialects tell servers apart by it"
    assert "Authorization" not in first.headers
    assert second.headers["Authorization"] == f"Bearer {KEY}"


def test_a_key_file_is_for_its_owner_only(tmp_path):
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"readable for its owner only, got mode 640. Run: chmod 600 .*/key"):
        read_key(file)
    file.chmod(0o600)
    assert read_key(file) == KEY
    settings = ServerSettings(addresses=("h:1",), key_file=str(file))
    assert find_servers(settings)[0].key == KEY
    for text in ("short", "two words " * 4, ""):
        file.write_text(text)
        with pytest.raises(ConfigError, match="expected one line of at least 16 ASCII characters without spaces"):
            read_key(file)
    with pytest.raises(ConfigError, match=r"engine.key_file: expected a file with the servers' key at .*, which"):
        read_key(tmp_path / "none")


def test_commands_hold_no_key_and_temporary_files_go_to_the_scratch_folder():
    model = ServedModel(path="m", dtype="float32", context_length=8, vocab_size=9)
    for dialect in (VllmDialect(VllmSettings(), model), SGLangDialect(SGLangSettings(), model)):
        launch = dialect.launch(8000, "creditgraph-0")
        assert not [part for part in launch.command if "key" in part.lower()]
        assert launch.environment[KEY_VARIABLE] == "{key}"
        assert launch.environment["TMPDIR"] == "{scratch}"
    vllm = VllmDialect(VllmSettings(), model)
    assert vllm.sockets
    command = vllm.launch(0, "creditgraph-0").command
    assert command[command.index("--uds") + 1] == "{scratch}/http"
    assert "--port" not in command
