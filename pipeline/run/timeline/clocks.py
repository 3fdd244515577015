"""Busy time of overlapping spans, and the clock offset between hosts."""

import statistics
import time
from typing import Any, Protocol


class Agreement(Protocol):
    """The methods of a team of ranks that the timeline needs."""

    def barrier(self) -> None:
        """Waits for all ranks."""

    def from_first(self, value: Any) -> Any:
        """Rank 0's value."""


def clock_offset(team: Agreement, rounds: int = 5) -> float:
    """Returns the seconds to add to this host's clock to get rank 0's; all ranks call it.

    Its error is the time between the first and the last rank leaving a barrier.
    """
    mine = []
    for _ in range(rounds):
        team.barrier()
        mine.append(time.time())
    theirs: list[float] = team.from_first(mine)
    return statistics.median(t - m for t, m in zip(theirs, mine, strict=True))


class Clock:
    """Seconds in which at least one of several overlapping spans ran.

    >>> clock = Clock()
    >>> clock.enter(1.0); clock.enter(2.0); clock.leave(3.0); clock.take(4.0), clock.take(4.5)
    (3.0, 0.5)
    """

    def __init__(self) -> None:
        self._open = 0
        self._since = 0.0
        self._spent = 0.0

    def enter(self, now: float) -> None:
        """A span begins."""
        if not self._open:
            self._since = now
        self._open += 1

    def leave(self, now: float) -> None:
        """A span ends."""
        self._open -= 1
        if not self._open:
            self._spent += now - self._since

    def take(self, now: float) -> float:
        """Returns the busy seconds since the last call; a span that still runs counts up to now."""
        spent = self._spent
        self._spent = 0.0
        if self._open:
            spent += now - self._since
            self._since = now
        return spent
