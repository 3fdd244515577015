"""Which iteration's value each '@<=k' wire has read: chosen by what is there, written down, and read again.

What a free choice reads depends on how fast the two lanes are. The file makes it repeatable: a run that continues reads
what its earlier attempt chose, and another run with the same file has the same bits.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.sockets import Wire

SCHEDULE = "schedule.jsonl"


class Schedule:
    """The choices of a run, by wire and iteration; one per iteration, for all nodes that read the wire.

    Args:
        folder: run directory, which holds the file; None keeps the choices in memory.
        writes: whether this rank writes the file.
        given: file of another run, whose choices this one takes.
    """

    def __init__(self, folder: Path | None, writes: bool, given: str = "") -> None:
        self._own = folder / SCHEDULE if folder else None
        self._writes = writes
        self._open: TextIO | None = None
        self._given = Path(given) if given else None
        self._chosen: dict[tuple[str, int], int] = {}

    def restore(self, from_first: Callable[[Any], Any]) -> None:
        """Takes up the choices of the given file and of earlier attempts; all ranks call it, and the first one reads.

        Raises ConfigError for a file that is not there, or not a schedule.
        """
        if self._writes and self._own and self._own.exists():
            text = self._own.read_text()
            if not text.endswith("\n"):  # the process was killed while it wrote the last line
                self._own.write_text(text[: text.rfind("\n") + 1])
        own = self._own if self._own and self._own.exists() else None
        found = [choice for path in (self._given, own) if path for choice in _read(path)] if self._writes else []
        self._chosen = {(wire, iteration): tag for wire, iteration, tag in from_first(found)}

    def known(self, wire: Wire, iteration: int) -> int | None:
        """The iteration whose value `wire` reads; None as long as it is not chosen.

        Raises ConfigError for an iteration that a given schedule lacks."""
        found = self._chosen.get((str(wire), iteration))
        if (found is None and self._given) or (found is not None and not iteration - wire.delay <= found < iteration):
            said = "no line" if found is None else f"{found}"
            raise ConfigError(
                f"{self._given or self._own}: {said} for '{wire}' in iteration {iteration}; expected an iteration from "
                f"{iteration - wire.delay} to {iteration - 1}, from a run of the same graph that is at least as long. "
                "Lower run.iterations, or take another run.schedule."
            )
        return found

    def choose(self, wire: Wire, iteration: int, tag: int) -> None:
        """Keeps and writes a choice, before anything is made of it."""
        self._chosen[str(wire), iteration] = tag
        if self._own and self._writes:
            self._open = self._open or self._own.open("a")
            self._open.write(json.dumps({"iteration": iteration, "wire": str(wire), "reads": tag}) + "\n")
            self._open.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._open:
            self._open.close()


def _read(path: Path) -> list[tuple[str, int, int]]:
    """(wire, iteration, what it reads) of every line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"run.schedule: {path} cannot be read ({error}); expected the {SCHEDULE} of a run."
        ) from error
    chosen = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            chosen.append((str(row["wire"]), int(row["iteration"]), int(row["reads"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: line {number} is no choice of a run ({type(error).__name__}: {error}); expected "
                '{"iteration": 3, "wire": "learner.weights@<=4", "reads": 1}. Restore the file, or remove it.'
            ) from error
    return chosen
