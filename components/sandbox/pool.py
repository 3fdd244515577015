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

from creditgraph.components.sandbox.isolation import Isolation, open_filter
from creditgraph.components.sandbox.limits import (
    CLOCK_FACTOR,
    GRACE_SECONDS,
    MAX_FILES,
    MEGABYTE,
    RUNNER_MEMORY,
    START_SECONDS,
    WATCH_SECONDS,
    Limits,
)
from creditgraph.components.sandbox.watch import Usage, Watch

NO_START = "the sandbox did not start"


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


def make_slots(workers: int) -> SimpleQueue[int]:
    """As many slots as sandboxes may run at a time, at most 64, for calls of `run_programs` that share them."""
    slots: SimpleQueue[int] = SimpleQueue()
    for slot in range(workers):
        slots.put(slot)
    return slots


def run_programs(
    programs: Sequence[Program],
    isolation: Isolation,
    limits: Limits,
    workers: int,
    slots: SimpleQueue[int] | None = None,
) -> list[list[TestResult]]:
    """Returns one list of results per program, one result per test, in order.

    A program that breaks its sandbox, hangs, or exceeds its limits fails only its own tests.

    Args:
        programs: the programs to run.
        isolation: how to isolate them.
        limits: limits per program.
        workers: number of sandboxes at a time, at most 64.
        slots: those of other calls at the same time, in place of slots of its own.
    """
    free = make_slots(workers) if slots is None else slots

    def run(program: Program) -> list[TestResult]:
        slot = free.get()
        try:
            with contextlib.closing(_Sandbox(program, slot, isolation, limits)) as sandbox:
                return sandbox.results()
        except OSError as error:  # no more processes, descriptors or memory on this host
            lost = TestResult(status="lost", reason=f"{NO_START} ({error})")
            return [lost] * len(program.inputs)
        finally:
            free.put(slot)

    # One thread per sandbox, which lives as long as the sandbox: bubblewrap's --die-with-parent follows the thread that
    # started it.
    with ThreadPoolExecutor(max_workers=workers) as threads:
        return list(threads.map(run, programs))


class _Clock:
    """Seconds of one test, as limits count them."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._before: Usage | None = None
        self.by_clock = 0.0
        self.without_waiting = 0.0
        self.counted = 0.0

    def read(self, now: float, usage: Usage) -> None:
        """Brings the seconds to the time `now`; `usage` is the sandbox's."""
        # The first sample of a test comes so early that nothing of it is missing.
        self._before = self._before or usage
        self.by_clock = now - self._started
        self.without_waiting = self.by_clock - (usage.waited - self._before.waited)
        self.counted = max(self.without_waiting, usage.cpu - self._before.cpu)

    def at_end(self, now: float) -> float:
        """Seconds of a test that ends at the time `now`."""
        return self.counted + now - self._started - self.by_clock


class _Sandbox:
    """A running sandbox and what it has written so far."""

    def __init__(self, program: Program, slot: int, isolation: Isolation, limits: Limits) -> None:
        self._limits = limits
        self._inputs = program.inputs
        self._isolated = bool(isolation.bubblewrap)
        self._ready = False
        self._unread = b""
        self._num_bytes = 0
        self._results: list[TestResult] = []
        self._seconds = 0.0  # of the tests that have ended
        self._started = time.monotonic()
        self._clock = _Clock()
        self._ended_after: float | None = None  # seconds after which the running test was ended
        self._next_look = time.monotonic() + WATCH_SECONDS
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        job = {
            "source": program.source,
            "function": program.function,
            "isolated": self._isolated,
            "uid": isolation.user_of(slot),
            "packages": isolation.module_path(),
            **limits.for_runner(self._isolated),
        }
        self._process = _start(isolation, limits, self._stderr)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        self._watch = Watch(self._process.pid)
        os.set_blocking(self._stdin.fileno(), False)
        self._unsent = memoryview(b"")
        self._send(job)

    def results(self) -> list[TestResult]:
        """Waits for the results of all tests, or for a reason to end the sandbox early."""
        reason = ""
        while not reason and not (self._ready and len(self._results) == len(self._inputs)):
            poll = select.poll()  # select.select does not support descriptors above 1023
            poll.register(self._stdout, select.POLLIN)
            if self._unsent:
                poll.register(self._stdin, select.POLLOUT)
            ready = {fd for fd, _ in poll.poll(max(self._next_look - time.monotonic(), 0.0) * 1000)}
            if self._stdin.fileno() in ready:
                self._write()
            if self._stdout.fileno() in ready:
                reason = self._receive()
            reason = reason or self._exceeded_limit()
        status = "memory" if reason.startswith("used") else "timeout" if reason.startswith("timed") else "lost"
        return self._results + [TestResult(status=status, reason=reason)] * (len(self._inputs) - len(self._results))

    def close(self) -> None:
        """Kills bubblewrap; the namespace's init dies with it, and every process inside dies with init."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._stdin.close()
        self._stdout.close()
        self._stderr.close()

    def _send(self, request: Any) -> None:
        self._unsent = memoryview(bytes(self._unsent) + json.dumps(request).encode() + b"\n")
        self._write()

    def _write(self) -> None:
        """Writes as much as the sandbox reads; one that has ended is noticed at its output."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unsent = memoryview(b"")
        if self._ended_after is None:
            self._clock = _Clock()  # a test starts when its input has arrived

    def _receive(self) -> str:
        """Reads new output. Returns the reason why the sandbox has ended, "" while it runs."""
        chunk = os.read(self._stdout.fileno(), 1 << 18)
        self._num_bytes += len(chunk)
        if not chunk or self._num_bytes > self._limits.max_reply_bytes(len(self._inputs)):
            if not self._ready:
                return f"{NO_START} ({self._error()})"
            return "the sandbox was ended from inside"
        self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            if not self._ready:
                self._ready = True
            elif len(self._results) < len(self._inputs):
                # After the request to end it, whatever came is too late: a test can stop the runner for a while.
                late = TestResult(status="timeout", reason=_reason("timeout", 0, "", self._limits))
                self._results.append(_result(line, self._limits) if self._ended_after is None else late)
                self._seconds += self._clock.at_end(time.monotonic())
            self._next_test()
        return ""

    def _next_test(self) -> None:
        """Sends the next input; or, if the program has used up what it may, fills in the tests that are left."""
        limits = self._limits
        left = len(self._inputs) - len(self._results)
        if sum(result.status == "timeout" for result in self._results) >= limits.timeouts:
            self._results += [TestResult(status="skipped", reason="not run after an earlier time-out")] * left
        elif max(self._seconds, (time.monotonic() - self._started) / CLOCK_FACTOR) >= limits.program_seconds:
            reason = f"not run: the tests before it took more than {limits.program_seconds:g} s together"
            self._results += [TestResult(status="skipped", reason=reason)] * left
        elif left:
            self._ended_after = None
            self._clock = _Clock()
            self._send(self._inputs[len(self._results)])

    def _exceeded_limit(self) -> str:
        """Ends a test that exceeds its time. Returns which limit of the whole sandbox is exceeded, "" when none is."""
        limits = self._limits
        now = time.monotonic()
        if now < self._next_look:
            return ""
        self._next_look = now + WATCH_SECONDS
        usage = self._watch.sample(now)
        clock = self._clock
        clock.read(now, usage)
        if not self._ready or self._unsent:
            return "" if clock.by_clock < START_SECONDS else f"{NO_START} in time"
        if usage.memory > limits.memory_mb * MEGABYTE + RUNNER_MEMORY:
            return f"used more than {limits.memory_mb} MB of memory"
        # Ready means that bubblewrap has left the host's root, whose /tmp it would otherwise count.
        if self._isolated and _inodes(self._process.pid) > MAX_FILES:
            return f"made more than {MAX_FILES} files"
        if self._ended_after is not None:
            late = clock.without_waiting - self._ended_after >= GRACE_SECONDS
            if late or clock.by_clock >= limits.seconds * CLOCK_FACTOR + GRACE_SECONDS:
                return f"timed out after {limits.seconds:g} s, the sandbox not responding"
        elif clock.counted >= limits.seconds or clock.by_clock >= limits.seconds * CLOCK_FACTOR:
            self._ended_after = clock.without_waiting
            self._send(None)
        return ""

    def _error(self) -> str:
        """Standard error of the start, or its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._stderr.seek(0)
        text = " ".join(self._stderr.read(2000).decode("utf-8", "replace").split())[:300]
        return text or f"exit code {self._process.poll()}"


def _start(isolation: Isolation, limits: Limits, stderr: Any) -> subprocess.Popen[bytes]:
    filter_fd = open_filter() if isolation.bubblewrap else -1
    try:
        return subprocess.Popen(
            isolation.command(limits, filter_fd),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
            pass_fds=[filter_fd] if filter_fd >= 0 else [],
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            cwd="/" if isolation.bubblewrap else tempfile.gettempdir(),
            start_new_session=True,
        )
    finally:
        if filter_fd >= 0:
            os.close(filter_fd)


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
