"""`creditgraph logs RUN`: the logs of a submitted run."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from pipeline.errors import RunError

TAIL = 20


def main(options: argparse.Namespace) -> int:
    """Prints the end of each log of the newest start, or follows one role."""
    folder = Path(options.run) / "logs"
    files = sorted(folder.glob("*.log"), key=lambda f: f.stat().st_mtime) if folder.is_dir() else []
    files = [f for f in files if options.role in f.name]
    if not files:
        raise RunError(f"{folder}: no {options.role + ' ' if options.role else ''}log; wanted the directory of a run that has started.")
    if options.follow:
        follow(files[-1])
        return 0
    newest = newest_start(files)
    for file in newest:
        lines = file.read_text(errors="replace").splitlines()
        print(f"── {file.name}" + (f" (last {options.lines} of {len(lines)} lines)" if len(lines) > options.lines else ""))
        print("\n".join(printable(line) for line in lines[-options.lines :]))
    return 0


def newest_start(files: list[Path]) -> list[Path]:
    """One file per role: the one written last."""
    found: dict[str, Path] = {}
    for file in files:
        role = "-".join(p for p in file.stem.split("-") if not p.isdigit() or file.stem.startswith(f"engine-{p}-"))
        found[role] = file
    return list(found.values())


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
