"""SIGKILL of all processes of a node at drawn instants, in one job of a real SLURM that is never queued again.

Three nodes on this host (tools/slurm_here), of which two hold a rank each. A victim is killed while it starts, samples,
learns, saves or waits; the job goes on inside its allocation. The last checkpoint must have the bytes of an undisturbed
run of torchrun, and SLURM must count no restart. Needs root and Debian's slurmctld, slurmd, slurm-client and munge.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attack_suites import toy_runs

TOYS = toy_runs.ROOT / "tests" / "pipeline" / "app" / "cluster" / "toys"
sys.path.insert(0, str(TOYS))
SLOWEST = 16.0  # seconds from a start to its kill, at most: it imports for about eight, then an iteration takes a half
PER_KILL = 8  # iterations that a start may add
FOLDER = Path()


@dataclass(frozen=True)
class Case:
    """A run, and how often a node of it is killed."""

    kills: int

    def __str__(self) -> str:
        return f"{self.kills} kills in one run"

    @property
    def settings(self) -> list[str]:
        return [
            "recipe=toy_srpo",
            "prompts.use=gates:GatedPrompts",
            "prompts.batch=4",
            "evaluator.num_problems=4",
            f"run.iterations={PER_KILL * (self.kills + 1)}",
            "run.checkpoint.every=1",
            "run.record.every=0",
            "run.name=run",
        ]


def cases() -> list[Case]:
    return [Case(20)]


def quick() -> list[Case]:
    """None: three kills take 90 seconds."""
    return []


def use(folder: Path) -> None:
    global FOLDER
    FOLDER = folder
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TOYS), os.environ.get("PYTHONPATH", "")])),
        "OMP_NUM_THREADS": "1",
        "CREDITGRAPH_TEST_GATE": str(folder / "gate"),
    }


@cache
def whole(case: Case) -> dict[str, str]:
    """Checksums of the undisturbed run."""
    from slurm_jobs import Gate, digest

    Gate(FOLDER / "gate")
    command = ["torchrun", "--nproc-per-node", "2", "--no-python", "creditgraph", "train", *case.settings]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [*command, f"run.root={FOLDER / 'whole'}"], env={**os.environ, "PATH": path}, check=True, capture_output=True
    )
    return digest(FOLDER / "whole" / "run", PER_KILL * (case.kills + 1))


def run(case: Case) -> tuple[bool, str]:
    from slurm_jobs import CPU_NODE, TOOL, Gate, Slurm, digest, processes

    dice = random.Random(case.kills)
    expected = whole(case)
    daemons = Path(tempfile.mkdtemp(prefix="cg-slurm-"))  # sockets want short paths
    subprocess.run([TOOL, "start", daemons, "0", "3"], check=True, capture_output=True)
    os.environ["SLURM_CONF"] = str(daemons / "slurm.conf")
    try:
        slurm, gate, path = Slurm(daemons), Gate(FOLDER / "gate"), FOLDER / "run"
        gate(PER_KILL)
        nodes = ["cluster.nodes=2", "cluster.ranks_per_node=1", f"cluster.learner_restarts={case.kills}"]
        slurm.creditgraph("submit", *case.settings, *CPU_NODE, *nodes, f"run.root={FOLDER}", cwd=FOLDER)
        job = slurm.job(path)
        log = path / "logs" / f"job-{job}.log"
        for kill in range(case.kills):
            rank = [f"SLURM_PROCID={dice.randrange(2)}", "SLURM_STEP_NUM_TASKS=2", f"CREDITGRAPH_START=0.{kill}"]
            slurm.wait(f"start {kill}", lambda rank=rank: processes(job, *rank), path)
            time.sleep(dice.uniform(0, SLOWEST))
            for pid in processes(job, *rank):
                os.kill(pid, signal.SIGKILL)
            gate(PER_KILL * (kill + 2))  # the other rank goes on to where it needs the dead one
            slurm.wait(f"restart {kill + 1}", lambda kill=kill: f"] start 0.{kill + 1} of " in log.read_text(), path)
        gate(1 << 20)
        slurm.finished(path, job)
        same = digest(path, PER_KILL * (case.kills + 1)) == expected
        restarts = slurm.state(job)["Restarts"]
        went_on = log.read_text().count(" of the learner on node1 node2, from 0")
        return same and restarts == "0", (
            f"{'the same' if same else 'other'} bytes, {restarts} times in the queue again; {went_on} of {case.kills} "
            "starts continued a checkpoint, the others began before the first"
        )
    finally:
        subprocess.run([TOOL, "stop", daemons], check=False)
