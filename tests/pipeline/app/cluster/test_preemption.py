"""Two learner ranks in jobs of a real SLURM: preempted, killed, cut off from power; the weights are a whole run's."""

import os
import random
import signal
import socket
import time
from importlib import import_module

import pytest
from slurm_jobs import CPU_NODE, Slurm, digest, iterations_done, last_line, metrics, processes

from creditgraph.pipeline.app import results
from creditgraph.pipeline.app.cli import main

pytestmark = pytest.mark.xdist_group("slurm")
ITERATIONS = 8
RUN = [
    "recipe=toy_srpo",
    "prompts.use=gates:GatedPrompts",
    "prompts.batch=4",
    "evaluator.num_problems=4",
    f"run.iterations={ITERATIONS}",
    "run.checkpoint.every=2",
    "run.record.every=0",
    "run.name=two ranks",  # a name with a space
]
RANKS = [*CPU_NODE, "cluster.ranks_per_node=2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run without SLURM and without a stop, in two forks of this process."""
    import_module("transformers.models.auto.modeling_auto")  # once, and not in every fork
    folder = tmp_path_factory.mktemp("whole")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            results.draw_curve = lambda *_: None  # the drawing library hangs in a fork of a process that has drawn
            os._exit(main(["train", *RUN, f"run.root={folder}"]))
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    return digest(folder / "two ranks", ITERATIONS)


def stopping(run, job, start):
    """Whether both ranks have received the signal to stop."""
    lines = [
        line for log in (run / "logs").glob(f"learner-{job}-{start}-*.log") for line in log.read_text().splitlines()
    ]
    return {line.partition(":")[0] for line in lines if "finishing this iteration and saving" in line} == {"0", "1"}


def refuses_a_second_job(slurm: Slurm, run, job, command, folder):
    """Neither a second submission nor the script itself brings a second job into the run directory."""
    again = slurm.creditgraph(*command, cwd=folder, check=False)
    assert again.returncode == 2
    assert f"job {job} of this run is running on node1" in again.stderr
    intruder = slurm.call("sbatch", "--parsable", run / "job.sh").strip()
    slurm.wait("refusal", lambda: slurm.state(intruder)["JobState"] == "FAILED")
    said = last_line(run / "logs" / f"job-{intruder}.log")
    assert said.startswith(f"refused: job {job} (running on node1) has {run}; two jobs must not share a run")


def test_two_ranks_preempted_killed_and_cut_off_from_power_end_with_the_same_bytes(slurm, whole, gate, tmp_path):
    dice = random.Random(11)
    run = tmp_path / "two ranks"
    command = ["submit", *RUN, *RANKS, f"run.root={tmp_path}"]
    gate(2)
    slurm.creditgraph(*command, cwd=tmp_path)
    job = slurm.job(run)
    slurm.wait("the first iteration", lambda: iterations_done(run) == 1, run)
    refuses_a_second_job(slurm, run, job, command, tmp_path)

    # Preempted anywhere in an iteration: both ranks save, and the script's job is back in the queue.
    time.sleep(dice.random())
    slurm.call("scontrol", "requeue", job)
    slurm.wait("both ranks received the signal", lambda: stopping(run, job, 0), run)
    gate(5)
    slurm.requeued(job, 1)
    slurm.wait("five iterations", lambda: iterations_done(run) == 5, run)
    log = (run / "logs" / f"job-{job}.log").read_text()
    assert log.count("stop signal: the learner finishes its iteration and saves") == 1
    assert log.count("] saved; back in the queue") == 1  # both ranks ended with 75, none was killed
    assert slurm.state(job)["Restarts"] == "1"
    shown = slurm.creditgraph("status", str(run), "--logs", cwd=tmp_path).stdout
    assert f"── learner-{job}-1-" in shown
    assert f"── learner-{job}-0-" not in shown

    # A rank is killed: the job names it and fails.
    for pid in processes(job, "SLURM_PROCID=1", "SLURM_STEP_NUM_TASKS=2"):
        os.kill(pid, signal.SIGKILL)
    gate(6)  # the other rank goes on to where it needs the dead one
    slurm.wait("the end", lambda: (run / "ended").exists())
    ended = (run / "ended").read_text().strip()
    assert ended.startswith("failed: the learner ended with ")
    assert "rank 1 died without reporting an error (killed, or out of memory?)" in ended
    assert last_line(run / "logs" / f"job-{job}.log") == ended

    # Submitted again, and its node loses power: SLURM puts the job back when the node has booted.
    slurm.wait("the end of the job", lambda: slurm.state(job)["JobState"] == "FAILED")  # it completes for a while
    gate(7)
    slurm.creditgraph(*command, cwd=tmp_path)
    job = slurm.job(run)
    slurm.wait("seven iterations", lambda: iterations_done(run) == 7, run)
    slurm.node("crash", "node1")
    gate(1 << 20)
    # A node that boots is asked for jobs that are older than 20 seconds; SLURM misses younger ones minutes later only.
    slurm.wait("an older job", lambda: slurm.state(job)["RunTime"] >= "00:00:22")
    slurm.node("boot", "node1")
    slurm.requeued(job, 1)
    slurm.finished(run, job)
    assert digest(run, ITERATIONS) == whole
    assert [row["iteration"] for row in metrics(run)] == list(range(ITERATIONS + 1))
    went_on = [next((run / "logs").glob(f"learner-{job}-{start}-*.log")).read_text() for start in (0, 1)]
    assert "continuing after iteration 3" in went_on[0]  # iteration 4 was lost with the rank
    assert "continuing after iteration 5" in went_on[1]  # iteration 6 with the node
    status = slurm.creditgraph("status", str(run), cwd=tmp_path).stdout
    assert "completed" in status
    assert "1 restarts" in status
    assert status.rstrip().endswith("finished")
