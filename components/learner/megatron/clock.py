"""How long a rank computes while micro-batches go through the pipeline; the rest of the time is its bubble."""

from __future__ import annotations

import time
from typing import Any

import torch

COMPUTE = ("forward-compute", "backward-compute")


class ComputeClock:
    """In place of the timers of megatron-core's schedules: adds up the forward and backward passes of this rank.

    On a GPU passes are measured by events of the stream, so waiting for another stage's tensors does not count.

    >>> clock = ComputeClock("cpu")
    >>> clock("forward-recv").start(); clock("forward-recv").stop(); clock.take()
    0.0
    """

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self._marks: list[tuple[Any, Any]] = []
        self._begin: Any = None

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        """The timer of that name: this clock for passes, nothing for others."""
        return self if name in COMPUTE else _NOTHING

    def start(self, barrier: bool = False) -> None:
        """A pass begins."""
        self._begin = self._now()

    def stop(self, barrier: bool = False) -> None:
        """A pass ends."""
        self._marks.append((self._begin, self._now()))

    def take(self) -> float:
        """Seconds of all passes since the last call; on a GPU it waits until they are done."""
        marks, self._marks = self._marks, []
        if not self._cuda:
            return float(sum(end - begin for begin, end in marks))
        torch.cuda.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in marks)) / 1000

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class _Nothing:
    def start(self, barrier: bool = False) -> None:
        """Does nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Does nothing."""


_NOTHING = _Nothing()
