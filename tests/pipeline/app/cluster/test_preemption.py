"""Two learner ranks in jobs of a real SLURM that are preempted, killed, and cut off from power: the weights are those of a whole run."""

import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("cluster_conftest", Path(__file__).with_name("conftest.py"))
here = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(here)

pytestmark = pytest.mark.xdist_group("slurm")
ITERATIONS = 8
RUN = [
    "recipe=toy_srpo", "prompts.use=gates:GatedPrompts", "prompts.batch=4", "evaluator.num_problems=4", f"run.iterations={ITERATIONS}",
    "run.checkpoint.every=2", "run.record.every=0",
]  # fmt: skip
RANKS = [*here.CPU_NODE, "cluster.ranks_per_node=2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run without SLURM and without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        meeting = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [*here.CG, "train", *RUN, f"run.root={folder}", "run.name=two ranks"]
        ranks.append(subprocess.Popen(command, env={**here.environment(), **meeting}, stdout=subprocess.DEVNULL))
    assert [rank.wait(here.WAIT) for rank in ranks] == [0, 0]
    return here.digest(folder / "two ranks", ITERATIONS)


def processes(job, rank):
    """Processes of one learner rank."""
    wanted = {
        f"SLURM_CONF={os.environ['SLURM_CONF']}",
        f"SLURM_JOB_ID={job}",
        f"SLURM_PROCID={rank}",
        "SLURM_STEP_NUM_TASKS=2",
    }
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = set((entry / "environ").read_text(errors="replace").split("\0"))
                if wanted <= variables:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def told(run, job, start):
    """Whether both ranks have heard that they are to stop."""
    lines = [
        line for log in (run / "logs").glob(f"learner-{job}-{start}-*.log") for line in log.read_text().splitlines()
    ]
    return {line.partition(":")[0] for line in lines if "finishing this iteration and saving" in line} == {"0", "1"}


def test_two_ranks_preempted_twice_end_with_the_same_bytes(slurm, whole, gate, tmp_path):
    dice = random.Random(11)
    first = dice.randrange(1, 3)
    run = tmp_path / "two ranks"  # a name with a space
    command = ["submit", *RUN, *RANKS, f"run.root={tmp_path}", "run.name=two ranks"]
    gate(first + 2)
    slurm.creditgraph(*command, cwd=tmp_path)
    job = slurm.job(run)
    slurm.wait("the first iterations", lambda: here.iterations_done(run) >= first, run)

    # Neither a second submission nor the script itself brings a second job into the run directory.
    again = slurm.creditgraph(*command, cwd=tmp_path, check=False)
    assert again.returncode == 2
    assert f"job {job} of this run is running on node1" in again.stderr
    intruder = slurm.call("sbatch", "--parsable", run / "job.sh").strip()
    slurm.wait("refusal", lambda: slurm.state(intruder)["JobState"] == "FAILED")
    said = here.last_line(run / "logs" / f"job-{intruder}.log")
    assert said.startswith(f"refused: job {job} (running on node1) has {run}; two jobs must not share a run")

    time.sleep(dice.random())  # anywhere in an iteration
    slurm.call("scontrol", "requeue", job)  # what a scheduler does to preempt
    slurm.wait("both ranks are told", lambda: told(run, job, 0), run)
    gate(ITERATIONS - 1)
    slurm.requeued(job, 1)
    before = here.iterations_done(run)
    slurm.wait("the second start", lambda: here.iterations_done(run) > before, run)
    time.sleep(dice.random())
    slurm.call("scancel", "--signal=USR1", "--batch", job)  # what SLURM sends before the time limit
    slurm.wait("both ranks are told again", lambda: told(run, job, 1), run)
    gate(1 << 20)
    slurm.requeued(job, 2)
    slurm.finished(run, job)

    assert here.digest(run, ITERATIONS) == whole
    assert [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()] == list(
        range(ITERATIONS + 1)
    )
    assert slurm.state(job)["Restarts"] == "2"
    log = (run / "logs" / f"job-{job}.log").read_text()
    assert log.count("stop signal: the learner finishes its iteration and saves") == 2
    assert log.count("] saved; back in the queue") == 2  # both ranks ended with 75, none was killed
    starts = [(run / "logs").glob(f"learner-{job}-{start}-*.log") for start in range(3)]
    assert all(any("iteration" in log.read_text() for log in logs) for logs in starts)
    status = slurm.creditgraph("status", str(run), cwd=tmp_path).stdout
    assert "completed" in status
    assert "2 restarts" in status
    assert status.rstrip().endswith("finished")
    shown = slurm.creditgraph("logs", str(run), cwd=tmp_path).stdout
    assert f"── learner-{job}-2-" in shown
    assert f"── learner-{job}-1-" not in shown


def test_a_killed_rank_and_a_power_cut_lose_what_is_newer_than_the_checkpoint(slurm, whole, gate, tmp_path):
    run = tmp_path / "two ranks"
    command = ["submit", *RUN, *RANKS, f"run.root={tmp_path}", "run.name=two ranks"]
    gate(3)
    slurm.creditgraph(*command, cwd=tmp_path)
    job = slurm.job(run)
    slurm.wait("three iterations", lambda: here.iterations_done(run) == 3, run)
    for pid in processes(job, 1):
        os.kill(pid, signal.SIGKILL)
    gate(4)  # the other rank goes on to where it needs the dead one
    slurm.wait("the end", lambda: (run / "ended").exists())
    ended = (run / "ended").read_text().strip()
    assert ended.startswith("failed: the learner ended with ")
    assert "rank 1 died without a word (killed, or out of memory?)" in ended
    assert here.last_line(run / "logs" / f"job-{job}.log") == ended

    gate(5)
    slurm.creditgraph(*command, cwd=tmp_path)
    job = slurm.job(run)
    slurm.wait("five iterations", lambda: here.iterations_done(run) == 5, run)
    slurm.node("crash", "node1")
    gate(1 << 20)
    # A node that boots is asked for jobs that are older than 20 seconds; SLURM misses younger ones minutes later only.
    slurm.wait("an older job", lambda: slurm.state(job)["RunTime"] >= "00:00:25")
    slurm.node("boot", "node1")
    slurm.requeued(job, 1)
    slurm.finished(run, job)
    assert here.digest(run, ITERATIONS) == whole
    went_on = [next((run / "logs").glob(f"learner-{job}-{start}-*.log")).read_text() for start in (0, 1)]
    assert "continuing after iteration 1" in went_on[0]  # iteration 2 was lost with the rank
    assert "continuing after iteration 3" in went_on[1]  # iteration 4 with the node
