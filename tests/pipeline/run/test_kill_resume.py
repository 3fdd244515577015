"""A run killed at any instant and started again ends as if nothing had happened."""

import functools
import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy_graph as toy

from creditgraph.pipeline.run.checkpoint import Checkpoints

TOY = Path(__file__).parents[1] / "toys" / "toy_graph.py"
ITERATIONS = 11


class Child:
    """A run in a process of its own."""

    def __init__(self, server, path, delay=2, overlap=True, sleep=0.0, kill=None):
        self.server, self.path = server, path
        server.stdin.write(json.dumps([str(path), ITERATIONS, delay, overlap, sleep, kill]) + "\n")
        server.stdin.flush()
        self.pid = int(server.stdout.readline())

    def send(self, number):
        os.kill(self.pid, number)

    def finish(self):
        return int(self.server.stdout.readline()), Path(f"{self.path}.err").read_text()


@pytest.fixture(scope="module")
def start():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(TOY)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout.readline() == "ready\n"
        yield functools.partial(Child, server)
        server.stdin.close()


def wait_for(path, lines):
    deadline = time.monotonic() + 30
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def metrics(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("seconds/", "utilisation/"))} for row in rows]


def digest(path):
    """Of the final state, tensors and nesting, byte for byte."""
    newest = path / "checkpoints" / f"{ITERATIONS - 1:06d}"
    return {
        name: hashlib.sha256((newest / name).read_bytes()).hexdigest() for name in ("tensors.safetensors", "state.json")
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run, without overlap."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert toy.train(path, ITERATIONS, delay=2, overlap=False).status == "finished"
    return path


def assert_same(path, whole):
    assert metrics(path) == metrics(whole)
    assert (path / "rejected.jsonl").read_bytes() == (whole / "rejected.jsonl").read_bytes()
    assert sorted(p.name for p in (path / "record" / "score.rewards").glob("*")) == [
        f"{i:06d}.parquet" for i in range(ITERATIONS)
    ]
    assert digest(path) == digest(whole)


# Checkpoints are due after iterations 2, 5, 8 and at the end, 10. From the third on, the oldest is renamed away too.
@pytest.mark.parametrize("kill", ["write:1", "write:2", "rename:2", "done:2", "rename:4", "write:4"])
def test_killed_inside_a_checkpoint_write(tmp_path, whole, start, kill):
    path = tmp_path / "run"
    code, errors = start(path, kill=kill).finish()
    assert code == -signal.SIGKILL, errors
    assert toy.train(path, ITERATIONS, delay=2).status == "finished"
    assert_same(path, whole)
    assert not list((path / "checkpoints").glob(".*"))


@pytest.mark.parametrize("delay", [1, 2])
def test_killed_at_random_instants(tmp_path, start, delay):
    path = tmp_path / "run"
    toy.train(tmp_path / "whole", ITERATIONS, delay=delay, overlap=False)
    draw = random.Random(7)
    killed = 0
    for _ in range(5):
        child = start(path, delay=delay, sleep=0.02)
        wait_for(path / "config.yaml", 0)
        time.sleep(draw.uniform(0.0, 0.4))
        child.send(signal.SIGKILL)
        killed += child.finish()[0] == -signal.SIGKILL
    assert killed >= 3
    assert toy.train(path, ITERATIONS, delay=delay).status == "finished"
    assert_same(path, tmp_path / "whole")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_a_signal_finishes_the_iteration_saves_and_continues(tmp_path, whole, start, number, code, overlap):
    path = tmp_path / "run"
    child = start(path, sleep=0.05, overlap=overlap)
    wait_for(path / "metrics.jsonl", 1)
    child.send(number)
    returned, errors = child.finish()
    assert returned == code, errors
    done = len(metrics(path))
    assert 0 < done < ITERATIONS
    assert Checkpoints(path / "checkpoints").latest().iteration == done - 1
    assert f"{signal.Signals(number).name}: finishing this iteration and saving" in errors
    assert toy.train(path, ITERATIONS, delay=2).status == "finished"
    assert_same(path, whole)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_second_ctrl_c_ends_at_once(tmp_path, start, overlap):
    child = start(tmp_path / "run", sleep=7.0, overlap=overlap)
    wait_for(tmp_path / "run" / "metrics.jsonl", 0)
    time.sleep(0.2)
    begin = time.monotonic()
    child.send(signal.SIGINT)
    time.sleep(0.2)
    child.send(signal.SIGINT)
    code, errors = child.finish()
    assert code == 1
    assert "KeyboardInterrupt" in errors
    assert time.monotonic() - begin < 20  # one iteration would take 21 seconds


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, whole, caplog):
    path = tmp_path / "run"
    assert toy.train(path, 9, delay=2).status == "finished"
    newest = path / "checkpoints" / "000008" / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-3] + b"\0\1\2")
    with caplog.at_level(logging.WARNING, "creditgraph"):
        assert toy.train(path, ITERATIONS, delay=2).status == "finished"
    assert (
        "000008/tensors.safetensors: its checksum differs from the manifest; the checkpoint is damaged. It is skipped, "
        "set aside as damaged-000008; the previous one is tried." in caplog.text
    )
    assert len(caplog.records) == 1

    assert_same(path, whole)
