"""What a component may say about when it does what; the run's timeline is behind it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Trace(Protocol):
    """Spans of one rank, from any of its threads; see `pipeline.run.timeline`."""

    def span(
        self, name: str, phase: str, iteration: int | None = None, least: float = 0.0, role: str = ""
    ) -> AbstractContextManager[Any]:
        """A context manager around what this thread does; spans nest. One shorter than `least` seconds is not written."""

    def waiting(self, name: str, iteration: int | None = None) -> AbstractContextManager[Any]:
        """A span of waiting for another lane or rank."""

    def write(self, name: str, phase: str, begin: float, end: float, track: str, **details: Any) -> None:
        """A span with times of `perf_counter`, on a track of its own."""

    def watch(self, name: str, probe: Callable[[], dict[str, float]]) -> None:
        """Samples numbers about once a second, as counter tracks; `probe` is called from another thread."""


class NoTrace:
    """The trace of a component outside a run: nothing is kept."""

    def span(
        self, name: str, phase: str, iteration: int | None = None, least: float = 0.0, role: str = ""
    ) -> AbstractContextManager[Any]:
        """Does nothing."""
        return nullcontext()

    def waiting(self, name: str, iteration: int | None = None) -> AbstractContextManager[Any]:
        """Does nothing."""
        return nullcontext()

    def write(self, name: str, phase: str, begin: float, end: float, track: str, **details: Any) -> None:
        """Does nothing."""

    def watch(self, name: str, probe: Callable[[], dict[str, float]]) -> None:
        """Does nothing."""


NO_TRACE = NoTrace()
