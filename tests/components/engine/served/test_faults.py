"""Faults of real processes: what a pool loses is time, never a row."""

import contextlib
import errno
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from creditgraph.components.engine import guard
from creditgraph.components.engine.channel import ChannelSettings, FileChannel
from creditgraph.components.engine.guard import descendants
from creditgraph.components.engine.messages import ScoreRequest
from creditgraph.components.engine.probe import Probe
from creditgraph.components.engine.served.pool import AllServersLost
from creditgraph.components.engine.served.process import Launch, ServerProcess
from creditgraph.pipeline.core.errors import CreditgraphError, RunError
from creditgraph.pipeline.core.payloads import Weights


def test_one_of_three_killed_while_it_generates(fleet):
    run = fleet(3, options=["--seconds", "0.3"])
    run.load(1)
    run.after(0.15, lambda: run.kill(1))
    run.generate(prompts=9, group=4)
    counted = run.pool.take_counters()
    assert counted["servers_lost"] == 1
    assert counted["retries"] > 0
    run.until(lambda: run.states() == ["ready"] * 3)
    assert run.pool.servers[1].label.startswith("1-"), (
        "a server that comes back holds the weights before it gets requests"
    )
    assert run.pool.servers[1].starts == 2
    run.generate(version=1)


def test_a_server_killed_while_it_loads_weights(fleet):
    run = fleet(3)
    run.load(1)
    run.fault(2, "die in update")
    run.load(2)
    assert run.states().count("ready") >= 2
    run.generate(version=2)
    run.until(lambda: run.states() == ["ready"] * 3)
    run.generate(version=2)


def test_a_server_killed_while_it_starts_is_started_once_more(fleet):
    run = fleet(2, options=["--startup", "die once"])
    assert [s.starts for s in run.pool.servers] == [2, 2]
    run.load(1)
    run.generate()


def test_a_server_that_cannot_start_is_reported_with_its_last_lines(fleet):
    with pytest.raises(RunError) as raised:
        fleet(2, options=["--startup", "fail"])
    text = str(raised.value)
    assert re.search(r"server \d \(127.0.0.1:\d+\): exited with code 1 before it was ready", text)
    assert "logs/engine-" in text
    assert "ValueError: no such quantisation" in text


def test_a_server_that_does_not_get_ready_is_reported(fleet):
    with pytest.raises(
        RunError, match=r"ready within 4 s, got no response .*Raise engine.pool.start_seconds(.|\n)*loading the model"
    ):
        fleet(1, options=["--startup", "hang"], start_seconds=4.0)


def test_a_stopped_server_costs_only_time(fleet):
    run = fleet(3, options=["--seconds", "0.3"], hang_seconds=1.0)
    run.load(1)
    run.after(0.15, lambda: run.kill(0, signal.SIGSTOP))
    run.generate(prompts=9, group=4)
    assert run.pool.take_counters()["retries"] > 0
    run.until(lambda: run.states() == ["ready"] * 3, 30)
    run.generate()


def test_a_server_that_is_asked_but_makes_no_progress_is_lost(fleet):
    run = fleet(2, options=["--seconds", "0.01"], stall_seconds=0.5, hang_seconds=2.0)
    run.load(1)
    run.fault(0, "", seconds=1000)
    run.generate(prompts=4, group=2)
    assert "no token for" in run.pool.servers[0].reason
    run.fault(0)
    run.until(lambda: run.states() == ["ready"] * 2)


KINDS = ["500", "garbage", "cut", "no completions", "few log-probs", "outside vocabulary", "wrong version"]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_unsound_responses_are_requested_elsewhere(fleet, streamed):
    run = fleet(2, options=["--seconds", "0.01"], restarts=20)
    run.load(1)
    for kind in [*KINDS, "die in generation"]:
        run.fault(1, kind)
        run.generate(prompts=5, group=4, version=1, streamed=streamed)
        assert run.pool.take_counters()["retries"] > 0, kind
        run.fault(1)
        run.until(lambda: run.states() == ["ready"] * 2)
    run.generate(version=1, streamed=streamed)


def test_a_request_that_no_server_takes_stops_the_run_in_words(fleet):
    run = fleet(2, retries=2)
    run.load(1)
    for n in range(2):
        run.fault(n, "400")
    with pytest.raises(RunError) as raised:
        run.generate(prompts=1, group=1)
    assert "node 'engine', row 0: expected a valid response within 2 retries" in str(raised.value)
    assert "max_tokens is too large" in str(raised.value)
    assert run.states() == ["ready"] * 2, "the request is at fault, not the servers"


def test_the_same_nonsense_from_every_server_is_reported_as_it_is(fleet):
    run = fleet(2, retries=3)
    run.load(1)
    for n in range(2):
        run.fault(n, "outside vocabulary")
    with pytest.raises(CreditgraphError, match="row 0: expected token ids from 0 to 49, got 57"):
        run.generate(prompts=1, group=1)


def test_a_stuck_update_is_reported_with_server_and_log(fleet):
    run = fleet(1, update_seconds=1.0, restarts=0)
    run.load(1)
    run.fault(0, "hang in update")
    with pytest.raises(AllServersLost) as raised:
        run.load(2)
    text = str(raised.value)
    assert re.search(
        r"server 0 \(127.0.0.1:\d+\): expected it to finish within 1 s .*, but it was loading weights version 2 for 1",
        text,
    )
    assert "loading weights and going nowhere" in text
    assert "start the same command again" in text


@pytest.mark.parametrize("kind", ["500 in update", "old version", "hang in update"])
def test_a_server_without_the_new_weights_is_not_asked(fleet, kind):
    run = fleet(2, update_seconds=1.5, restarts=20)  # it starts again while its fault lasts
    run.load(1)
    run.fault(0, kind)
    run.load(2)
    assert run.pool.servers[0].state != "ready"
    run.generate(version=2)
    run.fault(0)
    run.until(lambda: run.states() == ["ready"] * 2, 30)
    assert run.pool.servers[0].label.startswith("2-")


def test_a_server_started_without_our_weight_transfer_is_given_up_in_words(fleet):
    run = fleet(1, restarts=0)
    run.load(1)
    run.fault(0, "no receiver")
    with pytest.raises(
        AllServersLost,
        match=r"cannot take weights\. Expected .* --weight-transfer-config\.backend creditgraph, started as",
    ):
        run.load(2)


def test_weights_changed_on_their_way_are_caught(fleet, monkeypatch):
    from creditgraph.components.engine import channel

    run = fleet(1, restarts=0)
    run.load(1)
    write = channel.write_file

    def corrupted(file, tensors):
        return write(file, {**tensors, "layer.0": tensors["layer.0"] + 1})

    monkeypatch.setattr(channel, "write_file", corrupted)
    with pytest.raises(
        AllServersLost,
        match=r"expected checksum \w+ of weights version 2, the server reports \w+: the weights were changed",
    ):
        run.load(2)


def test_a_server_that_computes_otherwise_right_after_a_start_is_given_up(fleet):
    run = fleet(1, restarts=3)
    request = ScoreRequest(row=0, group=0, context=[3], tokens=[5, 6], temperature=1.0)
    expected = Future()
    expected.set_result([-50.0, -50.0])
    update = replace(
        run.channel.publish(Weights(version=1, tensors={"a": torch.zeros(4)})),
        probe=Probe(request=request, expected=expected.result, tolerance=0.1),
        expected=expected,
    )
    with pytest.raises(AllServersLost, match=r"its log-probs of a fixed sequence differ by up to [\d.]+ nats"):
        run.pool.update(update)
    assert run.pool.servers[0].starts == 2, "the first, and once more"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs: run as root")
def test_full_shared_memory_leaves_the_servers_as_they_are(fleet, tmp_path):
    small = tmp_path / "shm"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(small)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        run = fleet(2, channel={"path": str(small)})
        run.load(1)
        filler = small / "somebody-else"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"0" * 4096)
        with pytest.raises(
            RunError,
            match=r"version 2: expected room for two versions .*Free space there, or set engine.channel.path",
        ):
            run.load(2)
        run.generate(version=1)
        filler.unlink()
        run.load(2)
        run.generate(version=2)
        run.close()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_weights_whose_writing_fails_half_way_stop_the_run_in_words(fleet, monkeypatch):
    run = fleet(2)
    run.load(1)

    def full(file, tensors):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("creditgraph.components.engine.channel.write_file", full)
    with pytest.raises(
        RunError, match=r"weights version 2: expected room for two versions .*set engine\.channel\.path to a folder"
    ):
        run.load(2)


def test_all_servers_lost_says_what_to_do(fleet):
    run = fleet(2, options=["--seconds", "0.2"], restarts=0)
    run.load(1)

    def kill_all():
        for n in range(2):
            run.kill(n)

    run.after(0.1, kill_all)
    with pytest.raises(AllServersLost) as raised:
        run.generate(prompts=4, group=4)
    text = str(raised.value)
    assert "node 'engine': all 2 servers are lost" in text
    assert "continues from the last finished iteration" in text


RUN = """
import os, signal, sys, time
sys.path.insert(0, {here!r})
import importlib.util
spec = importlib.util.spec_from_file_location("fleet_conftest", {here!r} + "/conftest.py")
module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
from pathlib import Path
run = module.Fleet(Path({folder!r}), 2, options=["--child"], channel={{"path": "/dev/shm"}})
run.load(1)
run.channel.publish(module.Weights(version=2, tensors={{"a": module.torch.zeros(4)}}))
processes = [s.process for s in run.pool.servers]
print(run.channel.folder, *[p.pid for p in processes], *[p.scratch for p in processes], flush=True)
if {end!r} == "exception":
    raise KeyError("oh")
time.sleep(600)
"""


def test_closing_ends_processes_and_frees_memory(fleet):
    run = fleet(2, options=["--child"])
    run.load(1)
    guards = [s.process.pid for s in run.pool.servers]
    trees = [pid for keeper in guards for pid in (keeper, *descendants(keeper))]
    memory = memory_of(run.folder)
    scratch = [s.process.scratch for s in run.pool.servers]
    assert len(trees) >= 8, "keeper, guard, server and its child, twice"
    assert all(file.exists() for file in [*memory, *scratch, run.channel.folder])
    run.close()
    assert not [pid for pid in trees if Path(f"/proc/{pid}").exists()]
    assert not any(file.exists() for file in [*memory, *scratch, run.channel.folder])


def memory_of(folder):
    """Shared memory of the servers' children."""
    logs = [(folder / "logs" / f"engine-{n}.log").read_text() for n in range(2)]
    return [Path("/dev/shm", re.search(r"memory (psm_\w+)", log)[1]) for log in logs]


def started_run(tmp_path, end):
    """A process with two servers that have children with shared memory: it, its weights, trees, scratch, memory."""
    script = textwrap.dedent(RUN).format(here=str(Path(__file__).parent), folder=str(tmp_path / "run"), end=end)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    channel, *listed = process.stdout.readline().split()
    trees = [[keeper, *descendants(keeper)] for keeper in map(int, listed[:2])]
    return process, Path(channel), trees, list(map(Path, listed[2:])), memory_of(tmp_path / "run")


@pytest.mark.parametrize("place", [0, 1], ids=["keeper", "guard"])
def test_nothing_outlives_a_run_that_is_killed_with_its_guards(tmp_path, place):
    process, channel, trees, scratch, memory = started_run(tmp_path, "")
    places = [channel, *scratch, *memory]
    assert all(map(Path.exists, places))
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in (channel, *scratch))
    for pid in (process.pid, *(tree[place] for tree in trees)):
        os.kill(pid, signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    pids = [pid for tree in trees for pid in tree]
    deadline = time.monotonic() + 20
    while any(guard.started(pid) != "0" for pid in pids) or any(map(Path.exists, places)):
        assert time.monotonic() < deadline, [str(place) for place in places if place.exists()]
        time.sleep(0.05)


def test_the_next_server_removes_what_a_run_left_that_was_killed_with_everything(tmp_path):
    process, channel, trees, scratch, memory = started_run(tmp_path, "")
    time.sleep(guard._LOOK_SECONDS + 1.0)  # the guard has listed its tree
    for pid in (process.pid, *(pid for tree in trees for pid in tree[:2])):
        os.kill(pid, signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    assert all(map(Path.exists, [channel, *scratch, *memory])), "nobody was left to remove them"
    following = ServerProcess(Launch(command=["true"]), tmp_path / "next.log")
    following._process.wait(20)
    FileChannel(ChannelSettings(path=str(channel.parent)), torch.float32).close()
    assert not any(map(Path.exists, [channel, *scratch, *memory]))
    time.sleep(0.5)
    assert not [pid for tree in trees for pid in tree if guard.started(pid) != "0"]


@pytest.mark.parametrize("end", ["exception", "SIGKILL"])
def test_no_process_and_no_memory_outlives_a_run(tmp_path, end):
    script = textwrap.dedent(RUN).format(here=str(Path(__file__).parent), folder=str(tmp_path / "run"), end=end)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    channel, *listed = process.stdout.readline().split()
    guards, scratch = listed[:2], listed[2:]
    trees = [pid for keeper in map(int, guards) for pid in (keeper, *descendants(keeper))]
    memory = memory_of(tmp_path / "run")
    if end.startswith("SIG"):
        assert len(trees) >= 8, "keeper, guard, server and its child, twice"
        assert all(file.exists() for file in memory)
        process.send_signal(getattr(signal, end))
    process.wait(30)
    process.stdout.close()
    deadline = time.monotonic() + 20

    def left():
        return [pid for pid in trees if Path(f"/proc/{pid}").exists()]

    while (left() or Path(channel).exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left()
    assert not Path(channel).exists()
    assert not any(file.exists() for file in memory)
    assert not any(Path(folder).exists() for folder in scratch)
