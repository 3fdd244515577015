"""`creditgraph status RUN …`: what SLURM says of a run's jobs, and how far the run is."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from pipeline.cluster.slurm import Note, states


def main(options: argparse.Namespace) -> int:
    """Prints one paragraph per run."""
    for run in options.runs:
        print(describe(Path(run)))
    return 0


def describe(run: Path) -> str:
    """Jobs, progress, and the reason of the last end."""
    note = Note.read(run)
    lines = [f"{run}  (cluster {note.cluster or 'one_node'})"]
    known = states(note.jobs)
    for s in known:
        where = "" if s.nodes in ("", "(null)") else f" on {s.nodes}"
        why = "" if s.reason in ("", "None") else f" ({s.reason})"
        lines.append(f"  job {s.job}: {s.state.lower()}{why}, {s.elapsed} in this start, {s.restarts} restarts{where}")
    if not known:
        lines.append(f"  jobs {', '.join(note.jobs)}: no longer known to SLURM")
    last = last_metrics(run / "metrics.jsonl")
    if last:
        age = time.time() - (run / "metrics.jsonl").stat().st_mtime
        lines.append(f"  iteration {last.get('iteration', '?')} done {age:.0f} s ago")
    ended = run / "ended"
    if ended.exists():
        lines.append(f"  {ended.read_text().strip()}")
    return "\n".join(lines)


def last_metrics(path: Path) -> dict[str, Any]:
    """The last whole line of a metrics file, {} when there is none."""
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, path.stat().st_size - 65536))
            lines = handle.read().decode(errors="replace").splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}
