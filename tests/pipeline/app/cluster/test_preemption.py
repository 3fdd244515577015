"""Two learner ranks in a job of a real SLURM: preempted, killed, a node lost; the weights are a whole run's."""

import os
import random
import signal
import socket
import time
from importlib import import_module

import pytest
from slurm_jobs import CPU_NODE, Slurm, digest, iterations_done, last_line, metrics, processes, stopping

from creditgraph.pipeline.app.cli import main

pytestmark = pytest.mark.xdist_group("slurm")
ITERATIONS = 10
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
RANKS = [*CPU_NODE, "cluster.nodes=2", "cluster.ranks_per_node=1", "cluster.spare_nodes=1"]


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
            os._exit(main(["train", *RUN, f"run.root={folder}"]))
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    return digest(folder / "two ranks", ITERATIONS)


def refuses_a_second_job(slurm: Slurm, run, job, command, folder):
    """Neither a second submission nor the script itself brings a second job into the run directory."""
    again = slurm.creditgraph(*command, cwd=folder, check=False)
    assert again.returncode == 2
    assert f"job {job} of this run is running on node[1-3]" in again.stderr
    intruder = slurm.call("sbatch", "--parsable", run / "job.sh").strip()
    slurm.wait("refusal", lambda: slurm.state(intruder)["JobState"] == "FAILED")
    said = last_line(run / "logs" / f"job-{intruder}.log")
    assert said.startswith(f"refused: job {job} (running on node[1-3]) has {run}; two jobs must not share a run")


def test_preempted_killed_a_node_lost_and_the_first_node_lost_end_with_the_same_bytes(slurm, whole, gate, tmp_path):
    dice = random.Random(11)
    run = tmp_path / "two ranks"
    command = ["submit", *RUN, *RANKS, f"run.root={tmp_path}"]
    gate(2)
    slurm.creditgraph(*command, cwd=tmp_path)
    job = slurm.job(run)
    log = run / "logs" / f"job-{job}.log"
    slurm.wait("the first iteration", lambda: iterations_done(run) == 1, run)
    refuses_a_second_job(slurm, run, job, command, tmp_path)

    # Preempted anywhere in an iteration: both ranks save, and the script's job is back in the queue.
    time.sleep(dice.random())
    slurm.call("scontrol", "requeue", job)
    slurm.wait("both ranks received the signal", lambda: stopping(run, job) == {"0", "1"}, run)
    gate(5)
    slurm.requeued(job, 1)
    slurm.wait("five iterations", lambda: iterations_done(run) == 5, run)
    assert log.read_text().count("stop signal: the learner finishes its iteration and saves") == 1
    assert log.read_text().count("] saved; back in the queue") == 1  # both ranks ended with 75, none was killed

    # A rank is killed: the job names it and goes on inside its allocation, from iteration 3; iteration 4 is lost.
    for pid in processes(job, "SLURM_PROCID=1", "SLURM_STEP_NUM_TASKS=2"):
        os.kill(pid, signal.SIGKILL)
    gate(7)  # the other rank goes on to where it needs the dead one
    slurm.wait("the restart", lambda: "] start 1.1 of the learner on node1 node2, from 000003" in log.read_text(), run)
    assert "the learner ended with 137: " in log.read_text()
    assert "rank 1 died without reporting an error (killed, or out of memory?)" in log.read_text()
    slurm.wait("seven iterations", lambda: iterations_done(run) == 7, run)
    shown = slurm.creditgraph("status", str(run), "--logs", cwd=tmp_path).stdout
    assert f"── learner-{job}-1.1-" in shown
    assert f"── learner-{job}-1-" not in shown
    assert f"── learner-{job}-0-" not in shown

    # The second node is lost: the spare one takes its place.
    slurm.node("crash", "node2")
    gate(9)
    slurm.wait("rank 0's end", lambda: "node1: task 0: Exited" in log.read_text().partition("start 1.1")[2], run)
    slurm.call("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=crash")  # seen by itself a minute later
    slurm.wait("the spare", lambda: "] start 1.2 of the learner on node1 node3, from 000005" in log.read_text(), run)
    assert "] node2 does not answer; node3 takes its place" in log.read_text()
    slurm.wait("nine iterations", lambda: iterations_done(run) == 9, run)
    assert slurm.state(job)["Restarts"] == "1"

    # The first node, and the script with it: another node puts the job back.
    slurm.node("crash", "node1")
    slurm.call("scontrol", "update", "NodeName=node1", "State=DOWN", "Reason=crash")
    gate(1 << 20)
    lost = "] node1 is lost, and the script of the job with it; back in the queue"
    slurm.wait("the guard", lambda: lost in log.read_text(), run)
    assert "forcing job termination" not in log.read_text().partition("start 1.2")[2]  # nothing on node1 saw the crash
    for node in ("node1", "node2"):
        slurm.node("boot", node)
    slurm.requeued(job, 2)
    slurm.finished(run, job)
    assert digest(run, ITERATIONS) == whole
    assert [row["iteration"] for row in metrics(run)] == list(range(ITERATIONS + 1))
    assert "continuing after iteration 7" in next((run / "logs").glob(f"learner-{job}-2-*.log")).read_text()
    status = slurm.creditgraph("status", str(run), cwd=tmp_path).stdout
    assert "completed" in status
    assert "2 restarts" in status
    assert status.rstrip().endswith("finished")


def test_a_learner_that_dies_again_before_it_has_saved_ends_the_job(slurm, tmp_path):
    alone = ["cluster.ranks_per_node=1", "cluster.learner_restarts=1", "prompts.use=gates:DyingPrompts"]
    slurm.creditgraph("submit", *RUN, *CPU_NODE, *alone, f"run.root={tmp_path}", cwd=tmp_path)
    run = tmp_path / "two ranks"
    job = slurm.job(run)
    slurm.wait("the end", lambda: (run / "ended").exists())
    log = (run / "logs" / f"job-{job}.log").read_text()
    assert log.count("the learner ended with 1: ") == 2
    assert log.count("] start 0.1 of the learner on node1, from the beginning") == 1
    assert (
        (run / "ended").read_text().startswith("failed: the learner ended with 1: RuntimeError: as ordered; its log: ")
    )
