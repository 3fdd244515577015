"""SIGKILL at random instants of a run, one to three times; continued, it ends with the same bytes as undisturbed."""

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from attack_suites import toy_runs
from creditgraph.pipeline.core.streams import Stream

PAUSE = 0.02  # seconds per node, so that a run lasts long enough to be hit
use = toy_runs.use


@dataclass(frozen=True)
class Case:
    """A run and the shares of its duration at which it is killed."""

    number: int
    delay: int
    overlap: bool
    instants: tuple[float, ...]

    def __str__(self) -> str:
        lanes = "two lanes" if self.overlap else "one lane"
        return f"{self.number}: @{self.delay}, {lanes}, killed at " + ", ".join(f"{t:.0%}" for t in self.instants)


def cases() -> list[Case]:
    draws = Stream("attack", "kill")
    uid = torch.arange(100)
    at = [draws.uniform(uid, f"instant {k}").tolist() for k in range(3)]
    kills, delay, overlap = (draws.uniform(uid, what).tolist() for what in ("kills", "delay", "overlap"))
    return [
        Case(n, 1 + int(2 * delay[n]), overlap[n] < 0.7, tuple(at[k][n] for k in range(1 + int(3 * kills[n]))))
        for n in range(100)
    ]


def quick() -> list[Case]:
    return cases()[:3]


def run(case: Case) -> tuple[bool, str]:
    path = toy_runs.FOLDER / f"kill-{case.number}"
    whole = toy_runs.finished(toy_runs.ITERATIONS, case.delay, toy_runs.SEGMENT)
    full = _duration(case.delay)
    hits = 0
    for share in case.instants:
        hits += _killed(path, case, share * full)
    while not hits:  # each was later than the end
        shutil.rmtree(path)
        full /= 2
        hits += _killed(path, case, case.instants[0] * full)
    reached = sorted(p.name for p in (path / "checkpoints").glob("[0-9]*")) if path.exists() else []
    toy_runs.toy.train(path, toy_runs.ITERATIONS, delay=case.delay, overlap=case.overlap, segment=toy_runs.SEGMENT)
    different = [
        name
        for name, read in (
            ("state", toy_runs.state),
            ("metrics", toy_runs.metrics),
            ("records", toy_runs.records),
            ("rejected rows", lambda p: (p / "rejected.jsonl").read_bytes()),
        )
        if read(path) != read(whole)
    ]
    left = [p.name for p in path.rglob(".*")]
    at = f"killed {hits} times, last after checkpoint {reached[-1] if reached else 'none'}"
    if different or left:
        return (
            False,
            f"{at}; different: {', '.join(different) or 'nothing'}; left behind: {', '.join(left) or 'nothing'}",
        )
    return True, f"{at}; same state, metrics, records and rejected rows"


@cache
def _server() -> subprocess.Popen:
    """A process that forks a run per line, so that torch is imported once."""
    environment = {**os.environ, "PYTHONPATH": str(toy_runs.ROOT), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, str(toy_runs.TOY)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.stdin.close)
    server.stdout.readline()
    return server


def _start(path: Path, delay: int, overlap: bool) -> int:
    server = _server()
    server.stdin.write(
        json.dumps([str(path), toy_runs.ITERATIONS, delay, overlap, PAUSE, None, toy_runs.SEGMENT]) + "\n"
    )
    server.stdin.flush()
    return int(server.stdout.readline())


@cache
def _duration(delay: int) -> float:
    begin = time.monotonic()
    _start(toy_runs.FOLDER / f"timed-{delay}", delay, overlap=False)
    _server().stdout.readline()
    return time.monotonic() - begin


def _killed(path: Path, case: Case, seconds: float) -> bool:
    """Whether a run was killed so many seconds after its start, before it ended."""
    if _done(path):
        return False
    process = _start(path, case.delay, case.overlap)
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(process, signal.SIGKILL)
    return int(_server().stdout.readline()) == -signal.SIGKILL


def _done(path: Path) -> bool:
    return (path / "checkpoints" / f"{toy_runs.ITERATIONS - 1:06d}").exists()
