"""`creditgraph status RUN …`: how far a run is, and what SLURM says of its jobs."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from pipeline.app.cluster.render import ENDED
from pipeline.app.cluster.slurm import NOTES, Note, states
from pipeline.run.run_directory import lock_holder
from pipeline.run.timeline.heartbeat import where


def main(options: argparse.Namespace) -> int:
    """Prints one paragraph per run."""
    for run in options.runs:
        print(describe(Path(run)))
    return 0


def describe(run: Path) -> str:
    """Jobs, progress, and the reason of the last end; of a run that was not submitted, who runs it."""
    lines = []
    if (run / "config.yaml").exists() and not any((run / name).exists() for name in NOTES.values()):
        holder = lock_holder(run / "lock")
        return "\n".join(
            [f"{run}  (not submitted; {f'run by {holder}' if holder else 'nobody runs it now'})", *progress(run)]
        )
    for kind, note in Note.all(run).items():
        lines.append(f"{run}  ({'evaluation, ' if kind == 'eval' else ''}cluster {note.cluster or 'one_node'})")
        known = states(note.jobs)
        for s in known:
            where = "" if s.nodes in ("", "(null)") else f" on {s.nodes}"
            why = "" if s.reason in ("", "None") else f" ({s.reason})"
            lines.append(
                f"  job {s.job}: {s.state.lower()}{why}, {s.elapsed} in this start, {s.restarts} restarts{where}"
            )
            lines += [f"  {s.advice}"] if s.advice else []
        if not known:
            lines.append(f"  jobs {', '.join(note.jobs)}: no longer known to SLURM")
        lines += progress(run) if kind == "job" else []
        ended = run / ENDED[kind]
        if ended.exists():
            lines.append(f"  {ended.read_text().strip()}")
    return "\n".join(lines)


def progress(run: Path) -> list[str]:
    """How many iterations are done, and where the ranks are."""
    last, place = last_metrics(run / "metrics.jsonl"), where(run)
    done = [f"  iteration {last.get('iteration', '?')} done{age(run / 'metrics.jsonl')}"] if last else []
    return done + ([f"  {place}"] if place else [])


def age(path: Path) -> str:
    """Such as " 12 s ago"; both times by the clock of the file's server: this host's may differ. "" where it cannot be told."""
    try:
        with tempfile.TemporaryFile(dir=path.parent) as now:
            seconds = os.fstat(now.fileno()).st_mtime - path.stat().st_mtime
    except OSError:
        seconds = time.time() - path.stat().st_mtime
    if seconds < -1:
        return f"; its file is dated {-seconds:.0f} s in the future: compare clocks with `creditgraph doctor --shared {path.parent}`"
    return f" {max(0.0, seconds):.0f} s ago"


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
