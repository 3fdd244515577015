"""`creditgraph cancel RUN …`: ends a run's jobs."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.app.cluster.slurm import ALIVE, Note, call, states


def main(options: argparse.Namespace) -> int:
    """Cancels what is pending or running; a running learner is first told to save with --save."""
    for run in map(Path, options.runs):
        alive = [s for note in Note.all(run).values() for s in states(note.jobs) if s.state in ALIVE]
        for s in alive:
            if options.save and s.state == "RUNNING":
                # No requeue afterwards: the script asks for one when the learner has saved, and is refused.
                call("scontrol", "update", f"JobId={s.job}", "Requeue=0")
                call("scancel", "--signal=USR1", "--batch", s.job)
            else:
                call("scancel", s.job)
        what = "told to save and end" if options.save else "cancelled"
        print(f"{run}: {what} {', '.join(s.job for s in alive) or 'nothing, no job is alive'}")
    return 0
