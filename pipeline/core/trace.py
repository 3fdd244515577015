"""How a component reports when it does what; the run's timeline records it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Trace(Protocol):
    """Spans of one rank, from any of its threads; see `pipeline.run.timeline`."""

    def span(
        self,
        name: str,
        phase: str,
        iteration: int | None = None,
        least: float = 0.0,
        role: str = "",
        node: str = "",
    ) -> AbstractContextManager[Any]:
        """A context manager around what this thread does; spans nest.

        Args:
            name: shown in the timeline.
            phase: such as "generation" or "learning".
            iteration: by default that of the span around.
            least: seconds; a shorter span is not written.
            role: whose clock runs meanwhile, by default what the phase says.
            node: that this is part of, by default the name.
        """

    def waiting(self, name: str, iteration: int | None = None, node: str = "") -> AbstractContextManager[Any]:
        """A span of waiting for another lane or rank."""

    def write(self, name: str, phase: str, begin: float, end: float, track: str, **details: Any) -> None:
        """A span with times of `perf_counter`, on a track of its own."""

    def watch(self, name: str, probe: Callable[[], dict[str, float]]) -> None:
        """Samples numbers about once a second, as counter tracks; `probe` is called from another thread."""


class NoTrace:
    """The trace of a component outside a run: nothing is kept."""

    def span(
        self,
        name: str,
        phase: str,
        iteration: int | None = None,
        least: float = 0.0,
        role: str = "",
        node: str = "",
    ) -> AbstractContextManager[Any]:
        """Does nothing."""
        return nullcontext()

    def waiting(self, name: str, iteration: int | None = None, node: str = "") -> AbstractContextManager[Any]:
        """Does nothing."""
        return nullcontext()

    def write(self, name: str, phase: str, begin: float, end: float, track: str, **details: Any) -> None:
        """Does nothing."""

    def watch(self, name: str, probe: Callable[[], dict[str, float]]) -> None:
        """Does nothing."""


NO_TRACE = NoTrace()
