"""`creditgraph logs RUN`: the logs of a submitted run."""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path

from pipeline.errors import RunError

# job-JOB, and ROLE-JOB-START-NODE of its steps.
NAME = re.compile(r"(job|eval|learner|engine-\d+)-(?P<job>\d+)(-(?P<start>\d+)-.+)?")


def main(options: argparse.Namespace) -> int:
    """Prints the end of each log of the newest start, or follows one role."""
    folder = Path(options.run) / "logs"
    files = newest_start(sorted(folder.glob("*.log"))) if folder.is_dir() else []
    files = [f for f in files if options.role in f.name]
    if not files:
        raise RunError(f"{folder}: no {options.role + ' ' if options.role else ''}log; wanted the directory of a run that has started.")
    if options.follow:
        follow(next((f for f in files if f.name.startswith("learner")), files[0]))
        return 0
    for file in files:
        lines = file.read_text(errors="replace").splitlines()
        print(f"── {file.name}" + (f" (last {options.lines} of {len(lines)} lines)" if len(lines) > options.lines else ""))
        print("\n".join(printable(line) for line in lines[-options.lines :]))
    return 0


def newest_start(files: list[Path]) -> list[Path]:
    """The logs of the newest job and of its newest start, by the numbers in their names (clocks of nodes may differ), job log first."""
    known = [(f, (int(m["job"]), int(m["start"] or -1))) for f in files if (m := NAME.fullmatch(f.stem))]
    job = max((number for _, (number, _) in known), default=-1)
    start = max((begun for _, (number, begun) in known if number == job), default=-1)
    found = [f for f, (number, begun) in known if number == job and begun in (-1, start)]
    others = [f for f in files if not NAME.fullmatch(f.stem)]
    return sorted(found, key=lambda f: (not f.name.startswith("job-"), not f.name.startswith("learner-"), f.name)) + others


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
