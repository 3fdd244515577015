"""The end of a run: signals, the last iteration that all lanes and ranks agree on, and the outcome."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Literal

from creditgraph.pipeline.core.trace import Trace
from creditgraph.pipeline.run.distributed.team import Team
from creditgraph.pipeline.run.values import Values

logger = logging.getLogger("creditgraph")

Status = Literal["finished", "interrupted", "preempted"]

EXIT_CODES: dict[Status, int] = {"finished": 0, "interrupted": 130, "preempted": 75}
SIGNALS: dict[int, Status] = {signal.SIGINT: "interrupted", signal.SIGTERM: "preempted", signal.SIGUSR1: "preempted"}

# In ascending order: ranks that received different signals agree on the largest.
_REASONS: tuple[Status | None, ...] = (None, "preempted", "interrupted")
_NEXT_STEP: dict[Status, str] = {
    "interrupted": "press Ctrl-C again to stop now",
    "preempted": "start the run again to continue",
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of `Executor.run`.

    Attributes:
        status: "finished", "interrupted" (Ctrl-C) or "preempted" (SIGTERM, SIGUSR1).
        completed: number of iterations that are done and checkpointed.
        final: metrics of the final evaluation pass, empty when there was none.
    """

    status: Status
    completed: int
    final: dict[str, float] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0, 130 (Ctrl-C) or 75 (preempted: start again to continue)."""
        return EXIT_CODES[self.status]


class Stops:
    """Decides after which iteration a run stops early.

    A signal is noted at once and acted on between iterations. With several ranks the main lanes compare notes once per
    iteration, because one rank must not wait in a collective that another has decided to leave out.
    """

    def __init__(self, iterations: int, values: Values, team: Team, trace: Trace) -> None:
        self._iterations = iterations
        self._values = values
        self._team = team
        self._trace = trace
        self._reason: Status | None = None
        self._last: int | None = None  # the last iteration to run, once decided
        self._agreeing = False
        self._begun: dict[str, int] = {}  # lane → newest iteration it has begun

    def iterations(self, lane: str, start: int, lead: int | None = None) -> Iterator[int]:
        """The iterations a lane still has to run.

        They end with the run, or after the last iteration that any lane had begun when a stop was requested.

        Args:
            lane: its name.
            start: first iteration of this attempt.
            lead: iterations that the lane may be ahead of the last completed one; None for the main lane.
        """
        for iteration in range(start, self._iterations):
            if lead is None:
                self._agree(start)
            else:
                self._values.wait_until(partial(self._may_begin, iteration - lead))
            with self._values.changed:
                while self._agreeing and self._last is None:
                    self._values.pause()
                self._values.check()
                if self._reason and self._last is None and self._team.ranks.world == 1:
                    self._decide(self._newest(start))
                if self._last is not None and iteration > self._last:
                    return
                self._begun[lane] = iteration
            yield iteration

    def agreed(self) -> Status | None:
        """The reason to stop that any rank has noted; all ranks call it."""
        return _REASONS[self._team.most(_REASONS.index(self._reason))]

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Inside, Ctrl-C, SIGTERM and SIGUSR1 end the run after the iteration; a second Ctrl-C ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._reason == "interrupted":
            raise KeyboardInterrupt
        self._reason = SIGNALS[number]
        name = signal.Signals(number).name
        logger.warning("%s: finishing this iteration and saving; %s.", name, _NEXT_STEP[self._reason])

    def _may_begin(self, floor: int) -> bool:
        return self._values.completed >= floor or self._last is not None

    def _newest(self, start: int) -> int:
        return max(self._begun.values(), default=start - 1)

    def _decide(self, last: int) -> None:
        self._last = last
        self._values.changed.notify_all()

    def _agree(self, start: int) -> None:
        """If any rank has a reason to stop, makes all stop after the same iteration; called once per iteration."""
        if self._team.ranks.world == 1 or self._last is not None:
            return
        with self._trace.waiting("other ranks"):
            reason = self.agreed()
        if reason is None:
            return
        with self._values.changed:
            self._reason = reason
            self._agreeing = True  # no lane begins another iteration
            begun = self._newest(start)
        last = self._team.most(begun)
        with self._values.changed:
            self._decide(last)
