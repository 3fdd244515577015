"""Calls of SLURM's sbatch, scontrol and scancel, and the note of a run's jobs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError, RunError
from creditgraph.pipeline.run.run_directory import check_run, locked, make_folder, write_json

# "job" trains, "eval" evaluates. Each has a separate script, log, note and final message in the run directory.
Kind = Literal["job", "eval"]
NOTES: dict[Kind, str] = {"job": "job.json", "eval": "eval-job.json"}
ENDED: dict[Kind, str] = {"job": "ended", "eval": "eval-ended"}  # file with the script's final message

LOG_NOT_OPENED = "0:53"  # what slurmd reports of a batch script whose --output cannot be opened
# States of a job that will run, runs or is being cleaned up.
ALIVE = {
    "PENDING",
    "RUNNING",
    "CONFIGURING",
    "COMPLETING",
    "REQUEUED",
    "SUSPENDED",
    "RESIZING",
    "REQUEUE_HOLD",
    "STAGE_OUT",
    "SIGNALING",
}
_ABSENT = {"(null)", "None"}  # what scontrol writes for a field without a value
_CALL_SECONDS = 120

# Part of a complaint of sbatch → next step. The first that fits.
_ADVICE = (
    ("partition", "Choose one of `sinfo` with cluster.partition=NAME."),
    (
        "node configuration|gres|tasks per node",
        "No node has that many GPUs, cores or that much memory: compare `sinfo -o '%P %D %G %c %m'` with the cluster "
        "file.",
    ),
    ("time limit", "Lower cluster.time to the partition's limit (`sinfo -o '%P %l'`)."),
    ("account|qos", "Set cluster.account and cluster.qos to ones you may use."),
    ("", "Correct the cluster file or its cluster.* overrides."),
)


class SlurmError(CreditgraphError):
    """A command of SLURM failed."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """The note in a run directory about its submission.

    Attributes:
        jobs: SLURM ids, in the order of submission.
        cluster: name of the cluster file.
        command: the submitted command line.
    """

    jobs: list[str] = field(default_factory=list)
    cluster: str = ""
    command: str = ""

    def write(self, run: Path, kind: Kind = "job") -> None:
        """Keeps the note in the run directory."""
        write_json(run / NOTES[kind], asdict(self))

    @staticmethod
    def read(run: Path, kind: Kind = "job") -> Note:
        """The note of a run; raises RunError when it was not submitted from here."""
        try:
            return Note(**json.loads((run / NOTES[kind]).read_text()))
        except (OSError, ValueError, TypeError) as error:
            why = os.strerror(error.errno or 0) if isinstance(error, OSError) else "damaged"
            raise RunError(
                f"{run}: no {NOTES[kind]} that can be read ({why}); expected the directory of a run "
                "that `creditgraph submit` sent to SLURM."
            ) from error

    @staticmethod
    def all(run: Path) -> dict[Kind, Note]:
        """The existing notes of training and evaluation; raises RunError if there are none."""
        if not run.is_dir():
            check_run(run)
        kinds = [kind for kind, name in NOTES.items() if (run / name).exists()]
        return {kind: Note.read(run, kind) for kind in kinds} or {"job": Note.read(run)}


def call(*command: str) -> str:
    """Runs a SLURM command and returns its output; raises SlurmError with its error message."""
    done = _run(*command)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise SlurmError(f"{' '.join(command[:2])}: {said}")
    return done.stdout


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]}: not found; expected SLURM's commands in PATH. Submit from a login node, or use "
            "cluster=laptop to run here."
        )
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_CALL_SECONDS)


def sbatch(script: Path) -> str:
    """Submits a script and returns the job's id."""
    return call("sbatch", "--parsable", str(script)).strip().partition(";")[0]


def test_only(script: Path) -> str:
    """The output of sbatch --test-only: when and where the job would start."""
    done = _run("sbatch", "--test-only", str(script))
    said = " ".join((done.stderr or done.stdout).split())
    if done.returncode:
        advice = next(step for words, step in _ADVICE if re.search(words, said, re.IGNORECASE))
        raise SlurmError(f"sbatch --test-only: {said.removeprefix('allocation failure: ')}. {advice}")
    return re.sub(r"^sbatch: ", "", said)


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a job in SLURM; "" for unknown fields."""

    job: str
    state: str
    elapsed: str
    nodes: str
    restarts: str
    reason: str
    exit_code: str

    @property
    def advice(self) -> str:
        """The next step after an end without a log, else ""."""
        if self.exit_code != LOG_NOT_OPENED:
            return ""
        return (
            "it ended before its first line, because its log could not be opened: the run directory is missing "
            "there, or not writable. Expected a folder that all nodes share: submit again with cluster.root=PATH"
        )


def states(jobs: Sequence[str]) -> list[State]:
    """The state of each job SLURM still knows, every task of an array alone; others are left out."""
    lines: list[str] = []
    for job in jobs:
        # scontrol and not sacct, because sacct needs an accounting database that small clusters do not have.
        try:
            lines += call("scontrol", "--oneliner", "show", "job", job).splitlines()
        except SlurmError:
            continue
    return [_state(line) for line in lines if "JobId=" in line]


def _state(line: str) -> State:
    # Values with spaces (a job's command) break into parts without "=", which are not read.
    pairs = (part.partition("=") for part in line.split())
    values = {name: "" if value in _ABSENT else value for name, equals, value in pairs if equals}
    return State(
        job=values["JobId"],
        state=values.get("JobState", "?"),
        elapsed=values.get("RunTime", "?"),
        nodes=values.get("NodeList", ""),
        restarts=values.get("Restarts", "0"),
        reason=values.get("Reason", ""),
        exit_code=values.get("ExitCode", ""),
    )


@contextmanager
def submitting(run: Path, kind: Kind = "job") -> Iterator[None]:
    """Holds a run directory while a job of it is submitted.

    Raises:
        RunError: one of its jobs is pending or running, or another `submit` holds it.
    """
    make_folder(run)
    # Two `submit` at once would both see no job.
    with locked(run / "submit.lock", "choose another run.name"):
        jobs = Note.read(run, kind).jobs if (run / NOTES[kind]).exists() else []
        alive = [state for state in states(jobs) if state.state in ALIVE]
        if alive:
            where = f" on {alive[0].nodes}" if alive[0].nodes else ""
            raise RunError(
                f"{run}: job {alive[0].job} of this run is {alive[0].state.lower()}{where}. Two jobs must not share a "
                f"run: wait for it, stop it with `creditgraph cancel {run}`, or choose another run.name."
            )
        yield
