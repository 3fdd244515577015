"""When each rank did what: a trace for Perfetto, the share of time each role was busy, and a sign of life.

RUN/traces/rank-N.json is a JSON array of trace events (the format of chrome://tracing and ui.perfetto.dev), one a line
and without its closing bracket, so that it can be read while the run goes on and after a kill. Times are microseconds
since 1970 on rank 0's clock, so files of several ranks, and of later attempts, fit together. RUN/heartbeat.json
(heartbeat.N.json for rank N) says where a rank is now.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

logger = logging.getLogger("creditgraph")

# Kind of component → phase.
PHASES = {
    "prompts": "data",
    "sampler": "generation",
    "expander": "generation",
    "reviser": "generation",
    "localizer": "generation",
    "engine": "weight update",
    "verifier": "verification",
    "rewards": "verification",
    "segmenter": "credit",
    "value": "credit",
    "advantage": "credit",
    "buffer": "credit",
    "learner": "learning",
    "evaluator": "evaluation",
}
# Phase → role whose clock it moves. Sampling and scoring move the engine's clock wherever they are asked for, see
# `Engine`.
ROLES = {
    "weight update": "engine",
    "learning": "learner",
    "credit": "credit",
    "verification": "credit",
    "waiting": "waiting",
}
REPORTED = ("engine", "learner", "credit", "waiting")
BRIEF = 0.0005  # seconds; shorter waits are counted, but not written
WRITES = 16.0  # heartbeats a second that all ranks together write
HEADER = "[\n"


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """The timeline of a run."""

    enabled: bool = True
    """write traces/rank-N.json, for ui.perfetto.dev and the timeline of `creditgraph report`"""
    megabytes: float = 64.0
    """of each rank's trace on disk; when half is full, it becomes rank-N.earlier.json, in place of what that held"""

    def __post_init__(self) -> None:
        if self.megabytes <= 0:
            raise ValueError(f"megabytes {self.megabytes}: wanted more than 0; set enabled: false for no trace.")


class Agreement(Protocol):
    """What is needed of a team of ranks."""

    def barrier(self) -> None:
        """Waits for all ranks."""

    def from_first(self, value: Any) -> Any:
        """Rank 0's value."""


def phase_of(use: str, placement: str = "replica") -> str:
    """The phase of a node.

    >>> phase_of("sampler.failures"), phase_of("my.package:Idea"), phase_of("my.package:Trainer", "collective")
    ('generation', 'other', 'learning')
    """
    kind = use.partition(".")[0] if ":" not in use else ""
    return PHASES.get(kind, "learning" if placement == "collective" else "other")


def clock_offset(team: Agreement, rounds: int = 5) -> float:
    """Seconds to add to this host's clock to have rank 0's, as exact as ranks leave a barrier together. All ranks call it."""
    mine = []
    for _ in range(rounds):
        team.barrier()
        mine.append(time.time())
    theirs: list[float] = team.from_first(mine)
    return statistics.median(t - m for t, m in zip(theirs, mine, strict=True))


class Timeline:
    """Spans of one rank, from any of its threads. Without a folder nothing is written, but the clocks of roles go.

    Args:
        path: of the run directory, or None.
        settings: of the trace.
        rank, world: of this process.
    """

    def __init__(
        self, path: Path | None = None, settings: TraceSettings | None = None, rank: int = 0, world: int = 1
    ) -> None:
        self.rank, self.attempt = rank, 1
        self._path, self._settings = path, settings or TraceSettings()
        self._world = world
        self._lock = threading.Lock()
        self._open: dict[str, list[Span]] = {}  # track → spans that run, outermost first
        self._tracks: dict[str, int] = {}
        self._lines: list[str] = []
        self._probes: dict[str, Callable[[], dict[str, float]]] = {}
        self._busy = {role: Clock() for role in REPORTED}
        self._mark = time.perf_counter()
        self._base = time.time_ns() / 1e9 - time.perf_counter()  # seconds: wall clock less perf_counter
        self._file = -1
        self._size = 0
        self._told: tuple[Any, ...] = ()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, team: Agreement) -> None:
        """Finds the attempt's number and the clocks' difference (all ranks together), and begins to write."""
        if self._thread is not None:
            return
        before = read_heartbeat(self._path / name_of(0)) if self._path and self.rank == 0 else None
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

    def span(self, name: str, phase: str, iteration: int | None = None, least: float = 0.0, role: str = "") -> Span:
        """A context manager around what this thread does; spans nest. One shorter than `least` seconds is not written."""
        return Span(self, name, phase, iteration, least, role or ROLES.get(phase, ""))

    def waiting(self, name: str, iteration: int | None = None) -> Span:
        """A span of waiting for another lane or rank."""
        return self.span(name, "waiting", iteration, BRIEF)

    def write(self, name: str, phase: str, begin: float, end: float, track: str, **details: Any) -> None:
        """A span with times of `perf_counter`, on a track of its own."""
        if self._file >= 0:
            with self._lock:
                self._event(name, phase, begin, end, track, details)

    def watch(self, name: str, probe: Callable[[], dict[str, float]]) -> None:
        """Samples numbers about once a second, as counter tracks; `probe` is called from the timeline's thread."""
        self._probes[name] = probe

    def shares(self) -> dict[str, float]:
        """Role → share of the time since the last call in which it was busy on this rank, 0 to 1."""
        with self._lock:
            now = time.perf_counter()
            passed, self._mark = max(now - self._mark, 1e-9), now
            return {role: min(1.0, clock.take(now) / passed) for role, clock in self._busy.items()}

    def close(self) -> None:
        """Writes what is left; the heartbeat says that the rank has ended."""
        if self._thread is None:
            return
        self._done.set()
        self._thread.join()
        self._thread = None
        self._guarded(self._flush)
        self._beat("ended")
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def enter(self, span: Span) -> None:
        """Called by a span."""
        thread = threading.current_thread()
        span.track = "main" if thread is threading.main_thread() else thread.name
        with self._lock:
            around = self._open.setdefault(span.track, [])
            if span.iteration is None and around:
                span.iteration = around[-1].iteration
            around.append(span)
            # A lane that runs ahead may wait; what counts is the main lane, or the only one.
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
            if self._file >= 0 and end - span.begin >= span.least:
                details = {"role": span.role} if span.role else {}
                self._event(
                    span.name, span.phase, span.begin, end, span.track, {"iteration": span.iteration, **details}
                )

    # Writing; all under the lock

    def _event(self, name: str, phase: str, begin: float, end: float, track: str, details: dict[str, Any]) -> None:
        first, last = round((begin + self._base) * 1e6), round((end + self._base) * 1e6)
        args = {k: v for k, v in details.items() if v is not None}
        self._line(
            name=name,
            cat=phase,
            ph="X",
            ts=first,
            dur=last - first,
            tid=self._tid(track),
            args={**args, "attempt": self.attempt},
        )

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
        folder = self._path / "traces"
        folder.mkdir(exist_ok=True)
        file = folder / f"rank-{self.rank}.json"
        size = cut_torn_line(file)
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = size
        lines, self._lines = self._lines, []
        self._line(
            name="process_name", ph="M", ts=0, tid=0, args={"name": f"rank {self.rank} ({socket.gethostname()})"}
        )
        self._line(name="process_sort_index", ph="M", ts=0, tid=0, args={"sort_index": self.rank})
        now = round((time.perf_counter() + self._base) * 1e6)
        self._line(
            name=f"attempt {self.attempt}",
            ph="i",
            s="p",
            ts=now,
            tid=0,
            args={"attempt": self.attempt, "pid": os.getpid()},
        )
        for track in self._tracks:
            self._name_track(track)
        self._lines += lines

    def _flush(self) -> None:
        with self._lock:
            if self._file < 0 or not self._lines:
                return
            if self._size > self._settings.megabytes * 5e5:
                assert self._path is not None
                os.close(self._file)
                file = self._path / "traces" / f"rank-{self.rank}.json"
                os.replace(file, file.with_suffix(".earlier.json"))
                self._begin_file()
            lines, self._lines = self._lines, []
            data = ((",\n" if self._size else HEADER) + ",\n".join(lines)).encode()
        self._size += os.write(self._file, data)

    def _guarded(self, action: Callable[[], None]) -> None:
        """A trace that cannot be written ends, and the run goes on."""
        try:
            action()
        except OSError as error:
            logger.warning(
                "traces/rank-%d.json cannot be written (%s); the run goes on without it.", self.rank, error.strerror
            )
            self._file = -1
            self._lines.clear()

    # The thread

    def _work(self) -> None:
        # Ranks of a large run share the folder: each waits a little longer.
        pause = max(1.0, self._world / WRITES)
        while not self._done.wait(pause):
            self._sample()
            self._guarded(self._flush)
            self._beat("running")

    def _sample(self) -> None:
        for name, probe in list(self._probes.items()):
            try:
                values = probe()
            except Exception as error:
                del self._probes[name]
                logger.warning("trace: the numbers of '%s' cannot be read any more (%s).", name, error)
                continue
            if self._file < 0:
                continue
            with self._lock:
                now = round((time.perf_counter() + self._base) * 1e6)
                for key, value in values.items():
                    self._line(name=f"{name}: {key}", ph="C", ts=now, tid=0, args={"value": value})

    def _beat(self, state: str) -> None:
        assert self._path is not None
        with self._lock:
            tops = [(track, spans[0], spans[-1]) for track, spans in self._open.items() if spans]
            lanes = {
                track: {
                    "node": outer.name.removeprefix("inputs of ").removeprefix("rows of "),
                    "phase": inner.phase,
                    "iteration": outer.iteration,
                    "since": round(outer.begin + self._base, 3),
                    "inside": "" if inner is outer else inner.name,
                }
                for track, outer, inner in tops
                if track in ("main", "generation")
            }
        note = {
            "rank": self.rank,
            "world": self._world,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "attempt": self.attempt,
        }
        note |= {"state": state, "time": round(time.perf_counter() + self._base, 3), "lanes": lanes}
        file = self._path / name_of(self.rank)
        aside = file.with_name(f".tmp-{file.name}")
        try:
            aside.write_text(json.dumps(note), encoding="utf-8")
            os.replace(aside, file)
        except OSError as error:
            if self._told != (error.errno,):
                self._told = (error.errno,)
                logger.warning("%s cannot be written (%s).", file, error.strerror)


class Span:
    """Something that a thread does; see `Timeline.span`."""

    __slots__ = ("begin", "iteration", "least", "name", "phase", "role", "timeline", "track")

    def __init__(
        self, timeline: Timeline, name: str, phase: str, iteration: int | None, least: float, role: str
    ) -> None:
        self.timeline, self.name, self.phase, self.iteration, self.least, self.role = (
            timeline,
            name,
            phase,
            iteration,
            least,
            role,
        )
        self.begin, self.track = 0.0, ""

    def __enter__(self) -> Self:
        self.timeline.enter(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.timeline.leave(self)


class Clock:
    """Seconds in which at least one of several overlapping spans ran.

    >>> clock = Clock()
    >>> clock.enter(1.0); clock.enter(2.0); clock.leave(3.0); clock.take(4.0), clock.take(4.5)
    (3.0, 0.5)
    """

    def __init__(self) -> None:
        self._open, self._since, self._spent = 0, 0.0, 0.0

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
        """The seconds since the last call; a span that still runs counts up to now."""
        spent, self._spent = self._spent, 0.0
        if self._open:
            spent += now - self._since
            self._since = now
        return spent


def name_of(rank: int) -> str:
    """A rank's heartbeat file."""
    return "heartbeat.json" if rank == 0 else f"heartbeat.{rank}.json"


def read_heartbeat(file: Path) -> dict[str, Any] | None:
    """A heartbeat; None when there is none that can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def heartbeats(run: Path) -> list[dict[str, Any]]:
    """Those of all ranks of the newest attempt, by rank."""
    found = [b for f in run.glob("heartbeat*.json") if (b := read_heartbeat(f)) is not None]
    newest = max((int(b.get("attempt", 0)) for b in found), default=0)
    world = max((int(b.get("world", 1)) for b in found if b.get("attempt") == newest), default=1)
    return sorted(
        (b for b in found if b.get("attempt") == newest and b.get("rank", 0) < world), key=lambda b: int(b["rank"])
    )


def where(run: Path, now: float | None = None) -> str:
    """One sentence on where the ranks are, the furthest behind first; "" without a heartbeat, and when all have ended.

    A rank is silent when its heartbeat is older than ten times what it should be.
    """
    now = time.time() if now is None else now
    silent, places = [], dict[tuple[Any, ...], list[tuple[int, float]]]()
    beats = heartbeats(run)
    if all(b.get("state") == "ended" for b in beats):
        return ""
    for beat in beats:
        rank, age = int(beat["rank"]), now - float(beat["time"])
        if beat.get("state") == "ended":
            places.setdefault((1 << 30, "ended", ""), []).append((rank, age))
        elif age > 10 * max(1.0, beat.get("world", 1) / WRITES):
            silent.append(f"rank {rank} ({beat.get('host')}) silent since {age:.0f} s")
        for track, lane in beat.get("lanes", {}).items() if beat.get("state") != "ended" else ():
            number = -1 if lane.get("iteration") is None else int(lane["iteration"])
            # Who waits is where the others will come to, so the one who does not is the one waited for.
            name = f"waiting in {lane['node']}" if lane.get("phase") == "waiting" else f"in {lane['node']}"
            key = (number, name, "" if track == "main" else f" ({track})")
            places.setdefault(key, []).append((rank, now - float(lane["since"])))
    many = len(beats) > 1
    told = []
    for (number, name, track), found in sorted(
        places.items(), key=lambda p: (p[0][0], p[0][1].startswith("waiting"), p[0][1])
    ):
        ranks = f"{_ranges([r for r, _ in found])} " if many else ""
        since = max(s for _, s in found)
        told.append(
            f"{ranks}{name}{f' of iteration {number}' if 0 <= number < 1 << 30 else ''}{track} since {since:.0f} s"
        )
    return "; ".join(silent + told)


def _ranges(ranks: Iterable[int]) -> str:
    """ "ranks 0-3, 5" """
    parts: list[list[int]] = []
    for r in sorted(ranks):
        if parts and r == parts[-1][-1] + 1:
            parts[-1][1:] = [r]
        else:
            parts.append([r])
    text = ", ".join("-".join(map(str, p)) for p in parts)
    return f"rank{'s' if len(parts) > 1 or len(parts[0]) > 1 else ''} {text}"


def cut_torn_line(file: Path) -> int:
    """Cuts a last line that a kill left unfinished; returns the file's size, 0 for none."""
    if not file.exists():
        return 0
    with file.open("r+b") as handle:
        size = handle.seek(0, os.SEEK_END)
        begin = max(0, size - (1 << 16))
        handle.seek(begin)
        tail = handle.read()
        while tail:
            line = tail.rpartition(b"\n")[2]
            try:
                json.loads(line.rstrip(b","))
                break
            except ValueError:
                tail = tail[: -len(line)].rstrip(b",\n") if line else tail.rstrip(b",\n")
                if tail in (b"", b"["):
                    tail = b""
        kept = begin + len(tail) if tail else 0
        handle.truncate(kept)
    return kept


def read_trace(file: Path) -> tuple[list[dict[str, Any]], int]:
    """The events of a trace that may still grow, and the number of lines that cannot be read (one, after a kill)."""
    events, bad = [], 0
    with file.open("rb") as handle:
        for line in handle:
            text = line.strip().rstrip(b",")
            if text in (b"[", b"]", b""):
                continue
            try:
                event = json.loads(text)
            except ValueError:
                bad += 1
                continue
            if isinstance(event, dict):
                events.append(event)
            else:
                bad += 1
    return events, bad


def trace_files(run: Path) -> list[Path]:
    """The trace files of a run, by rank, earlier parts first."""

    def key(file: Path) -> tuple[int, bool]:
        number = file.name.removeprefix("rank-").partition(".")[0]
        return (int(number) if number.isdigit() else 1 << 30, ".earlier" not in file.name)

    return sorted((run / "traces").glob("rank-*.json"), key=key)
