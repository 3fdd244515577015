"""A pool of worker processes with a hard time limit per request."""

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from queue import LifoQueue
from threading import Lock
from typing import Any

from creditgraph.pipeline.core.errors import RunError

_MARK = "CREDITGRAPH_WORKER"  # variable of a worker's environment, which its children inherit
START_SECONDS = 120.0  # importing sympy on a busy host takes tens of seconds


class _Worker(subprocess.Popen[bytes]):
    """A worker process, and a text that only it and what it starts have in their environment."""

    mark: str


class WorkerPool:
    """Sends JSON requests to processes started with `command`, one at a time each.

    A worker says {"ready": true} on its first line and then replies line by line. Each request has a "number", which
    its reply repeats; lines with another number are left over from a call that wrote more than its reply, and are
    skipped. A request that takes longer than `seconds`, or ends its worker, gets {"error": reason, "timed_out": bool};
    that worker and all processes that it started are killed, it is replaced when a request needs it, and no other
    request is affected. A worker that ends while it starts is started once more. Workers start with the first requests
    and are plain child processes that share neither threads nor memory with this process, which is safe with torch.
    With `show_errors` their standard error is this process's.

    Attributes:
        restarts: number of workers lost during a request.
    """

    def __init__(self, command: Sequence[str], workers: int, seconds: float, show_errors: bool = False) -> None:
        self._command = list(command)
        self._stderr = None if show_errors else subprocess.DEVNULL
        self._workers = workers
        self._seconds = seconds
        # Last in, first out, so that few requests start few workers. None is a worker that is not running.
        self._idle: LifoQueue[_Worker | None] = LifoQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._lock = Lock()
        self._numbers = count(1)
        self.restarts = 0

    def run(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """One reply per request, in order.

        Raises:
            RunError: workers do not start.
        """
        with ThreadPoolExecutor(max_workers=self._workers) as threads:
            return list(threads.map(self._reply, requests))

    def close(self) -> None:
        """Ends all workers."""
        for worker in [self._idle.get() for _ in range(self._workers)]:
            if worker is not None:
                _end(worker)
            self._idle.put(None)

    def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            if worker is None or worker.poll() is not None:  # not started yet, or ended while idle
                worker = None
                worker = self._start()
            number = next(self._numbers)
            try:
                return _exchange(worker, {**request, "number": number}, number, self._seconds)
            except _Lost as lost:
                _end(worker)
                worker = None
                with self._lock:
                    self.restarts += 1
                return {"error": str(lost), "timed_out": lost.timed_out}
        finally:
            self._idle.put(worker)

    def _start(self, tries: int = 2) -> _Worker:
        mark = secrets.token_hex(8)
        # In a separate session, so that only this process receives Ctrl-C and then closes its workers in order.
        worker = _Worker(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            # The order of sets of strings must not differ between workers and runs.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", _MARK: mark},
            start_new_session=True,
        )
        worker.mark = mark
        try:
            _exchange(worker, None, None, START_SECONDS)
        except _Lost as lost:
            _end(worker)
            if tries > 1:  # something on the host may have killed it, for its memory for example
                return self._start(tries - 1)
            raise RunError(
                f"a verification worker did not start ({lost}), expected a process that reports ready; command: "
                f"{' '.join(self._command)}. Run the command by hand to see why, for example a package that is missing."
            ) from None
        return worker


class _Lost(Exception):
    """Why a worker gave no reply."""

    def __init__(self, reason: str, timed_out: bool) -> None:
        super().__init__(reason)
        self.timed_out = timed_out


def _exchange(worker: _Worker, request: dict[str, Any] | None, number: int | None, seconds: float) -> dict[str, Any]:
    """Sends a request, or only waits if it is None; returns the reply with its number, or raises _Lost."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    deadline = time.monotonic() + seconds
    unsent = b"" if request is None else json.dumps(request).encode() + b"\n"
    read = b""
    ins, out = worker.stdout.fileno(), worker.stdin.fileno()
    os.set_blocking(ins, False)
    os.set_blocking(out, False)
    with contextlib.suppress(OSError):  # it ended while it was written to
        while (left := deadline - time.monotonic()) > 0:
            readable, writable, _ = select.select([ins], [out] if unsent else [], [], left)
            if writable:
                unsent = unsent[os.write(out, unsent) :]
            if readable:
                if not (raw := os.read(ins, 1 << 16)):
                    break
                *lines, read = (read + raw).split(b"\n")
                if (reply := _reply_of(lines, number)) is not None:
                    return reply
        else:
            raise _Lost(f"timed out after {seconds:g} s", True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        raise _Lost(f"the worker ended with exit code {worker.wait(1.0)}", False)
    raise _Lost("the worker closed its output", False)


def _reply_of(lines: list[bytes], number: int | None) -> dict[str, Any] | None:
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            reply = json.loads(line)
            if isinstance(reply, dict) and reply.pop("number", None) == number:
                return reply
    return None


def _end(worker: _Worker) -> None:
    """Kills a worker and all that it started, also what has left its session."""
    if worker.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    for pid in _marked(f"{_MARK}={worker.mark}".encode()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    for pipe in (worker.stdin, worker.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()


def _marked(mark: bytes) -> list[int]:
    """Processes that have the variable in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found
