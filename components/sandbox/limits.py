"""What a program in the sandbox may spend."""

from __future__ import annotations

from dataclasses import dataclass

MEGABYTE = 2**20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Per program; the time is per test."""

    seconds: float = 4.0
    """wall-clock seconds of one test"""
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
            raise ValueError(f"{', '.join(low)} must be above 0.")
        if self.memory_mb < 64:
            raise ValueError(
                f"memory_mb: found {self.memory_mb}; wanted at least 64, for the interpreter itself needs some."
            )
        if self.processes < 4:
            raise ValueError(
                f"processes: found {self.processes}; wanted at least 4, for the sandbox itself needs some."
            )
