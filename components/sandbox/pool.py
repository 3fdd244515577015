"""Runs many programs, each in a separate sandbox, several at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from components.sandbox.isolation import Isolation, open_filter
from components.sandbox.limits import (
    GRACE_SECONDS,
    MAX_FILES,
    MEGABYTE,
    RUNNER_MEMORY,
    START_SECONDS,
    WATCH_SECONDS,
    Limits,
)


@dataclass(frozen=True, kw_only=True)
class Program:
    """Source text, and one input per test.

    An input is text for standard input; or, for a program that defines `function`, the list of its arguments (JSON
    values).
    """

    source: str
    inputs: Sequence[Any]
    function: str = ""


@dataclass(frozen=True, kw_only=True)
class TestResult:
    """Result of one test.

    Attributes:
        status: "exit", "signal", "timeout", "output" (too much of it), "skipped", "memory" or "lost" (the sandbox
            ended).
        code: exit code or signal number.
        out: standard output, malformed bytes replaced.
        result: JSON text of the value the function returned.
        reason: why there is no usable output, "" if there is.
    """

    __test__ = False

    status: str
    code: int = 0
    out: str = ""
    result: str = ""
    reason: str = ""


def run_programs(
    programs: Sequence[Program], isolation: Isolation, limits: Limits, workers: int
) -> list[list[TestResult]]:
    """Returns one list of results per program, one result per test, in order.

    A program that breaks its sandbox, hangs, or exceeds its limits fails only its own tests.

    Args:
        programs: the programs to run.
        isolation: how to isolate them.
        limits: limits per program.
        workers: number of sandboxes at a time, at most 64.
    """
    slots: SimpleQueue[int] = SimpleQueue()
    for slot in range(workers):
        slots.put(slot)

    def run(program: Program) -> list[TestResult]:
        slot = slots.get()
        try:
            with contextlib.closing(_Sandbox(program, slot, isolation, limits)) as sandbox:
                return sandbox.results()
        finally:
            slots.put(slot)

    # One thread per sandbox, which lives as long as the sandbox: bubblewrap's --die-with-parent follows the thread that
    # started it.
    with ThreadPoolExecutor(max_workers=workers) as threads:
        return list(threads.map(run, programs))


class _Sandbox:
    """A running sandbox and what it has written so far."""

    def __init__(self, program: Program, slot: int, isolation: Isolation, limits: Limits) -> None:
        self._limits = limits
        self._tests = len(program.inputs)
        self._isolated = bool(isolation.bubblewrap)
        self._ready = False
        self._unread = b""
        self._num_bytes = 0
        self._results: list[TestResult] = []
        self._started = time.monotonic()
        self._deadline = self._started + START_SECONDS
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        job = {
            "source": program.source,
            "function": program.function,
            "inputs": list(program.inputs),
            "isolated": self._isolated,
            "uid": isolation.user_of(slot),
            "packages": isolation.module_path(),
            **limits.for_runner(self._isolated),
        }
        self._process = _start(job, isolation, limits, self._stderr)
        assert self._process.stdout is not None
        self._stdout = self._process.stdout

    def results(self) -> list[TestResult]:
        """Waits for the results of all tests, or for a reason to end the sandbox early."""
        output = select.poll()  # select.select does not support descriptors above 1023
        output.register(self._stdout, select.POLLIN)
        reason = ""
        while not reason and not (self._ready and len(self._results) == self._tests):
            wait = min(self._deadline - time.monotonic(), WATCH_SECONDS)
            if output.poll(max(wait, 0.0) * 1000):
                reason = self._receive()
            reason = reason or self._exceeded_limit()
        status = "memory" if reason.startswith("used") else "timeout" if reason.startswith("timed") else "lost"
        lost = TestResult(status=status, reason=reason)
        return self._results + [lost] * (self._tests - len(self._results))

    def close(self) -> None:
        """Kills bubblewrap; the namespace's init dies with it, and every process inside dies with init."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._stdout.close()
        self._stderr.close()

    def _receive(self) -> str:
        """Reads new output. Returns the reason why the sandbox has ended, "" while it runs."""
        chunk = os.read(self._stdout.fileno(), 1 << 18)
        self._num_bytes += len(chunk)
        if not chunk or self._num_bytes > self._limits.max_reply_bytes(self._tests):
            if not self._ready:
                return f"the sandbox did not start ({self._error()})"
            return "the sandbox was ended from inside"
        self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            # Every line is progress, so the next test gets its whole time. A program cannot make its tests last longer.
            self._deadline = time.monotonic() + self._limits.seconds + GRACE_SECONDS
            if not self._ready:
                self._ready = True
            elif len(self._results) < self._tests:
                self._results.append(_result(line, self._limits))
        return ""

    def _exceeded_limit(self) -> str:
        """Which limit of the whole sandbox is exceeded, "" when none is."""
        limits = self._limits
        now = time.monotonic()
        if self._deadline <= now:
            if not self._ready:
                return "the sandbox did not start in time"
            return f"timed out after {limits.seconds:g} s, the sandbox not responding"
        if now - self._started <= WATCH_SECONDS:
            return ""
        if resident_bytes(self._process.pid) > limits.memory_mb * MEGABYTE + RUNNER_MEMORY:
            return f"used more than {limits.memory_mb} MB of memory"
        # Ready means that bubblewrap has left the host's root, whose /tmp it would otherwise count.
        if self._isolated and self._ready and _inodes(self._process.pid) > MAX_FILES:
            return f"made more than {MAX_FILES} files"
        return ""

    def _error(self) -> str:
        """Standard error of the start, or its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._stderr.seek(0)
        text = " ".join(self._stderr.read(2000).decode("utf-8", "replace").split())[:300]
        return text or f"exit code {self._process.poll()}"


def _start(job: dict[str, Any], isolation: Isolation, limits: Limits, stderr: Any) -> subprocess.Popen[bytes]:
    filter_fd = open_filter() if isolation.bubblewrap else -1
    # In memory and already complete: the sandbox can neither block the writer nor see a path.
    job_fd = os.memfd_create("job", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(job_fd), "wb") as writer:
            writer.write(json.dumps(job).encode())
        os.lseek(job_fd, 0, os.SEEK_SET)
        return subprocess.Popen(
            isolation.command(limits, filter_fd),
            stdin=job_fd,
            stdout=subprocess.PIPE,
            stderr=stderr,
            pass_fds=[filter_fd] if filter_fd >= 0 else [],
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            cwd="/" if isolation.bubblewrap else tempfile.gettempdir(),
            start_new_session=True,
        )
    finally:
        for fd in (job_fd, filter_fd):
            if fd >= 0:
                os.close(fd)


def _result(line: bytes, limits: Limits) -> TestResult:
    try:
        reply = json.loads(line)
        status = str(reply["status"])
        code = int(reply.get("code", 0))
        out, result, error = (str(reply.get(key, "")) for key in ("out", "result", "err"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return TestResult(status="lost", reason="the sandbox's reply could not be read")
    reason = _reason(status, code, error, limits)
    return TestResult(status=status, code=code, out=out, result=result, reason=reason)


def _reason(status: str, code: int, error: str, limits: Limits) -> str:
    if status == "exit":
        return "" if code == 0 else f"exit code {code}" + (f": {error}" if error else "")
    if status == "signal":
        name = signal.Signals(code).name if code in {int(s) for s in signal.Signals} else str(code)
        return f"killed by {name}" if code else error
    texts = {
        "timeout": f"timed out after {limits.seconds:g} s",
        "output": f"wrote more than {limits.output_kb} kB",
        "skipped": "not run after an earlier time-out",
    }
    return texts.get(status, "the sandbox's reply could not be read")


def _inodes(pid: int) -> int:
    """Files in the private /tmp."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as text:
            status = os.statvfs(f"/proc/{text.read().split()[0]}/root/tmp")
        return status.f_files - status.f_ffree
    except (OSError, IndexError):
        return 0


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and all its descendants in bytes, without file-backed pages."""
    total = 0
    open_pids = [pid]
    while open_pids:
        one = open_pids.pop()
        try:
            with open(f"/proc/{one}/status", encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if line.startswith(("RssAnon:", "RssShmem:")):
                        total += int(line.split()[1]) * 1024
            with open(f"/proc/{one}/task/{one}/children", encoding="ascii") as text:
                open_pids += map(int, text.read().split())
        except (OSError, ValueError):  # it ended meanwhile
            continue
    return total
