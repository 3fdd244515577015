"""The display of a run's progress: one line per iteration; a terminal has a bar below them."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO

from creditgraph.pipeline.app.signal_watch import SignalWatch
from creditgraph.pipeline.run.run_settings import Observer

# Metrics that are shown and summed up; one that a run does not log is left out.
REWARD = "rewards/mean"  # of the iteration
ACCURACY = "evaluator/accuracy"  # held out
SAMPLED_TOKENS = "engine/sampled_tokens"  # of the iteration
TRAINED_TOKENS = "learner/trained_tokens"  # in the loss of the iteration
STEPS = "learner/steps"  # optimiser steps of the iteration


class Progress(Observer):
    """An observer of the executor. Use as a context manager around `run`.

    Args:
        total: planned iterations.
        start: iterations already done, for a resumed run.
        stream: where to write; a terminal gets a bar below the lines.
        watch: warns of iterations that train nothing.
    """

    def __init__(
        self, total: int, start: int = 0, stream: TextIO | None = None, watch: SignalWatch | None = None
    ) -> None:
        self.total = total
        self.done = start
        self._stream = stream or sys.stderr
        self._watch = watch
        self._begin = time.perf_counter()
        self._first = start
        self._phase = "starting"
        self._live: Any = None

    def __enter__(self) -> Self:
        self._begin = time.perf_counter()
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream)
            self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def node_started(self, node: str, iteration: int) -> None:
        """Shows the running node."""
        self._phase = node

    def iteration_done(self, iteration: int, metrics: dict[str, float]) -> None:
        """Writes the line of an iteration; the final pass has the number of iterations as its index."""
        self.done = min(iteration + 1, self.total)
        line = self._line(metrics)
        if iteration >= self.total:
            self._write(f"final evaluation  {line}")
            return
        width = len(str(self.total))
        done = f"({self.done:>{width}}/{self.total})"
        self._write(f"iteration {iteration:>{width}} {done}  {line}  eta {self._eta()}")
        warning = self._watch.add({"iteration": iteration, **metrics}) if self._watch else ""
        for sentence in warning.splitlines():
            self._write(f"WARNING {sentence}")

    def _write(self, line: str) -> None:
        """A line on the stream; in a terminal above the bar, which stays the last line."""
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def _line(self, metrics: dict[str, float]) -> str:
        return "  ".join(f"{label} {text}" for label, text in self._fields(metrics)) or "done"

    def _fields(self, metrics: dict[str, float]) -> list[tuple[str, str]]:
        fields = []
        if REWARD in metrics:
            fields.append(("reward", f"{metrics[REWARD]:.3f}"))
        if ACCURACY in metrics:
            fields.append(("accuracy", f"{metrics[ACCURACY]:.3f}"))
        seconds = metrics.get("seconds/iteration", math.nan)
        if SAMPLED_TOKENS in metrics and seconds > 0:
            fields.append(("tokens/s", f"{metrics[SAMPLED_TOKENS] / seconds:,.0f}"))
        if not math.isnan(seconds):
            fields.append(("seconds", f"{seconds:.2f}"))
        return fields

    def _eta(self) -> str:
        # Iterations of an earlier start do not count for the speed of this one.
        ran = self.done - self._first
        if ran <= 0:
            return "-"
        return duration((time.perf_counter() - self._begin) / ran * (self.total - self.done))

    def _render(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            f"{self.done}/{self.total} done",
            ProgressBar(total=max(self.total, 1), completed=self.done, width=30),
            f"eta {self._eta()}",
            self._phase,
        )
        return bar


def duration(seconds: float) -> str:
    """Seconds for a reader.

    >>> duration(5.2), duration(65), duration(7300)
    ('5s', '1m05s', '2h01m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
