"""What tests ask of a real SLURM on this host, and of the runs whose jobs it has."""

import contextlib
import hashlib
import io
import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from creditgraph.pipeline.app.cli import main

ROOT = Path(__file__).parents[5]
TOYS = Path(__file__).parent
TOOL = ROOT / "tools" / "slurm_here"
WAIT = 400.0  # seconds; a machine may be several times slower than ours
BAD = {"FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
CPU_NODE = ["cluster=one_node", "cluster.gpus_per_node=0", "cluster.cpus_per_task=1", "cluster.warn_seconds=60"]


class Slurm:
    """The SLURM below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def creditgraph(self, *arguments, cwd, check=True):
        """The command line, in this process: starting Python and importing torch takes longer than the command."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(arguments))
        done = SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    def call(self, *command):
        """One of SLURM's commands."""
        return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout

    def job(self, run):
        """Id of the newest job of a run."""
        return json.loads((run / "job.json").read_text())["jobs"][0]

    def state(self, job):
        """What SLURM knows of a job."""
        return dict(
            part.partition("=")[::2] for part in self.call("scontrol", "-o", "show", "job", job).split() if "=" in part
        )

    def wait(self, what, condition, run=None):
        """Until `condition()`; a run that ends meanwhile fails with its log."""
        deadline = time.monotonic() + WAIT
        while not condition():
            over = run is not None and ((run / "ended").exists() or self.state(self.job(run))["JobState"] in BAD)
            if (over or time.monotonic() > deadline) and not condition():
                logs = sorted((run / "logs").glob("*.log")) if run else []
                said = "\n".join(f"── {f.name}\n{f.read_text(errors='replace')[-3000:]}" for f in logs)
                jobs = self.call("scontrol", "show", "job")[-2000:]
                pytest.fail(f"{what}: did not happen\n{said}\n{jobs}")
            time.sleep(0.1)

    def requeued(self, job, restarts):
        """Waits until a job is back in the queue for that many times, and lets it start soon: SLURM would wait a while.

        Not within the second, in which SLURM has revoked the credentials of the job.
        """
        self.wait(
            f"requeue {restarts}",
            lambda: self.state(job)["Restarts"] == str(restarts) and self.state(job)["JobState"] == "PENDING",
        )
        self.call("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def finished(self, run, job):
        """Waits for a run's good end."""
        self.wait("the end", lambda: (run / "ended").exists(), run)
        assert (run / "ended").read_text() == "finished\n", (run / "ended").read_text()
        self.wait("completed", lambda: self.state(job)["JobState"] == "COMPLETED")

    def node(self, action, node):
        """Crashes or boots a node."""
        subprocess.run([TOOL, action, self.folder, node], check=True, timeout=WAIT)


class Gate:
    """`gate(n)` lets iterations before n pass."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self(1 << 20)

    def __call__(self, iteration):
        aside = self.file.with_suffix(".new")
        aside.write_text(str(iteration))
        aside.replace(self.file)

    def waiting(self, iteration):
        """Number of ranks that have come to an iteration and wait."""
        return len(list(self.file.parent.glob(f"{self.file.name}.{iteration}.*")))


def processes(job, *variables):
    """Processes of a job whose environment has these variables ("NAME=value")."""
    expected = {f"SLURM_CONF={os.environ['SLURM_CONF']}", f"SLURM_JOB_ID={job}", *variables}
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = set((entry / "environ").read_text(errors="replace").split("\0"))
            except OSError:
                continue
            if expected <= environment:
                pids.append(int(entry.name))
    return pids


def stopping(run, job):
    """Ranks of the first start of a job's learner that have received the signal to stop."""
    lines = [line for log in (run / "logs").glob(f"learner-{job}-0-*.log") for line in log.read_text().splitlines()]
    return {line.partition(":")[0] for line in lines if "finishing this iteration and saving" in line}


def iterations_done(run):
    """Iterations in a run's metrics."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def metrics(run):
    """Rows of a run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def digest(run, iterations):
    """Checksums of the checkpoint after the last iteration."""
    newest = run / "checkpoints" / f"{iterations - 1:06d}"
    return {
        name: hashlib.sha256((newest / name).read_bytes()).hexdigest() for name in ("tensors.safetensors", "state.json")
    }


def last_line(log):
    """The last line of a log, without its time."""
    return log.read_text().rstrip().splitlines()[-1].partition("] ")[2]
