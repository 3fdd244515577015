"""A real SLURM of two nodes on this host, shared by the tests of a session, and what tests ask of it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
TOOL = ROOT / "tools" / "slurm_here"
CG = [sys.executable, "-m", "creditgraph"]
WAIT = 400.0  # seconds; a machine may be several times slower than ours
BAD = {"FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
CPU_NODE = ["cluster=one_node", "cluster.gpus_per_node=0", "cluster.cpus_per_task=1", "cluster.warn_seconds=60"]


class Slurm:
    """The SLURM below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def creditgraph(self, *arguments, cwd, check=True):
        """The command line, as a user calls it."""
        done = subprocess.run(
            [*CG, *arguments], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=WAIT, check=False
        )
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
                pytest.fail(
                    f"{what}: did not "
                    f"happen\n{said}\n{self.call('scontrol', 'show', 'job')[-2000:] if run is None else ''}"
                )
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


def environment():
    paths = [str(ROOT), str(Path(__file__).parent / "toys"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def iterations_done(run):
    """Iterations in a run's metrics."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def digest(run, iterations):
    """Checksums of the checkpoint after the last iteration."""
    newest = run / "checkpoints" / f"{iterations - 1:06d}"
    return {
        name: hashlib.sha256((newest / name).read_bytes()).hexdigest() for name in ("tensors.safetensors", "state.json")
    }


def last_line(log):
    """The last line of a log, without its time."""
    return log.read_text().rstrip().splitlines()[-1].partition("] ")[2]


@pytest.fixture(scope="session")
def slurm():
    """Starts munged, slurmctld and two slurmds below a folder; sets SLURM_CONF."""
    if os.getuid() != 0:
        pytest.skip("SLURM's daemons need root; run the tests in a container as root")
    if shutil.which("slurmctld") is None and not Path("/usr/sbin/slurmctld").exists():
        pytest.skip("no slurmctld; install it with: apt-get install slurmctld slurmd slurm-client munge")
    folder = Path(tempfile.mkdtemp(prefix="cg-slurm-"))  # sockets want short paths, daemons one that others may enter
    started = subprocess.run(
        [TOOL, "start", folder, "128", "2"], capture_output=True, text=True, timeout=120, check=False
    )
    try:
        assert started.returncode == 0, started.stderr
        before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        yield Slurm(folder)
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before
    finally:
        subprocess.run([TOOL, "stop", folder], check=False, timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """`gate(n)` lets iterations before n pass."""
    file = tmp_path / "gate"

    def until(iteration):
        aside = file.with_suffix(".new")
        aside.write_text(str(iteration))
        aside.replace(file)

    until(1 << 20)
    monkeypatch.setenv("CREDITGRAPH_TEST_GATE", str(file))
    return until
