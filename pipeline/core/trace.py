"""How a component reports when it does what; the run's timeline records it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Trace:
    """Spans of one rank, from any of its threads. This one, of a component outside a run, keeps nothing."""

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
        return nullcontext()

    def waiting(self, name: str, iteration: int | None = None, node: str = "") -> AbstractContextManager[Any]:
        """A span of waiting for another lane or rank."""
        return nullcontext()

    def write(self, name: str, phase: str, begin: float, end: float, track: str, **details: Any) -> None:
        """A span with times of `perf_counter`, on a track of its own."""

    def watch(self, name: str, probe: Callable[[], dict[str, float]]) -> None:
        """Samples numbers about once a second, as counter tracks; `probe` is called from another thread."""


NO_TRACE = Trace()
