"""The interface through which components report spans of time to the run's timeline."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Trace:
    """Spans of one rank, from any of its threads. This base class, used outside a run, records nothing."""

    def span(
        self,
        name: str,
        phase: str,
        iteration: int | None = None,
        least: float = 0.0,
        role: str = "",
        node: str = "",
    ) -> AbstractContextManager[Any]:
        """Returns a context manager that records a span of this thread; spans nest.

        Args:
            name: name shown in the timeline.
            phase: phase, such as "generation" or "learning".
            iteration: iteration; by default that of the enclosing span.
            least: least duration in seconds; a shorter span is not written.
            role: role whose clock runs meanwhile; by default that of the phase.
            node: node to which the span belongs; by default the name.
        """
        return nullcontext()

    def waiting(self, name: str, iteration: int | None = None, node: str = "") -> AbstractContextManager[Any]:
        """A span of waiting for another lane or rank."""
        return nullcontext()

    def write(self, name: str, phase: str, begin: float, end: float, track: str, **details: Any) -> None:
        """Writes a span with times of `perf_counter`, on a separate track."""

    def watch(self, name: str, probe: Callable[[], dict[str, float]]) -> None:
        """Samples numbers about once a second, as counter tracks; `probe` is called from another thread."""


NO_TRACE = Trace()
