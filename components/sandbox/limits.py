"""Resource limits of a program in the sandbox: the settings, and fixed limits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

MEGABYTE = 2**20
START_SECONDS = 30.0  # until the runner is ready, on a host that starts many sandboxes at once
GRACE_SECONDS = 1.0  # after a test's time limit, for the runner to end the test and say so
CLOCK_FACTOR = 10.0  # a test, and a program, on a busy host takes at most so many times its limit by the clock
WATCH_SECONDS = 0.05  # between two checks of a sandbox's time, memory and files
MAX_FILES = 10_000  # in the private /tmp: empty files cost the kernel memory that no limit of size counts
OPEN_FILES = 64  # descriptors of a process
MAX_DIGITS = 50_000  # of a number that is printed or read; the time of the conversion grows with their square
MAX_STACK = 64 * MEGABYTE  # enough for deep recursion; every thread reserves as much of the address space
RUNNER_MEMORY = 24 * MEGABYTE  # resident: the interpreter and the runner, which count against no program


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits per program.

    Seconds are those of all processes of the program on a processor, or those of the clock without the time in which it
    waited for a processor, whichever are more: neither a program that sleeps nor one that computes in many processes
    gets more, and other programs on the host cost it nothing.
    """

    seconds: float = 4.0
    """seconds of one test"""
    program_seconds: float = 60.0
    """seconds of all tests of a program together; the tests that are left then are not run and count as failed"""
    memory_mb: int = 512
    """address space of a process, and resident memory of all processes of a program together"""
    processes: int = 16
    """processes and threads at a time"""
    files_mb: int = 32
    """size of the private /tmp, and of one file"""
    output_kb: int = 1024
    """standard output plus standard error of one test; beyond it the test ends"""
    timeouts: int = 1
    """tests that may reach the time limit; after that many the program's other tests are not run and count as failed"""

    def __post_init__(self) -> None:
        low = [name for name, value in vars(self).items() if value <= 0]
        if low:
            raise ValueError(f"{', '.join(low)}: expected numbers > 0.")
        if self.memory_mb < 64:
            raise ValueError(f"expected memory_mb ≥ 64, which the interpreter itself needs, got {self.memory_mb}.")
        if self.processes < 4:
            raise ValueError(f"expected processes ≥ 4, which the sandbox itself needs, got {self.processes}.")

    def for_runner(self, isolated: bool) -> dict[str, Any]:
        """The limits in the format of the runner, in bytes and seconds."""
        memory = self.memory_mb * MEGABYTE
        return {
            "cpu_seconds": int(self.seconds) + 2,  # of one process, a backstop
            "memory": memory,
            "stack": min(MAX_STACK, memory // 4),
            "processes": self.processes if isolated else 0,  # outside, all processes of the user would count
            "files": self.files_mb * MEGABYTE,
            "open_files": OPEN_FILES,
            "output": self.output_kb * 1024,
            "digits": MAX_DIGITS,
        }

    def max_reply_bytes(self, tests: int) -> int:
        """Largest output of the runner for this many tests: JSON needs at most six bytes (\\u0000) per byte."""
        return (tests + 1) * (self.output_kb * 1024 * 6 + 8192)


def at_once(workers: int) -> int:
    """Processes at a time: as many as are set, or with 0 one per processor that this process may use, at most 8."""
    # macOS has no sched_getaffinity.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return workers or min(usable, 8)
