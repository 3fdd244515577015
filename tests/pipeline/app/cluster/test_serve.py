"""How servers and learner find each other: addresses of this start only, whatever order files appear in."""

import os
import time

import pytest

from creditgraph.components.engine.served.addresses import ATTEMPT, Address, read_rendezvous, relocated
from creditgraph.pipeline.app.cluster.servers import folder_of, leave_address, list_servers, server_address
from creditgraph.pipeline.app.commands.serve import redirect_output
from creditgraph.pipeline.core.errors import RunError


def leave(run, index, port, attempt=""):
    folder_of(run, attempt).mkdir(parents=True, exist_ok=True)
    leave_address(run, index, [Address(url=f"http://node{index}:{port}", identity=f"server-{port}")], attempt)


def test_the_last_server_lists_all(tmp_path, monkeypatch):
    leave(tmp_path, 1, 81, "7-0")
    assert not list_servers(tmp_path, 1, 2, "7-0")
    assert not (tmp_path / "servers" / "7-0.json").exists()
    leave(tmp_path, 0, 80, "7-0")
    assert list_servers(tmp_path, 0, 2, "7-0")
    assert list_servers(tmp_path, 1, 2, "7-0")  # both may find that they are the last
    monkeypatch.setenv(ATTEMPT, "7-0")
    result = read_rendezvous(tmp_path / "servers", 1.0)
    assert [(s.name, s.url) for s in result] == [("server 0", "http://node0:80"), ("server 1", "http://node1:81")]


@pytest.mark.parametrize("hours", [-3, 3])
def test_addresses_of_another_start_are_not_taken(tmp_path, monkeypatch, hours):
    def age(attempt):
        os.utime(tmp_path / "servers" / f"{attempt}.json", (time.time() + 3600 * hours,) * 2)

    leave(tmp_path, 0, 80, "7-0")
    list_servers(tmp_path, 0, 1, "7-0")
    age("7-0")  # neither the past nor the future of a file's date makes it this start's
    monkeypatch.setenv(ATTEMPT, "7-1")
    with pytest.raises(RunError, match=r"servers/7-1\.json, got no such file within 0\.3 s"):
        read_rendezvous(tmp_path / "servers", 0.3)
    leave(tmp_path, 0, 90, "7-1")
    list_servers(tmp_path, 0, 1, "7-1")
    age("7-1")
    # A server of the first start that speaks up late changes nothing.
    leave(tmp_path, 0, 99, "7-0")
    list_servers(tmp_path, 0, 1, "7-0")
    assert read_rendezvous(tmp_path / "servers", 1.0)[0].url == "http://node0:90"


def test_a_server_that_was_started_again_is_found_at_its_new_address(tmp_path):
    leave(tmp_path, 0, 80)
    list_servers(tmp_path, 0, 1)
    (before,) = read_rendezvous(tmp_path / "servers", 1.0)
    assert relocated(before) is None
    leave(tmp_path, 0, 85)
    list_servers(tmp_path, 0, 1)
    after = relocated(before)
    assert after.url == "http://node0:85"
    assert relocated(after) is None


def test_the_address_is_that_of_the_way_to_the_learner(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert server_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    assert server_address() == "127.0.0.1"


def test_the_output_of_a_server_goes_to_a_log_of_its_node(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    before = [os.dup(1), os.dup(2)]
    try:
        log = redirect_output(str(tmp_path / "engine-0-12-0"))
        os.write(1, b"ready\n")
        os.write(2, b"warning\n")
    finally:
        for number, kept in enumerate(before, 1):
            os.dup2(kept, number)
            os.close(kept)
    assert log == tmp_path / "engine-0-12-0-node7.log"
    assert log.read_text() == "ready\nwarning\n"
    assert redirect_output("") is None
