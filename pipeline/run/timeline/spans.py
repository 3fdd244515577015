"""The timeline of a rank: spans for Perfetto, the share of time in which each role was busy, and a heartbeat.

Times are microseconds since 1970 on rank 0's clock, so the files of several ranks, and of later attempts, fit together.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from creditgraph.pipeline.core.handles import Policy, Verifier
from creditgraph.pipeline.core.payloads import (
    Credit,
    Prompts,
    Rewards,
    Segments,
    SegmentValues,
    StepErrors,
    TrainReport,
    Trajectories,
)
from creditgraph.pipeline.core.sockets import Node
from creditgraph.pipeline.core.trace import Trace
from creditgraph.pipeline.run.timeline.clocks import Agreement, Clock, clock_offset
from creditgraph.pipeline.run.timeline.files import TraceFile
from creditgraph.pipeline.run.timeline.heartbeat import heartbeat_name, heartbeat_pause, read_heartbeat

logger = logging.getLogger("creditgraph")

# Phase → role whose clock it advances. Sampling and scoring advance the engine's clock wherever requested, see
# `Engine`.
_ROLES = {
    "weight update": "engine",
    "learning": "learner",
    "credit": "credit",
    "verification": "credit",
    "waiting": "waiting",
}
REPORTED = ("engine", "learner", "credit", "waiting")
BRIEF = 0.0005  # seconds; shorter waits are counted, but not written


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """The timeline of a run."""

    enabled: bool = True
    """write traces/rank-N.json, for ui.perfetto.dev and the timeline of `creditgraph report`"""
    megabytes: float = 64.0
    """largest size of each rank's trace on disk; at half of it, the file is renamed to rank-N.earlier.json"""

    def __post_init__(self) -> None:
        if self.megabytes <= 0:
            raise ValueError(f"megabytes: expected more than 0, got {self.megabytes}; set enabled: false for no trace.")


def phase_of(node: Node) -> str:
    """Returns the phase of a node, determined by its outputs, so that a user's own component has a phase too."""
    if node.placement == "collective":
        return "learning"
    if node.outputs_of(Policy):
        return "weight update"
    samples = any(socket.carries(Policy) for socket in node.sockets.inputs.values())
    if samples and node.outputs_of(Trajectories | StepErrors):
        return "generation"
    if node.outputs_of(Verifier | Rewards):
        return "verification"
    if node.outputs_of(Segments | SegmentValues | Credit | Trajectories | StepErrors):
        return "credit"
    if node.outputs_of(Prompts):
        return "data"
    return "evaluation" if node.outputs_of(TrainReport) else "other"


class Timeline(Trace):
    """Spans of one rank, from any of its threads. Without a folder nothing is written, but the clocks of roles run.

    Args:
        path: path of the run directory, or None.
        settings: settings of the trace.
        rank, world: rank of this process, and number of processes.
    """

    def __init__(
        self, path: Path | None = None, settings: TraceSettings | None = None, rank: int = 0, world: int = 1
    ) -> None:
        self.rank = rank
        self.attempt = 1
        self._world = world
        self._path = path
        self._settings = settings or TraceSettings()
        self._lock = threading.Lock()
        self._open: dict[str, list[Span]] = {}  # track → spans that run, outermost first
        self._tracks: dict[str, int] = {}
        self._lines: list[str] = []
        self._probes: dict[str, Callable[[], dict[str, float]]] = {}
        self._busy = {role: Clock() for role in REPORTED}
        self._mark = time.perf_counter()
        self._base = time.time_ns() / 1e9 - time.perf_counter()  # seconds: wall clock minus perf_counter
        self._file: TraceFile | None = None
        self._reported: int | None = None  # errno of the last heartbeat that could not be written
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, team: Agreement) -> None:
        """Determines the attempt's number and the clock offset (all ranks call it), and begins to write."""
        if self._thread is not None:
            return
        before = read_heartbeat(self._path / heartbeat_name(0)) if self._path and self.rank == 0 else None
        self.attempt = int((before or {}).get("attempt", 0)) + 1
        if self._world > 1:
            self.attempt = team.from_first(self.attempt)
            self._base += clock_offset(team)
        if self._path is None:
            return
        if self._settings.enabled:
            self._guarded(self._begin_file)
        self._beat("running")
        self._thread = threading.Thread(target=self._work, name="timeline", daemon=True)
        self._thread.start()

    def span(
        self,
        name: str,
        phase: str,
        iteration: int | None = None,
        least: float = 0.0,
        role: str = "",
        node: str = "",
    ) -> Span:
        """See `Trace.span`."""
        return Span(self, name, phase, iteration, least, role or _ROLES.get(phase, ""), node or name)

    def waiting(self, name: str, iteration: int | None = None, node: str = "") -> Span:
        """A span of waiting for another lane or rank."""
        return self.span(name, "waiting", iteration, BRIEF, node=node)

    def write(self, name: str, phase: str, begin: float, end: float, track: str, **details: Any) -> None:
        """Writes a span with times of `perf_counter`, on a separate track."""
        if self._file:
            with self._lock:
                self._event(name, phase, begin, end, track, details)

    def watch(self, name: str, probe: Callable[[], dict[str, float]]) -> None:
        """Samples numbers about once a second, as counter tracks; `probe` is called from the timeline's thread."""
        self._probes[name] = probe

    def shares(self) -> dict[str, float]:
        """Returns role → share of the time since the last call in which it was busy on this rank, 0 to 1."""
        with self._lock:
            now = time.perf_counter()
            passed = max(now - self._mark, 1e-9)
            self._mark = now
            return {role: min(1.0, clock.take(now) / passed) for role, clock in self._busy.items()}

    def close(self) -> None:
        """Writes the remaining events, and a heartbeat that reports the end of the rank."""
        if self._thread is None:
            return
        self._done.set()
        self._thread.join()
        self._thread = None
        self._guarded(self._flush)
        self._beat("ended")
        if self._file:
            self._file.close()
            self._file = None

    def enter(self, span: Span) -> None:
        """Called by a span."""
        thread = threading.current_thread()
        span.track = "main" if thread is threading.main_thread() else thread.name
        with self._lock:
            around = self._open.setdefault(span.track, [])
            if span.iteration is None and around:
                span.iteration = around[-1].iteration
            around.append(span)
            # Waiting costs nothing in a lane that runs ahead, so only that of the main lane, or the only lane, counts.
            if span.role == "waiting" and span.track == "generation":
                span.role = ""
            span.begin = time.perf_counter()
            if span.role in self._busy:
                self._busy[span.role].enter(span.begin)

    def leave(self, span: Span) -> None:
        """Called by a span."""
        with self._lock:
            end = time.perf_counter()
            self._open[span.track].remove(span)
            if span.role in self._busy:
                self._busy[span.role].leave(end)
            if self._file and end - span.begin >= span.least:
                details = {"iteration": span.iteration} | ({"role": span.role} if span.role else {})
                self._event(span.name, span.phase, span.begin, end, span.track, details)

    # Writing; all under the lock

    def _event(self, name: str, phase: str, begin: float, end: float, track: str, details: dict[str, Any]) -> None:
        first = self._microseconds(begin)
        args = {k: v for k, v in details.items() if v is not None} | {"attempt": self.attempt}
        duration = self._microseconds(end) - first
        self._line(name=name, cat=phase, ph="X", ts=first, dur=duration, tid=self._tid(track), args=args)

    def _microseconds(self, moment: float) -> int:
        return round((moment + self._base) * 1e6)

    def _line(self, **event: Any) -> None:
        self._lines.append(json.dumps({**event, "pid": self.rank}, separators=(",", ":")))

    def _tid(self, track: str) -> int:
        if track not in self._tracks:
            self._tracks[track] = len(self._tracks) + 1
            self._name_track(track)
        return self._tracks[track]

    def _name_track(self, track: str) -> None:
        tid = self._tracks[track]
        self._line(name="thread_name", ph="M", ts=0, tid=tid, args={"name": track})
        self._line(name="thread_sort_index", ph="M", ts=0, tid=tid, args={"sort_index": tid})

    def _begin_file(self) -> None:
        assert self._path is not None
        if self._file:
            self._file.start_over()
        else:
            self._file = TraceFile(self._path, self.rank, self._settings.megabytes)
        lines = self._lines
        self._lines = []
        host = socket.gethostname()
        self._line(name="process_name", ph="M", ts=0, tid=0, args={"name": f"rank {self.rank} ({host})"})
        self._line(name="process_sort_index", ph="M", ts=0, tid=0, args={"sort_index": self.rank})
        now = self._microseconds(time.perf_counter())
        about = {"attempt": self.attempt, "pid": os.getpid()}
        self._line(name=f"attempt {self.attempt}", ph="i", s="p", ts=now, tid=0, args=about)
        for track in self._tracks:
            self._name_track(track)
        self._lines += lines

    def _flush(self) -> None:
        with self._lock:
            if not self._file or not self._lines:
                return
            if self._file.is_full:
                self._begin_file()
            lines = self._lines
            self._lines = []
        self._file.append(lines)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Ends a trace that cannot be written; the run continues."""
        try:
            action()
        except OSError as error:
            logger.warning(
                "traces/rank-%d.json cannot be written (%s); the run continues without it.", self.rank, error.strerror
            )
            self._file = None
            self._lines.clear()

    # The thread

    def _work(self) -> None:
        while not self._done.wait(heartbeat_pause(self._world)):
            self._sample()
            self._guarded(self._flush)
            self._beat("running")

    def _sample(self) -> None:
        for name, probe in list(self._probes.items()):
            try:
                values = probe()
            except Exception as error:
                # Counters are optional: one that fails is removed, and the run continues.
                del self._probes[name]
                logger.warning("trace: the counters of '%s' cannot be read any more (%s).", name, error)
                continue
            if self._file:
                with self._lock:
                    now = self._microseconds(time.perf_counter())
                    for key, value in values.items():
                        self._line(name=f"{name}: {key}", ph="C", ts=now, tid=0, args={"value": value})

    def _beat(self, state: str) -> None:
        assert self._path is not None
        note = {
            "rank": self.rank,
            "world": self._world,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "attempt": self.attempt,
            "state": state,
            "time": round(time.perf_counter() + self._base, 3),
            "lanes": self._lanes_now(),
        }
        file = self._path / heartbeat_name(self.rank)
        aside = file.with_name(f".tmp-{file.name}")
        try:
            aside.write_text(json.dumps(note), encoding="utf-8")
            os.replace(aside, file)
        except OSError as error:
            if self._reported != error.errno:
                self._reported = error.errno
                logger.warning("%s cannot be written (%s).", file, error.strerror)

    def _lanes_now(self) -> dict[str, dict[str, Any]]:
        with self._lock:
            running = [
                (track, spans[0], spans[-1])
                for track, spans in self._open.items()
                if spans and track in ("main", "generation")
            ]
            return {
                track: {
                    "node": outer.node,
                    "phase": inner.phase,
                    "iteration": outer.iteration,
                    "since": round(outer.begin + self._base, 3),
                    "inside": "" if inner is outer else inner.name,
                }
                for track, outer, inner in running
            }


@dataclass(slots=True, eq=False)
class Span:
    """An activity of a thread; see `Timeline.span`."""

    timeline: Timeline
    name: str
    phase: str
    iteration: int | None
    least: float
    role: str
    node: str
    begin: float = 0.0
    track: str = ""

    def __enter__(self) -> Self:
        self.timeline.enter(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.timeline.leave(self)
