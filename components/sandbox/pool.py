"""Runs many programs, each in a sandbox of its own, several at a time."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from components.sandbox.isolation import Isolation, open_filter
from components.sandbox.limits import MEGABYTE, Limits

START_SECONDS = 30.0
GRACE_SECONDS = 1.0
WATCH_SECONDS = 0.05
MAX_FILES = 10_000
_OWN_MEMORY = 24 * MEGABYTE  # the interpreter and the runner themselves


@dataclass(frozen=True, kw_only=True)
class Test:
    """One run of a program: text for standard input, or arguments for the function the program defines (JSON values)."""

    __test__ = False

    input: str = ""
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Program:
    """Source text and its tests; `function` names what is called with the arguments, "" for standard input and output."""

    source: str
    tests: tuple[Test, ...]
    function: str = ""


@dataclass(frozen=True, kw_only=True)
class TestResult:
    """What one run did.

    Attributes:
        status: "exit", "signal", "timeout", "output" (too much of it), "skipped", "memory" or "lost" (the sandbox
            ended).
        code: exit code or signal number.
        out: standard output, malformed bytes replaced.
        result: JSON text of the value the function returned.
        error: last line of standard error.
        reason: why there is no usable output, "" when there is.
    """

    __test__ = False

    status: str
    code: int = 0
    out: str = ""
    result: str = ""
    error: str = ""
    reason: str = ""


@dataclass(eq=False)
class _Running:
    """A sandbox and what it has said so far."""

    index: int
    slot: int
    process: subprocess.Popen[bytes]
    deadline: float
    started: float
    isolated: bool
    ready: bool = False
    unread: bytearray = field(default_factory=bytearray)
    received: int = 0
    replies: list[TestResult] = field(default_factory=list)
    stderr: Any = None


def run_programs(programs: Sequence[Program], way: Isolation, limits: Limits, workers: int) -> list[list[TestResult]]:
    """One list of results per program, one result per test, in order.

    A program that breaks its sandbox, hangs, or spends more than its limits costs its own tests and nothing else.

    Args:
        programs: what to run.
        way: how to isolate.
        limits: per program.
        workers: sandboxes at a time, at most 64.
    """
    out: list[list[TestResult]] = [[] for _ in programs]
    waiting, running, slots = deque(range(len(programs))), list[_Running](), list(range(workers))
    try:
        while waiting or running:
            while waiting and slots:
                index = waiting.popleft()
                running.append(_start(programs[index], index, slots.pop(), way, limits))
            for box in _readable(running):
                _receive(box, limits, len(programs[box.index].tests))
            now = time.monotonic()
            for box in list(running):
                reason = _over(box, limits, now, len(programs[box.index].tests))
                if reason is not None:
                    running.remove(box)
                    slots.append(box.slot)
                    out[box.index] = _finish(box, len(programs[box.index].tests), reason)
    finally:
        for box in running:
            _end(box)
    return out


def _start(program: Program, index: int, slot: int, way: Isolation, limits: Limits) -> _Running:
    job = {
        "source": program.source,
        "function": program.function,
        "tests": [{"args": list(t.args)} if program.function else {"input": t.input} for t in program.tests],
        "seconds": limits.seconds,
        "memory": limits.memory_mb * MEGABYTE,
        "processes": limits.processes if way.bubblewrap else 0,  # outside, all processes of the user would count
        "files": limits.files_mb * MEGABYTE,
        "output": limits.output_kb * 1024,
        "timeouts": limits.timeouts,
        "isolated": bool(way.bubblewrap),
        "uid": way.user_of(slot),
        "packages": way.module_path(),
    }
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _end
    filter_fd = open_filter() if way.bubblewrap else -1
    # In memory and already complete: the sandbox can neither block the writer nor see a path.
    job_fd = os.memfd_create("job", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(job_fd), "wb") as writer:
            writer.write(json.dumps(job).encode())
        os.lseek(job_fd, 0, os.SEEK_SET)
        process = subprocess.Popen(
            way.command(limits, filter_fd),
            stdin=job_fd,
            stdout=subprocess.PIPE,
            stderr=stderr,
            pass_fds=[filter_fd] if filter_fd >= 0 else [],
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            cwd="/" if way.bubblewrap else tempfile.gettempdir(),
            start_new_session=True,
        )
    finally:
        for fd in (job_fd, filter_fd):
            if fd >= 0:
                os.close(fd)
    now = time.monotonic()
    return _Running(
        index=index,
        slot=slot,
        process=process,
        deadline=now + START_SECONDS,
        started=now,
        isolated=bool(way.bubblewrap),
        stderr=stderr,
    )


def _readable(running: list[_Running]) -> list[_Running]:
    with selectors.DefaultSelector() as selector:
        for box in running:
            assert box.process.stdout is not None
            selector.register(box.process.stdout, selectors.EVENT_READ, box)
        wait = min(min(box.deadline for box in running) - time.monotonic(), WATCH_SECONDS)
        return [key.data for key, _ in selector.select(max(wait, 0))]


def _receive(box: _Running, limits: Limits, tests: int) -> None:
    assert box.process.stdout is not None
    chunk = os.read(box.process.stdout.fileno(), 1 << 18)
    box.received += len(chunk)
    if not chunk or box.received > (tests + 1) * (
        limits.output_kb * 1024 * 6 + 8192
    ):  # JSON writes a byte as \u0000 at most
        box.deadline = 0.0
        return
    box.unread += chunk
    while b"\n" in chunk and b"\n" in box.unread:
        line, _, rest = box.unread.partition(b"\n")
        box.unread = bytearray(rest)
        # Every line is progress: the next test gets its whole time. What a program cannot do is make its tests last
        # longer.
        box.deadline = time.monotonic() + limits.seconds + GRACE_SECONDS
        if not box.ready:
            box.ready = True
        elif len(box.replies) < tests:
            box.replies.append(_result(bytes(line), limits))


def _result(line: bytes, limits: Limits) -> TestResult:
    try:
        said = json.loads(line)
        status, code = str(said["status"]), int(said.get("code", 0))
        out, result, error = (str(said.get(key, "")) for key in ("out", "result", "err"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return TestResult(status="lost", reason="the sandbox's reply could not be read")
    return TestResult(
        status=status, code=code, out=out, result=result, error=error, reason=_reason(status, code, error, limits)
    )


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


def _over(box: _Running, limits: Limits, now: float, tests: int) -> str | None:
    """Why this sandbox is done: "" when all its tests are, None when it goes on."""
    if len(box.replies) == tests and box.ready:
        return ""
    if box.deadline == 0.0:
        code = box.process.poll()
        return (
            "the sandbox was ended from inside"
            if box.ready
            else f"the sandbox did not start ({_said(box) or f'exit code {code}'})"
        )
    if box.deadline <= now:
        return (
            f"timed out after {limits.seconds:g} s, the sandbox not answering"
            if box.ready
            else "the sandbox did not start in time"
        )
    if (
        now - box.started > WATCH_SECONDS
        and resident_bytes(box.process.pid) > limits.memory_mb * MEGABYTE + _OWN_MEMORY
    ):
        return f"used more than {limits.memory_mb} MB of memory"
    # Ready means that bubblewrap has left the host's root, whose /tmp it would otherwise count.
    if box.isolated and box.ready and now - box.started > WATCH_SECONDS and _inodes(box.process.pid) > MAX_FILES:
        return f"made more than {MAX_FILES} files"
    return None


def _inodes(pid: int) -> int:
    """Files in the private /tmp: empty ones cost the kernel memory that no limit of size counts."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as text:
            found = os.statvfs(f"/proc/{text.read().split()[0]}/root/tmp")
        return found.f_files - found.f_ffree
    except (OSError, IndexError):
        return 0


def _said(box: _Running) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        box.process.wait(1)
    box.stderr.seek(0)
    return " ".join(box.stderr.read(2000).decode("utf-8", "replace").split())[:300]


def _finish(box: _Running, tests: int, reason: str) -> list[TestResult]:
    _end(box)
    status = "memory" if reason.startswith("used") else "timeout" if reason.startswith("timed") else "lost"
    return box.replies + [TestResult(status=status, reason=reason)] * (tests - len(box.replies))


def _end(box: _Running) -> None:
    """Kills bubblewrap; the namespace's init dies with it, and with that one every process inside."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(box.process.pid, signal.SIGKILL)
    box.process.wait()
    assert box.process.stdout is not None
    box.process.stdout.close()
    box.stderr.close()


def resident_bytes(pid: int) -> int:
    """Memory that a process and all its descendants hold and share with no file, in bytes."""
    total, open_pids = 0, [pid]
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
