"""RUN/heartbeat.json (heartbeat.N.json for rank N): the present activity of a rank, rewritten once a second or less."""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from creditgraph.pipeline.core.errors import ranges

WRITES = 16.0  # heartbeats a second that all ranks together write: a large run shares one file system
_ENDED = 1 << 30  # sorts after every iteration


def heartbeat_name(rank: int) -> str:
    """File name of a rank's heartbeat."""
    return "heartbeat.json" if rank == 0 else f"heartbeat.{rank}.json"


def heartbeat_pause(world: int) -> float:
    """Seconds between two heartbeats of a rank of `world` ranks."""
    return max(1.0, world / WRITES)


def read_heartbeat(file: Path) -> dict[str, Any] | None:
    """Reads a heartbeat; None if the file is missing or unreadable."""
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def heartbeats(run: Path) -> list[dict[str, Any]]:
    """Reads the heartbeats of all ranks of the newest attempt, by rank."""
    notes = [note for file in run.glob("heartbeat*.json") if (note := read_heartbeat(file)) is not None]
    newest = max((int(note.get("attempt", 0)) for note in notes), default=0)
    current = [note for note in notes if note.get("attempt") == newest]
    world = max((int(note.get("world", 1)) for note in current), default=1)
    return sorted((n for n in current if n.get("rank", 0) < world), key=lambda n: int(n["rank"]))


class _Place(NamedTuple):
    iteration: int
    text: str
    lane: str


def where(run: Path, now: float | None = None) -> str:
    """Describes where the ranks are, the slowest first; "" without a heartbeat, and when all have ended.

    A rank is silent when its heartbeat is older than ten pauses between two of them.
    """
    now = time.time() if now is None else now
    notes = heartbeats(run)
    if all(note.get("state") == "ended" for note in notes):
        return ""
    silent = []
    places: dict[_Place, list[tuple[int, float]]] = {}  # → (rank, seconds it has been there)
    for note in notes:
        rank = int(note["rank"])
        age = now - float(note["time"])
        if note.get("state") == "ended":
            places.setdefault(_Place(_ENDED, "ended", ""), []).append((rank, age))
            continue
        if age > 10 * heartbeat_pause(note.get("world", 1)):
            silent.append(f"rank {rank} ({note.get('host')}) silent since {age:.0f} s")
        for track, lane in note.get("lanes", {}).items():
            places.setdefault(_place(track, lane), []).append((rank, now - float(lane["since"])))
    # A waiting rank has already reached the point that the others must still reach, so it is not the slowest.
    order = sorted(places.items(), key=lambda p: (p[0].iteration, p[0].text.startswith("waiting"), p[0].text))
    return "; ".join(silent + [_sentence(place, ranks, len(notes) > 1) for place, ranks in order])


def _place(track: str, lane: dict[str, Any]) -> _Place:
    return _Place(
        iteration=-1 if lane.get("iteration") is None else int(lane["iteration"]),
        text=f"waiting in {lane['node']}" if lane.get("phase") == "waiting" else f"in {lane['node']}",
        lane="" if track == "main" else f" ({track})",
    )


def _sentence(place: _Place, ranks: list[tuple[int, float]], many: bool) -> str:
    who = f"rank{'s' if len(ranks) > 1 else ''} {ranges(rank for rank, _ in ranks)} " if many else ""
    iteration = f" of iteration {place.iteration}" if 0 <= place.iteration < _ENDED else ""
    since = max(seconds for _, seconds in ranks)
    return f"{who}{place.text}{iteration}{place.lane} since {since:.0f} s"
