"""The timeline of a run: spans of some iterations for the page, and all of them in one file for Perfetto."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditgraph.pipeline.app.report.source import RunSource, spread
from creditgraph.pipeline.run.run_directory import writing
from creditgraph.pipeline.run.timeline.files import read_trace, trace_files

MOST_SPANS = 12_000  # of a page
MOST_RANKS = 16  # that are read
START = -1  # the number of the time before the first iteration of an attempt

Window = tuple[float, float]


@dataclass
class Track:
    """Events of one thread of one rank."""

    name: str
    spans: list[dict[str, Any]]


def load_tracks(run: RunSource) -> list[Track]:
    """All tracks of all ranks, by rank; notes what cannot be read."""
    spans: dict[tuple[int, int, str], list[dict[str, Any]]] = defaultdict(list)
    for file in _files(run):
        try:
            events, bad = read_trace(file)
        except OSError as error:
            run.note(f"traces/{file.name} cannot be read ({error.strerror}); its rank is not in the timeline")
            continue
        if bad:
            run.note(
                f"traces/{file.name}: {bad} line{'s' if bad > 1 else ''} cannot be read (cut off by a kill?) and left "
                "out"
            )
        names: dict[int, str] = {}
        odd = 0
        for e in events:
            # A file of another version, or edited by hand, must not break the page.
            try:
                if e["ph"] == "M" and e["name"] == "thread_name":
                    names[int(e["tid"])] = str(e["args"]["name"])
                elif e["ph"] == "X":
                    _check(e)
                    spans[int(e["pid"]), int(e["tid"]), names.get(int(e["tid"]), f"thread {e['tid']}")].append(e)
            except (KeyError, TypeError, ValueError):
                odd += 1
        if odd:
            run.note(f"traces/{file.name}: {odd} events are of another version and left out")
    many = len({rank for rank, _, _ in spans}) > 1
    ordered = sorted(spans.items(), key=lambda item: item[0][:2])
    return [Track(f"rank {rank} {name}" if many else name, events) for (rank, _, name), events in ordered]


def _files(run: RunSource) -> list[Path]:
    """The traces of all ranks, of evenly spaced ones where there are many."""
    ranks = list(dict.fromkeys(file.name.partition(".")[0] for file in run.traces))
    chosen = spread(ranks, MOST_RANKS)
    if len(chosen) < len(ranks):
        run.note(f"the timeline shows {len(chosen)} of {len(ranks)} ranks, evenly spaced; traces/ has all")
    return [file for file in run.traces if file.name.partition(".")[0] in chosen]


def _check(event: dict[str, Any]) -> None:
    args = event["args"]
    numbers = (event["ts"], event["dur"], args["attempt"], args.get("iteration", START), event["pid"], event["tid"])
    if not all(isinstance(n, int | float) and -1 <= n < 1e18 for n in numbers):
        raise ValueError(event)
    event["name"] = str(event["name"])
    event["cat"] = str(event["cat"])


def windows(tracks: Iterable[Track]) -> dict[int, Window]:
    """Iteration → begin and end [µs] in the newest attempt that ran it; START is the setup of the newest attempt."""
    newest: dict[int, tuple[int, float, float]] = {}
    for track in tracks:
        for e in track.spans:
            number = int(e["args"].get("iteration", START))
            attempt = int(e["args"]["attempt"])
            if number == START and e["cat"] != "setup":
                continue
            begin = float(e["ts"])
            end = float(e["ts"] + e["dur"])
            old = newest.get(number)
            if old is None or old[0] < attempt:
                newest[number] = (attempt, begin, end)
            elif old[0] == attempt:
                newest[number] = (attempt, min(old[1], begin), max(old[2], end))
    return {number: (begin, end) for number, (_, begin, end) in sorted(newest.items())}


def timeline(run: RunSource) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
    """The timeline of the page: header and columns (seconds since the run began); None without a trace."""
    tracks = load_tracks(run)
    shown = windows(tracks)
    if not shown:
        return None
    total = sum(len(t.spans) for t in tracks)
    chosen = spread(list(shown), max(1, int(len(shown) * min(1.0, MOST_SPANS / max(total, 1)))))
    if len(chosen) < len(shown):
        run.note(f"the timeline shows {len(chosen)} of {len(shown)} iterations, evenly spaced; traces/ has all")
    zero = min(e["ts"] for t in tracks for e in t.spans)
    begins = np.array([shown[i][0] for i in chosen])
    ends = np.array([shown[i][1] for i in chosen])
    names: dict[str, int] = {}
    phases: dict[str, int] = {}
    columns: dict[str, list[Any]] = {k: [] for k in _TYPES}
    for number, track in enumerate(tracks):
        for e, depth in nested(track.spans):
            if depth and e["cat"] == "waiting":
                continue  # the enclosing wait is drawn already
            # Windows of overlapping lanes overlap, so a span may belong to several.
            if not bool(((e["ts"] < ends) & (e["ts"] + e["dur"] > begins)).any()):
                continue
            values = (
                (e["ts"] - zero) / 1e6,
                e["dur"] / 1e6,
                number,
                names.setdefault(e["name"], len(names)),
                phases.setdefault(e["cat"], len(phases)),
                depth,
                e["args"].get("iteration", START),
            )
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
    header = {
        "tracks": [t.name for t in tracks],
        "names": list(names),
        "phases": list(phases),
        "windows": [[i, (shown[i][0] - zero) / 1e6, (shown[i][1] - zero) / 1e6] for i in chosen],
    }
    return header, {k: np.array(v, _TYPES[k]) for k, v in columns.items()}


def nested(spans: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """(span, number of spans around it), by begin; one that ends a rounding step after the one around it is inside.

    >>> [(e["ts"], d) for e, d in nested([{"ts": 1, "dur": 2}, {"ts": 0, "dur": 9}, {"ts": 9, "dur": 1}])]
    [(0, 0), (1, 1), (9, 0)]
    """
    depths: list[tuple[dict[str, Any], int]] = []
    ends: list[float] = []
    for e in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        while ends and ends[-1] <= e["ts"]:
            ends.pop()
        depths.append((e, len(ends)))
        ends.append(e["ts"] + e["dur"])
    return depths


def merge_traces(run: Path, target: Path) -> int:
    """Writes the traces of all ranks as one JSON array (gzip for a name in .gz); returns the number of events."""
    events = [e for file in trace_files(run) for e in read_trace(file)[0]]
    text = "[\n" + ",\n".join(json.dumps(e, separators=(",", ":")) for e in events) + "\n]\n"
    with writing(target, "--trace FILE"):
        if target.suffix == ".gz":
            target.write_bytes(gzip.compress(text.encode(), mtime=0))
        else:
            target.write_text(text, encoding="utf-8")
    return len(events)


_TYPES: dict[str, Any] = {
    "begin": np.float64,
    "seconds": np.float32,
    "track": np.uint16,
    "name": np.uint32,
    "phase": np.uint16,
    "depth": np.uint16,
    "iteration": np.int32,
}
