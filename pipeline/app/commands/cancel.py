"""`creditgraph cancel RUN …`: ends a run's jobs."""

import argparse
from pathlib import Path

from creditgraph.pipeline.app.cluster.slurm import ALIVE, Note, call, states

SUMMARY = "End the jobs of submitted runs."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument(
        "--save", action="store_true", help="let a running learner finish its iteration and checkpoint first"
    )


def main(options: argparse.Namespace) -> int:
    """Cancels pending and running jobs; with --save a running learner ends by itself, after a checkpoint."""
    for run in map(Path, options.runs):
        alive = [s for note in Note.all(run).values() for s in states(note.jobs) if s.state in ALIVE]
        for s in alive:
            if options.save and s.state == "RUNNING":
                # No requeue afterwards: the script's request for one, after the learner has saved, is refused.
                call("scontrol", "update", f"JobId={s.job}", "Requeue=0")
                call("scancel", "--signal=USR1", "--batch", s.job)
            else:
                call("scancel", s.job)
        action = "signalled to save and end" if options.save else "cancelled"
        print(f"{run}: {action} {', '.join(s.job for s in alive) or 'nothing, no job is alive'}")
    return 0
