"""A pool of worker processes with a hard time limit per item."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.core.errors import RunError

START_SECONDS = 120.0
MAX_FAILED_STARTS = 3


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    deadline: float
    sent: float = 0.0
    ready: bool = False
    item: int | None = None
    unread: bytearray = field(default_factory=bytearray)


class WorkerPool:
    """Sends JSON requests to processes started with `command`, one at a time each.

    A worker says {"ready": true} on its first line and then answers line by line. An item that takes longer than
    `seconds`, or ends its worker, gets {"error": reason}; that worker is killed and another one started, and no other
    item is affected. Workers start with the first items and are plain child processes: neither threads nor memory of
    this process are shared, so torch does not mind.
    """

    def __init__(self, command: Sequence[str], workers: int, seconds: float) -> None:
        self._command, self._count, self._seconds = list(command), workers, seconds
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self.restarts = 0
        self.longest = 0.0  # seconds of the slowest item so far

    def run(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """One reply per request, in order."""
        replies: list[dict[str, Any]] = [{} for _ in requests]
        waiting = deque(range(len(requests)))
        while waiting or any(w.item is not None for w in self._workers):
            busy = sum(w.item is not None for w in self._workers)
            while len(self._workers) < min(self._count, busy + len(waiting)):
                self._workers.append(self._start())
            for worker in list(self._workers):
                if worker.ready and worker.item is None and waiting:
                    self._send(worker, waiting, requests)
            for worker in self._readable():
                self._receive(worker, replies)
            now = time.monotonic()
            for worker in [w for w in self._workers if (w.item is not None or not w.ready) and w.deadline <= now]:
                self._lost(worker, replies, f"timed out after {self._seconds:g} s")
        return replies

    def close(self) -> None:
        """Ends all workers."""
        for worker in self._workers:
            _kill(worker)
        self._workers.clear()

    def _start(self) -> _Worker:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # A session of its own keeps Ctrl-C for this process, which then closes its workers in order.
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        return _Worker(process=process, deadline=time.monotonic() + START_SECONDS)

    def _send(self, worker: _Worker, waiting: deque[int], requests: Sequence[dict[str, Any]]) -> None:
        assert worker.process.stdin is not None
        try:
            worker.process.stdin.write(json.dumps(requests[waiting[0]]).encode() + b"\n")
            worker.process.stdin.flush()
        except OSError:  # it ended while idle; the item goes to another worker
            self._workers.remove(worker)
            _kill(worker)
            return
        worker.item, worker.sent = waiting.popleft(), time.monotonic()
        worker.deadline = worker.sent + self._seconds

    def _readable(self) -> list[_Worker]:
        """Workers with output or a closed pipe, waiting at most until the next deadline."""
        active = [w for w in self._workers if w.item is not None or not w.ready]
        if not active:
            return []
        with selectors.DefaultSelector() as selector:
            for worker in active:
                assert worker.process.stdout is not None
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            wait = max(min(w.deadline for w in active) - time.monotonic(), 0)
            return [key.data for key, _ in selector.select(wait)]

    def _receive(self, worker: _Worker, replies: list[dict[str, Any]]) -> None:
        assert worker.process.stdout is not None
        chunk = os.read(worker.process.stdout.fileno(), 1 << 16)
        if not chunk:
            self._lost(worker, replies, f"the worker ended with exit code {worker.process.wait()}")
            return
        worker.unread += chunk
        while b"\n" in worker.unread:
            line, _, rest = worker.unread.partition(b"\n")
            worker.unread = bytearray(rest)
            if not worker.ready:
                worker.ready, self._failed_starts = True, 0
            elif worker.item is not None:
                self.longest = max(self.longest, time.monotonic() - worker.sent)
                replies[worker.item], worker.item = json.loads(line), None

    def _lost(self, worker: _Worker, replies: list[dict[str, Any]], reason: str) -> None:
        _kill(worker)
        self._workers.remove(worker)
        if worker.item is not None:
            replies[worker.item] = {"error": reason}
            self.restarts += 1
            self.longest = max(self.longest, time.monotonic() - worker.sent)
            return
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise RunError(
                f"a verification worker did not start ({reason}); command: {' '.join(self._command)}; wanted a process "
                "that answers. "
                "Run the command by hand to see why, for example a package that is missing."
            )


def _kill(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.wait()
    for pipe in (worker.process.stdin, worker.process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # unwritten bytes for a process that is gone
                continue
