"""Submission to a real SLURM: runs, refusals, preemption."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

CG = [sys.executable, "-m", "pipeline.cli"]
ROOT = Path(__file__).parents[3]
RUN = ["recipe=toy_grpo", "prompts.batch=2", "evaluator.num_problems=4", "run.wandb.mode=disabled", "run.checkpoint.every=2"]
ONE = ["cluster=one_node", "cluster.gpus_per_node=0", "cluster.ranks_per_node=1", "cluster.cpus_per_task=1", "cluster.warn_seconds=60"]


def creditgraph(*arguments, cwd, check=True):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*CG, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def job_of(run):
    return json.loads((run / "job.json").read_text())["jobs"][0]


def state_of(job):
    text = subprocess.run(["scontrol", "-o", "show", "job", job], capture_output=True, text=True, check=True).stdout
    return dict(part.partition("=")[::2] for part in text.split() if "=" in part)


def wait(what, condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def iterations_done(run):
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def digest(run, iterations):
    newest = run / "checkpoints" / f"{iterations - 1:06d}"
    return {name: hashlib.sha256((newest / name).read_bytes()).hexdigest() for name in ("tensors.safetensors", "state.json")}


def test_preempted_twice_it_ends_with_the_same_bytes(slurm, tmp_path):
    settings = [*RUN, "run.iterations=40"]
    whole = tmp_path / "whole" / "toy"
    creditgraph("train", *settings, f"run.root={whole.parent}", "run.name=toy", cwd=tmp_path)

    run = tmp_path / "cut" / "toy"
    said = creditgraph("submit", *settings, *ONE, f"run.root={run.parent}", "run.name=toy", cwd=tmp_path).stdout
    job = job_of(run)
    assert f"submitted {job}: toy" in said
    # A second submission is told who has the run.
    second = creditgraph("submit", *settings, *ONE, f"run.root={run.parent}", "run.name=toy", cwd=tmp_path, check=False)
    assert second.returncode == 2
    assert f"job {job} of this run is" in second.stderr

    wait("first iterations", lambda: iterations_done(run) >= 3)
    subprocess.run(["scontrol", "requeue", job], check=True)  # what a scheduler does to preempt
    wait("requeue", lambda: state_of(job)["JobState"] == "PENDING" and state_of(job)["Restarts"] == "1")
    before = iterations_done(run)
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)
    wait("second start", lambda: iterations_done(run) >= before + 2)
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)  # what SLURM sends before the time limit
    wait("second requeue", lambda: state_of(job)["JobState"] == "PENDING" and state_of(job)["Restarts"] == "2")
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)
    wait("the end", lambda: state_of(job)["JobState"] == "COMPLETED")

    assert digest(run, 40) == digest(whole, 40)
    assert [json.loads(x)["iteration"] for x in (run / "metrics.jsonl").read_text().splitlines()] == list(range(41))
    status = creditgraph("status", str(run), cwd=tmp_path).stdout
    assert "completed" in status
    assert "2 restarts" in status
    assert status.rstrip().endswith("finished")
    assert "run directory" in creditgraph("logs", str(run), "learner", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["cluster.partition=nope"], "Choose one of `sinfo` with cluster.partition=NAME"),
        (["cluster.partition=gpu", "cluster.gpus_per_node=16"], "No node has that many GPUs"),
        (["cluster.cpus_per_task=4000"], "No node has that many GPUs, cores"),
    ],
)
def test_what_slurm_refuses_gets_a_next_step(slurm, tmp_path, changes, said):
    done = creditgraph("submit", *RUN, *ONE, f"run.root={tmp_path}", *changes, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert not list(tmp_path.glob("*/job.json"))


def test_a_job_of_128_nodes_passes_the_scheduler(slurm, tmp_path):
    text = creditgraph(
        "submit", *RUN, "cluster=colocated", "cluster.nodes=128", "cluster.partition=gpu", f"run.root={tmp_path}", "--dry-run", cwd=tmp_path
    ).stdout
    script = tmp_path / "job.sh"
    script.write_text(text)
    tried = subprocess.run(["sbatch", "--test-only", script], capture_output=True, text=True, check=False)
    assert tried.returncode == 0, tried.stderr
    assert "fake[1-128]" in tried.stderr + tried.stdout


def test_an_unwritable_place_is_told_before_anything_is_submitted(slurm, tmp_path):
    (tmp_path / "file").write_text("")
    done = creditgraph("submit", *RUN, *ONE, f"run.root={tmp_path}/file", cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "cannot be written" in done.stderr


def test_an_array_runs_every_combination(slurm, tmp_path):
    said = creditgraph("submit", "-m", *RUN, "run.iterations=1", "run.seed=0,1", *ONE, f"run.root={tmp_path}", cwd=tmp_path).stdout
    assert "2 runs below" in said
    runs = [tmp_path / f"toy_grpo-batch=2-num_problems=4-s{seed}" for seed in (0, 1)]
    wait("both runs", lambda: all((run / "ended").exists() for run in runs))
    assert [(run / "ended").read_text() for run in runs] == ["finished\n", "finished\n"]


def test_a_failing_learner_ends_the_job_with_its_reason(slurm, tmp_path):
    # The configuration is sound; the model's folder vanishes between submission and start.
    model = tmp_path / "model"
    model.mkdir()
    for file in (ROOT / "components/models/tiny").iterdir():
        if file.is_file():
            (model / file.name).write_bytes(file.read_bytes())
    creditgraph(
        "submit", *RUN, *ONE, f"model.path={model}", "cluster.sbatch=[--hold]", f"run.root={tmp_path}", "run.name=bad", cwd=tmp_path
    )
    run = tmp_path / "bad"
    (model / "model.safetensors").write_bytes(b"cut short")
    subprocess.run(["scontrol", "release", job_of(run)], check=True)
    wait("the end", lambda: (run / "ended").exists())
    ended = (run / "ended").read_text()
    assert ended.startswith("failed: the learner exited with 2: ")
    assert "creditgraph train: " in ended
    log = (run / "logs" / f"job-{job_of(run)}.log").read_text()
    assert log.rstrip().splitlines()[-1].endswith(ended.strip())
