"""Talking to SLURM: sbatch, squeue, scancel, and the note a run keeps of its jobs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pipeline.app.cluster.render import Kind
from pipeline.core.errors import ConfigError, CreditgraphError, RunError
from pipeline.run.run_directory import locked, write_aside, writing

NOTES: dict[Kind, str] = {"job": "job.json", "eval": "eval-job.json"}
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


class SlurmError(CreditgraphError):
    """SLURM refused or does not answer."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a run directory remembers of its submission.

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
        write_aside(run / NOTES[kind], json.dumps(asdict(self), indent=1))

    @staticmethod
    def read(run: Path, kind: Kind = "job") -> Note:
        """The note of a run; raises RunError when it was not submitted from here."""
        try:
            return Note(**json.loads((run / NOTES[kind]).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise RunError(
                f"{run}: no {NOTES[kind]} that can be read ({type(error).__name__}); wanted the directory of a run "
                "that "
                "`creditgraph submit` sent to SLURM."
            ) from error

    @staticmethod
    def all(run: Path) -> dict[Kind, Note]:
        """The notes of training and evaluation, those that are there; raises RunError when there is none."""
        kinds = [kind for kind, name in NOTES.items() if (run / name).exists()]
        return {kind: Note.read(run, kind) for kind in kinds} or {"job": Note.read(run)}


def call(*command: str) -> str:
    """Runs a SLURM command and returns its output; its own complaint becomes a SlurmError."""
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]}: not found; wanted SLURM's commands in PATH. Submit from a login node, or use "
            "cluster=laptop to run here."
        )
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise SlurmError(f"{' '.join(command[:2])}: {said}")
    return done.stdout


def sbatch(script: Path, *options: str) -> str:
    """Submits a script and returns the job's id."""
    return call("sbatch", "--parsable", *options, str(script)).strip().partition(";")[0]


def test_only(script: Path) -> str:
    """What sbatch --test-only says: when and where the job would start."""
    done = subprocess.run(
        ["sbatch", "--test-only", str(script)], capture_output=True, text=True, check=False, timeout=120
    )
    said = " ".join((done.stderr or done.stdout).split())
    if done.returncode:
        raise SlurmError(f"sbatch --test-only: {said.removeprefix('allocation failure: ')}. {_advice(said)}")
    return re.sub(r"^sbatch: ", "", said)


def _advice(said: str) -> str:
    if "partition" in said.lower():
        return "Choose one of `sinfo` with cluster.partition=NAME."
    if "node configuration" in said.lower() or "gres" in said.lower() or "tasks per node" in said.lower():
        return "No node has that many GPUs, cores or that much memory: compare `sinfo -o '%P %D %G %c %m'` with the cluster file."
    if "time limit" in said.lower():
        return "Lower cluster.time to the partition's limit (`sinfo -o '%P %l'`)."
    if "account" in said.lower() or "qos" in said.lower():
        return "Set cluster.account and cluster.qos to ones you may use."
    return "Correct the cluster file or its cluster.* overrides."


@dataclass(frozen=True, kw_only=True)
class State:
    """One line of squeue or sacct."""

    job: str
    state: str
    elapsed: str
    nodes: str
    restarts: str = "0"
    reason: str = ""
    exit_code: str = ""

    @property
    def advice(self) -> str:
        """What to do about an end that left no log."""
        if self.exit_code == LOG_NOT_OPENED:
            return (
                "it ended before its first line, because its log could not be opened: the run directory is missing "
                "there, or not writable. "
                "Wanted a folder that all nodes share: submit again with cluster.root=PATH"
            )
        return ""


def states(jobs: Sequence[str]) -> list[State]:
    """The state of each job SLURM still knows; others are left out."""
    found = []
    for job in jobs:
        try:
            text = call("scontrol", "--oneliner", "show", "job", job)
        except SlurmError:
            continue
        for line in text.splitlines():
            values = dict(part.partition("=")[::2] for part in line.split() if "=" in part)
            if "JobId" in values:
                found.append(
                    State(
                        job=values["JobId"], state=values.get("JobState", "?"), elapsed=values.get("RunTime", "?"),
                        nodes=values.get("NodeList", "") or "", restarts=values.get("Restarts", "0"), reason=values.get("Reason", ""),
                        exit_code=values.get("ExitCode", ""),
                    )
                )  # fmt: skip
    return found


@contextmanager
def submitting(run: Path, kind: Kind = "job") -> Iterator[None]:
    """Around the submission of a run: raises RunError when one of its jobs is pending or running, or another `submit` is at it."""
    with writing(run):
        run.mkdir(parents=True, exist_ok=True)
    with locked(run / "submit.lock", "choose another run.name"):
        refuse_second(run, kind)
        yield


def refuse_second(run: Path, kind: Kind = "job") -> None:
    """Raises RunError when a job of this run is pending or running."""
    if not (run / NOTES[kind]).exists():
        return
    alive = [s for s in states(Note.read(run, kind).jobs) if s.state in ALIVE]
    if alive:
        where = f" on {alive[0].nodes}" if alive[0].nodes not in ("", "(null)") else ""
        raise RunError(
            f"{run}: job {alive[0].job} of this run is {alive[0].state.lower()}{where}. Two jobs must not share a run: "
            "wait for it, "
            f"stop it with `creditgraph cancel {run}`, or choose another run.name."
        )
