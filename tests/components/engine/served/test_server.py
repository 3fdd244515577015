"""Server processes and their addresses."""

import dataclasses
import json
import sys

import pytest

from components.engine.served.dialect import Launch
from components.engine.served.member import PoolSettings
from components.engine.served.server import (
    Address,
    ServerProcess,
    address_of,
    find_servers,
    last_lines,
    read_rendezvous,
    share_gpus,
    write_rendezvous,
)
from pipeline.core.errors import ConfigError, RunError


def process(tmp_path, code, **environment):
    return ServerProcess(
        Launch(command=[sys.executable, "-c", code], environment=environment), tmp_path / "logs" / "engine-0.log"
    )


def test_its_end_is_told_in_words(tmp_path):
    for code, told in (
        ("raise SystemExit(3)", "ended with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ):
        one = process(tmp_path, code)
        one._process.wait(20)
        assert one.ended() == told
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
    code = "import os; print(os.environ.get('CREDITGRAPH_TEST_GONE'), os.environ['WHERE'], os.path.isdir(os.environ['WHERE']))"
    one = process(tmp_path, code, CREDITGRAPH_TEST_GONE=None, WHERE="{scratch}")
    one._process.wait(20)
    assert one.output().split() == ["None", str(one.scratch), "True"]
    one.stop()


def test_a_command_that_does_not_exist_is_in_the_log(tmp_path):
    one = ServerProcess(Launch(command=["/no/such/program"]), tmp_path / "engine-0.log")
    one._process.wait(20)
    assert "/no/such/program: cannot be started" in one.output()
    assert one.ended() == "ended with code 127"
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


def test_too_few_gpus_are_told():
    with pytest.raises(
        ConfigError, match=r"engine.servers: 2 of 2 GPUs each, from GPU 4 on, but this process sees 4 .*; wanted 8"
    ):
        share_gpus(2, 2, list("0123"), local_rank=1, world=2)


def test_every_rank_of_a_host_gives_its_servers_other_gpus():
    taken = [gpu for rank in range(4) for server in share_gpus(2, 1, list("01234567"), rank, 4) for gpu in server]
    assert sorted(taken) == list("01234567")


def test_last_lines_are_the_last_and_short():
    assert last_lines("a\n\nb\nc\n", 2) == "\n    b\n    c"
    assert last_lines("") == ""
    assert len(last_lines("x" * 1000)) < 260


def test_rendezvous_keeps_every_field(tmp_path):
    servers = [Address(url="http://h:1", identity="i", name="server 0", log="l", pid=5), Address(url="http://h:2")]
    write_rendezvous(tmp_path / "engines.json", servers)
    place = str(tmp_path / "engines.json")
    assert read_rendezvous(tmp_path / "engines.json", 0) == [dataclasses.replace(s, found=place) for s in servers]
    assert [p.name for p in tmp_path.iterdir()] == ["engines.json"], "nothing is left aside"


def test_a_rendezvous_that_cannot_be_used_is_told(tmp_path):
    with pytest.raises(
        RunError, match=r"engine.rendezvous: no file .*engines.json after 0 s; wanted the addresses of servers there"
    ):
        read_rendezvous(tmp_path / "engines.json", 0)
    for text, told in (
        ("{", "cannot be read"),
        ('{"servers": [{"host": 1}]}', "cannot be read"),
        (json.dumps({"servers": []}), "lists no servers"),
    ):
        (tmp_path / "engines.json").write_text(text)
        with pytest.raises(RunError, match=told):
            read_rendezvous(tmp_path / "engines.json", 0)


def test_ways_to_find_servers(tmp_path):
    assert [a.url for a in find_servers(2, (), "", 0)] == ["", ""]
    assert find_servers(1, ("h:1", "http://g:2/"), "", 0) == [
        Address(url="http://h:1", name="server 0"),
        Address(url="http://g:2", name="server 1"),
    ]
    with pytest.raises(ConfigError, match="node 'engine': addresses and rendezvous are both set"):
        find_servers(0, ("h:1",), "x", 0)
    with pytest.raises(ConfigError, match=r"engine.addresses: found 'h'; wanted host:port"):
        address_of("h", 0)


def test_settings_are_checked():
    for wrong, told in (
        ({"hang_seconds": 0}, "hang_seconds is 0; wanted more than 0"),
        ({"retries": -1}, "retries is -1; wanted 0 or more"),
    ):
        with pytest.raises(ValueError, match=told):
            PoolSettings(**wrong)
