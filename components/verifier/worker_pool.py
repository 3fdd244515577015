"""A pool of worker processes with a hard time limit per request."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import LifoQueue
from threading import Lock, Timer
from typing import Any

from creditgraph.pipeline.core.errors import RunError

START_SECONDS = 120.0  # importing sympy on a busy host takes tens of seconds


class WorkerPool:
    """Sends JSON requests to processes started with `command`, one at a time each.

    A worker says {"ready": true} on its first line and then replies line by line. A request that takes longer than
    `seconds`, or ends its worker, gets {"error": reason}; that worker is replaced when a request needs it, and no other
    request is affected. Workers start with the first requests and are plain child processes that share neither threads
    nor memory with this process, which is safe with torch. With `show_errors` their standard error is this process's.

    Attributes:
        restarts: number of workers lost during a request.
    """

    def __init__(self, command: Sequence[str], workers: int, seconds: float, show_errors: bool = False) -> None:
        self._command = list(command)
        self._stderr = None if show_errors else subprocess.DEVNULL
        self._workers = workers
        self._seconds = seconds
        # Last in, first out, so that few requests start few workers. None is a worker that is not running.
        self._idle: LifoQueue[subprocess.Popen[bytes] | None] = LifoQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._lock = Lock()
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
            reply = _exchange(worker, request, self._seconds)
            if not isinstance(reply, str):
                return reply
            _end(worker)
            worker = None
            with self._lock:
                self.restarts += 1
            return {"error": reply}
        finally:
            self._idle.put(worker)

    def _start(self) -> subprocess.Popen[bytes]:
        # In a separate session, so that only this process receives Ctrl-C and then closes its workers in order.
        worker = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            # The order of sets of strings must not differ between workers and runs.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        ready = _exchange(worker, None, START_SECONDS)
        if isinstance(ready, str):
            _end(worker)
            raise RunError(
                f"a verification worker did not start ({ready}), expected a process that reports ready; command: "
                f"{' '.join(self._command)}. Run the command by hand to see why, for example a package that is missing."
            )
        return worker


def _exchange(worker: subprocess.Popen[bytes], request: dict[str, Any] | None, seconds: float) -> dict[str, Any] | str:
    """Sends a request, or only waits if it is None. Returns the reply, or the reason why there is none."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    started = time.monotonic()
    # With the whole session, its forks included, nobody holds the pipe open, and the read below ends.
    watchdog = Timer(seconds, os.killpg, (worker.pid, signal.SIGKILL))
    watchdog.start()
    line = b""
    try:
        if request is not None:
            worker.stdin.write(json.dumps(request).encode() + b"\n")
            worker.stdin.flush()
        line = worker.stdout.readline()
    except OSError:  # it ended while it was written to
        pass
    finally:
        watchdog.cancel()
    if line.endswith(b"\n"):
        reply: dict[str, Any] = json.loads(line)
        return reply
    late = time.monotonic() - started >= seconds
    return f"timed out after {seconds:g} s" if late else f"the worker ended with exit code {worker.wait()}"


def _end(worker: subprocess.Popen[bytes]) -> None:
    if worker.poll() is None:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        with contextlib.suppress(OSError):  # unwritten bytes for a process that is gone
            if pipe is not None:
                pipe.close()
