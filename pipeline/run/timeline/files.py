"""RUN/traces/rank-N.json: written line by line, readable during the run and after a kill.

The format is the JSON array of trace events that chrome://tracing and ui.perfetto.dev read, one event a line and
without its closing bracket.
"""

import json
import os
from pathlib import Path
from typing import Any

_HEADER = "[\n"
_TAIL_BYTES = 1 << 16  # more than any event is long


class TraceFile:
    """One rank's trace. At half of the allowed size it is renamed to rank-N.earlier.json, replacing that file.

    Args:
        run: run directory.
        rank: rank of this process.
        megabytes: largest size of the two files together.
    """

    def __init__(self, run: Path, rank: int, megabytes: float) -> None:
        folder = run / "traces"
        folder.mkdir(exist_ok=True)
        self._path = folder / f"rank-{rank}.json"
        self._limit = megabytes * 5e5
        self._open()

    @property
    def is_full(self) -> bool:
        """Whether `start_over` is due."""
        return self._size > self._limit

    def start_over(self) -> None:
        """Renames the file to rank-N.earlier.json and begins an empty one."""
        self.close()
        os.replace(self._path, self._path.with_suffix(".earlier.json"))
        self._open()

    def append(self, lines: list[str]) -> None:
        """Adds events, each a JSON object, in one write."""
        data = ((",\n" if self._size else _HEADER) + ",\n".join(lines)).encode()
        self._size += os.write(self._file, data)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _open(self) -> None:
        self._size = cut_torn_line(self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def cut_torn_line(file: Path) -> int:
    """Removes a last line that a kill left unfinished; returns the file's size, 0 if there is no file."""
    if not file.exists():
        return 0
    with file.open("r+b") as handle:
        size = handle.seek(0, os.SEEK_END)
        begin = max(0, size - _TAIL_BYTES)
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
    """Reads the events of a trace, which may still grow, and counts unreadable lines (one after a kill)."""
    events = []
    bad = 0
    with file.open("rb") as handle:
        for line in handle:
            text = line.strip().rstrip(b",")
            if text in (b"[", b"]", b""):
                continue
            try:
                event = json.loads(text)
            except ValueError:
                event = None
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
