"""Server processes and their addresses."""

import dataclasses
import json
import sys

import pytest

from creditgraph.components.engine.messages import RowRequest
from creditgraph.components.engine.served.addresses import (
    Address,
    find_servers,
    read_rendezvous,
    share_gpus,
    write_rendezvous,
)
from creditgraph.components.engine.served.dialect import ServedModel
from creditgraph.components.engine.served.process import Launch, ServerProcess, last_lines
from creditgraph.components.engine.served.settings import ServerSettings
from creditgraph.components.engine.sglang import wire
from creditgraph.components.engine.sglang.dialect import SGLangDialect
from creditgraph.components.engine.sglang.settings import SGLangSettings
from creditgraph.components.engine.vllm.dialect import VllmDialect
from creditgraph.components.engine.vllm.settings import VllmSettings
from creditgraph.pipeline import ROOT
from creditgraph.pipeline.core.errors import ConfigError, RunError
from creditgraph.pipeline.core.ranks import Ranks


def process(tmp_path, code, **environment):
    return ServerProcess(
        Launch(command=[sys.executable, "-c", code], environment=environment), tmp_path / "logs" / "engine-0.log"
    )


def test_its_status_is_given_in_words(tmp_path):
    for code, status in (
        ("raise SystemExit(3)", "exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ):
        one = process(tmp_path, code)
        one._process.wait(20)
        assert one.status() == status
        assert not one.scratch.exists()
        one.stop()


def test_output_is_that_of_this_process_and_the_log_keeps_all(tmp_path):
    for word in ("first", "second"):
        one = process(tmp_path, f"print('{word}')")
        one._process.wait(20)
        assert one.output() == f"{word}\n"
        one.stop()
    assert one.log.read_text() == "first\nsecond\n"


def test_environment_may_be_added_removed_and_name_the_scratch_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CREDITGRAPH_TEST_GONE", "1")
    code = (
        "from os import environ as e, path; print(e.get('CREDITGRAPH_TEST_GONE'), e['WHERE'], path.isdir(e['WHERE']))"
    )
    one = process(tmp_path, code, CREDITGRAPH_TEST_GONE=None, WHERE="{scratch}")
    one._process.wait(20)
    assert one.output().split() == ["None", str(one.scratch), "True"]
    one.stop()


def test_a_command_that_does_not_exist_is_in_the_log(tmp_path):
    one = ServerProcess(Launch(command=["/no/such/program"]), tmp_path / "engine-0.log")
    one._process.wait(20)
    assert "/no/such/program: cannot be started" in one.output()
    assert one.status() == "exited with code 127"
    one.stop()


def test_a_stubborn_server_is_killed(tmp_path):
    one = process(
        tmp_path,
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
    )
    while one.output() != "up\n":
        pass
    one.stop()
    assert not one.running


def test_too_few_gpus_are_reported():
    with pytest.raises(
        ConfigError, match=r"engine.servers: expected 8 GPUs for 2 servers of 2 each, from GPU 4 on, .* sees 4 \("
    ):
        share_gpus(2, 2, list("0123"), Ranks(local_rank=1, world=2, num_replicas=2))


def test_every_rank_of_a_host_gives_its_servers_other_gpus():
    hosts = [Ranks(local_rank=rank, world=4, num_replicas=4) for rank in range(4)]
    taken = [gpu for ranks in hosts for server in share_gpus(2, 1, list("01234567"), ranks) for gpu in server]
    assert sorted(taken) == list("01234567")


def test_last_lines_are_the_last_and_short():
    assert last_lines("a\n\nb\nc\n", 2) == "\n    b\n    c"
    assert last_lines("") == ""
    assert len(last_lines("x" * 1000)) < 260


def test_rendezvous_keeps_every_field(tmp_path):
    servers = [Address(url="http://h:1", identity="i", name="server 0", log="l", pid=5), Address(url="http://h:2")]
    write_rendezvous(tmp_path / "engines.json", servers)
    place = str(tmp_path / "engines.json")
    assert read_rendezvous(tmp_path / "engines.json", 0) == [dataclasses.replace(s, listed_in=place) for s in servers]
    assert [p.name for p in tmp_path.iterdir()] == ["engines.json"], "nothing is left aside"


def test_a_rendezvous_that_cannot_be_used_is_reported(tmp_path):
    with pytest.raises(
        RunError,
        match=r"engine.rendezvous: expected the addresses of servers in .*engines.json, got no such file within 0 s",
    ):
        read_rendezvous(tmp_path / "engines.json", 0)
    for text, problem in (
        ("{", "cannot be read"),
        ('{"servers": [{"host": 1}]}', "cannot be read"),
        (json.dumps({"servers": []}), "expected at least one server"),
    ):
        (tmp_path / "engines.json").write_text(text)
        with pytest.raises(RunError, match=problem):
            read_rendezvous(tmp_path / "engines.json", 0)


def test_ways_to_find_servers():
    assert [a.url for a in find_servers(ServerSettings(servers=2))] == ["", ""]
    assert find_servers(ServerSettings(servers=1, addresses=("h:1", "http://g:2/"))) == [
        Address(url="http://h:1", name="server 0"),
        Address(url="http://g:2", name="server 1"),
    ]
    with pytest.raises(ConfigError, match="node 'engine': expected one way to find servers, got addresses and rendez"):
        find_servers(ServerSettings(addresses=("h:1",), rendezvous="x"))
    with pytest.raises(ConfigError, match=r"engine.addresses: expected host:port, .* got 'h'"):
        find_servers(ServerSettings(addresses=("h",)))


def test_a_server_samples_past_end_of_text_when_asked():
    model = ServedModel(path="m", dtype="float32", context_length=8, vocab_size=9, eos=[1])
    row = RowRequest(row=0, group=0, tokens=[5], max_tokens=9, seed=1, temperature=1.0, top_p=1.0, top_k=0, stream=True)
    onward = dataclasses.replace(row, ignore_eos=True)
    dialect = VllmDialect(VllmSettings(), model)
    bodies = [dialect.generate_body(request, "r")["sampling"] for request in (row, onward)]
    assert [(body["stop_token_ids"], body["ignore_eos"]) for body in bodies] == [([1], False), ([], True)]
    bodies = [wire.generate_body(request, "r", 0)["sampling_params"] for request in (row, onward)]
    assert [body.get("ignore_eos", False) for body in bodies] == [False, True]


def test_a_users_folders_hide_no_module_of_a_server(tmp_path, users_folder, monkeypatch):
    """Each server's command, asked where its interpreter finds `creditgraph`."""
    (users_folder / "ctypes.py").write_text("raise SystemExit('the guard has imported a module of the user')")
    monkeypatch.chdir(users_folder)
    model = ServedModel(path="m", dtype="float32", context_length=8, vocab_size=9)
    where = "import importlib.util; print(importlib.util.find_spec('creditgraph').origin)"
    for dialect in (VllmDialect(VllmSettings(), model), SGLangDialect(SGLangSettings(), model)):
        launch = dialect.launch(8000, "creditgraph-0")
        command = [launch.command[0], "-c", where]
        one = ServerProcess(Launch(command=command, environment=launch.environment), tmp_path / "engine-0.log")
        one._process.wait(20)
        assert one.output().strip() == str(ROOT / "__init__.py")
        one.stop()
