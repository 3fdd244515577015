"""`creditgraph logs RUN`: the logs of a submitted run."""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path

from pipeline.core.errors import RunError

# job-JOB, and ROLE-JOB-START-NODE of its steps.
NAME = re.compile(r"(?P<role>job|eval|learner|engine-\d+)-(?P<job>\d+)(-(?P<start>\d+)-.+)?")


def main(options: argparse.Namespace) -> int:
    """Prints the end of each log of the newest start, or follows one role."""
    folder = Path(options.run) / "logs"
    files = newest_start(sorted(folder.glob("*.log")), holder_of(Path(options.run))) if folder.is_dir() else []
    files = [f for f in files if options.role in f.name]
    if not files:
        raise RunError(
            f"{folder}: no {options.role + ' ' if options.role else ''}log; wanted the directory of a run that has "
            "started."
        )
    if options.follow:
        follow(next((f for f in files if f.name.startswith("learner")), files[0]))
        return 0
    for file in files:
        lines = file.read_text(errors="replace").splitlines()
        print(
            f"── {file.name}" + (f" (last {options.lines} of {len(lines)} lines)" if len(lines) > options.lines else "")
        )
        print("\n".join(printable(line) for line in lines[-options.lines :]))
    return 0


def newest_start(files: list[Path], holder: int = -1) -> list[Path]:
    """The logs of the newest start, by the numbers in their names (clocks of nodes may differ), job log first.

    Of training those of the job that has or had the run last (`holder`; a job that was refused has none), and of
    evaluation the newest.
    """
    found: list[Path] = []
    known = [
        (f, m["role"] == "eval", int(m["job"]), int(m["start"] or -1)) for f in files if (m := NAME.fullmatch(f.stem))
    ]
    for evaluation in (False, True):
        numbers = {number for _, kind, number, _ in known if kind == evaluation}
        job = holder if holder in numbers and not evaluation else max(numbers, default=-1)
        mine = [(f, begun) for f, kind, number, begun in known if kind == evaluation and number == job]
        start = max((begun for _, begun in mine), default=-1)
        chosen = [f for f, begun in mine if begun in (-1, start)]
        found += sorted(
            chosen, key=lambda f: (not f.name.startswith("job-"), not f.name.startswith("learner-"), f.name)
        )
    return found + [f for f in files if not NAME.fullmatch(f.stem)]


def holder_of(run: Path) -> int:
    """Number of the job that took the run last, -1 when none is known."""
    try:
        return int((run / "holder").read_text())
    except (OSError, ValueError):
        return -1


def printable(line: str) -> str:
    """A line without control characters: a model's text must not drive the terminal."""
    return "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in line)


def follow(file: Path) -> None:
    """Prints what is appended until interrupted."""
    with file.open(errors="replace") as handle:
        handle.seek(max(0, os.path.getsize(file) - 4096))
        while True:
            line = handle.readline()
            if line:
                print(printable(line.rstrip("\n")), flush=True)
            else:
                time.sleep(0.5)
