"""Submission to a real SLURM: what it refuses, arrays, chains, evaluation, failures and their reasons."""

import json
import os
import subprocess

import pytest
from slurm_jobs import CPU_NODE, ROOT, digest, iterations_done, last_line, metrics, stopping

from creditgraph.pipeline.app.cli import main

pytestmark = pytest.mark.xdist_group("slurm")
RUN = ["recipe=toy_grpo", "prompts.batch=2", "evaluator.num_problems=4", "run.record.every=0", "run.iterations=1"]
ONE = [*CPU_NODE, "cluster.ranks_per_node=1"]
LATER = "cluster.sbatch=[--begin=now+1hour]"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["cluster.partition=nope"], "Choose one of `sinfo` with cluster.partition=NAME"),
        (["cluster.partition=gpu", "cluster.gpus_per_node=16"], "No node has that many GPUs"),
        (["cluster.cpus_per_task=4000"], "No node has that many GPUs, cores"),
        (["cluster.partition=gpu", "cluster.nodes=129"], "sbatch --test-only: "),
        (["cluster.account=nobody", "cluster.sbatch=[--reservation=none]"], "sbatch --test-only: "),
    ],
)
def test_what_slurm_refuses_gets_a_next_step(slurm, folder, capsys, changes, said):
    assert main(["submit", *RUN, *ONE, f"run.root={folder}", *changes]) == 2
    assert said in capsys.readouterr().err
    assert not list(folder.glob("*/job.json"))


def test_a_job_of_128_nodes_passes_the_scheduler(slurm, folder, capsys):
    large = [
        "cluster=disaggregated",
        "engine=vllm",
        "cluster.nodes=64",
        "cluster.engine_nodes=64",
        "cluster.partition=gpu",
    ]
    assert main(["submit", *RUN, *large, f"run.root={folder}", "--dry-run"]) == 0
    script = folder / "job.sh"
    script.write_text(capsys.readouterr().out)
    tried = subprocess.run(["sbatch", "--test-only", script], capture_output=True, text=True, check=False)
    assert tried.returncode == 0, tried.stderr
    assert "fake[1-128]" in tried.stderr + tried.stdout


def test_a_place_that_cannot_be_written(slurm, folder, capsys):
    (folder / "file").write_text("")
    assert main(["submit", *RUN, *ONE, f"run.root={folder}/file"]) == 2
    assert "cannot be written" in capsys.readouterr().err

    # It could be written when the job was submitted, but not where and when the job starts.
    assert main(["submit", *RUN, *ONE, f"run.root={folder}", "run.name=late", "cluster.sbatch=[--hold]"]) == 0
    run = folder / "late"
    (run / "logs").rmdir()
    slurm.call("scontrol", "release", slurm.job(run))
    slurm.wait("the end", lambda: slurm.state(slurm.job(run))["JobState"] == "FAILED")
    capsys.readouterr()
    assert main(["status", str(run)]) == 0
    said = capsys.readouterr().out
    assert "its log could not be opened: the run directory is missing there, or not writable" in said
    assert "submit again with cluster.root=PATH" in said


def test_a_run_directory_that_not_all_nodes_see(slurm, folder):
    run = folder / "alone"
    slurm.node("crash", "node2")
    # From here on this node has an empty folder of its own where the run directories are.
    apart = f"mount -t tmpfs none {folder} && exec slurmd -N node2"
    if subprocess.run(["unshare", "--mount", "bash", "-c", apart], check=False).returncode:
        slurm.node("boot", "node2")
        pytest.skip("no mount namespaces here")
    try:
        slurm.wait(
            "node2", lambda: slurm.call("sinfo", "-h", "-n", "node2", "-p", "main", "-o", "%T").strip() == "idle"
        )
        assert main(["submit", *RUN, *ONE, "cluster.nodes=2", f"run.root={folder}", "run.name=alone"]) == 0
        slurm.wait("the end", lambda: (run / "ended").exists())
    finally:
        slurm.node("crash", "node2")
        slurm.node("boot", "node2")
    ended = (run / "ended").read_text().strip()
    assert ended.startswith("canary failed: node2: FAIL ")
    assert ended.endswith(
        f"{run}: not there on this node; expected a folder shared by all nodes: set cluster.root=PATH to one"
    )
    assert last_line(run / "logs" / f"job-{slurm.job(run)}.log") == ended


def test_a_chain_waits_its_turn_and_is_cancelled_whole(slurm, folder, capsys):
    assert main(["submit", *RUN, *ONE, "cluster.chain=3", f"run.root={folder}", "run.name=a chain", LATER]) == 0
    run = folder / "a chain"
    jobs = json.loads((run / "job.json").read_text())["jobs"]
    assert len(jobs) == 3
    assert all(slurm.state(job)["Dependency"].startswith("singleton") for job in jobs[1:])
    assert len({slurm.state(job)["JobName"] for job in jobs}) == 1
    assert main(["submit", *RUN, *ONE, f"run.root={folder}", "run.name=a chain"]) == 2
    assert "Two jobs must not share a run" in capsys.readouterr().err
    assert main(["cancel", str(run)]) == 0
    assert {slurm.state(job)["JobState"] for job in jobs} == {"CANCELLED"}


def test_where_requeue_is_off_the_next_of_a_chain_goes_on(slurm, folder, gate):
    run = folder / "links"
    settings = [*RUN, "prompts.use=gates:GatedPrompts", "run.iterations=3", "run.checkpoint.every=1"]
    chain = ["cluster.chain=2", "cluster.sbatch=[--no-requeue]", f"run.root={folder}", "run.name=links"]
    gate(1)
    assert main(["submit", *settings, *ONE, *chain]) == 0
    first, second = json.loads((run / "job.json").read_text())["jobs"]
    slurm.wait("one iteration", lambda: iterations_done(run) == 1, run)
    slurm.call("scancel", "--signal=USR1", "--batch", first)
    slurm.wait("the signal", lambda: stopping(run, first) == {"0"}, run)  # else the run may be over before it
    gate(1 << 20)
    slurm.wait("the first job's end", lambda: slurm.state(first)["JobState"] == "FAILED")
    said = last_line(run / "logs" / f"job-{first}.log")
    assert said == "saved; not put back into the queue (cancelled, or requeue is off): submit again to continue"
    assert main(["train", *settings, f"run.root={folder}", "run.name=whole"]) == 0
    slurm.wait("the second job's end", lambda: slurm.state(second)["JobState"] == "COMPLETED")
    assert (run / "ended").read_text() == "finished\n"
    assert [row["iteration"] for row in metrics(run)] == [0, 1, 2, 3]
    assert digest(run, 3) == digest(folder / "whole", 3)


def test_an_array_of_a_good_and_a_failing_run_and_an_evaluation(slurm, folder, capsys):
    # A finished run is evaluated by a job, beside the others.
    assert main(["train", *RUN, f"run.root={folder}", "run.name=done"]) == 0
    done = folder / "done"
    # One process evaluates, whatever the cluster has for engines.
    wide = [
        "cluster=disaggregated",
        "cluster.engine_nodes=4",
        "cluster.nodes_per_server=2",
        "cluster.gpus_per_server=16",
    ]
    for engines in (wide[:1], wide):
        assert main(["submit", "--eval", str(done), *engines, "--dry-run"]) == 0
        assert "#SBATCH --nodes=1\n" in capsys.readouterr().out
    assert main(["submit", "--eval", str(done), "evaluator.num_problems=6", *ONE]) == 0

    # The configuration of both runs is sound; the model's folder of one is damaged between submission and start.
    model = folder / "model"
    model.mkdir()
    for file in (ROOT / "components/models/tiny").iterdir():
        if file.is_file():
            (model / file.name).write_bytes(file.read_bytes())
    capsys.readouterr()
    array = [f"model.path=tiny,{model}", f"run.root={folder}", "cluster.sbatch=[--hold]"]
    assert main(["submit", "-m", *RUN, *ONE, *array]) == 0
    said = capsys.readouterr().out
    assert "2 runs below" in said
    good, bad = sorted(p for p in folder.glob("toy_grpo-*") if (p / "job.json").exists())
    if "path=tiny" not in good.name:
        good, bad = bad, good
    (model / "model.safetensors").write_bytes(b"cut short")
    slurm.call("scontrol", "release", slurm.job(good).partition("_")[0])

    slurm.wait("both runs", lambda: all((run / "ended").exists() for run in (good, bad)))
    assert (good / "ended").read_text() == "finished\n"
    ended = (bad / "ended").read_text().strip()
    assert ended.startswith("failed: the learner ended with 2: creditgraph train: ")
    assert any(last_line(log) == ended for log in (bad / "logs").glob("job-*.log"))
    assert main(["status", str(good), "--logs", "job"]) == 0
    assert "finished" in capsys.readouterr().out

    slurm.wait("the evaluation", lambda: (done / "eval-ended").exists())
    assert (done / "eval-ended").read_text().startswith("evaluated: wrote ")
    assert "evaluator/accuracy" in (done / "eval.json").read_text()
    assert not (done / "job.json").exists()
    assert main(["status", str(done)]) == 0
    assert "(evaluation, cluster one_node)" in capsys.readouterr().out


def test_clocks_that_differ_confuse_neither_status_nor_logs(slurm, folder, capsys):
    assert main(["submit", *RUN, *ONE, f"run.root={folder}", "run.name=skewed", LATER]) == 0
    run, job = folder / "skewed", slurm.job(folder / "skewed")
    metrics = run / "metrics.jsonl"
    metrics.write_text('{"iteration": 0}\n')
    now = metrics.stat().st_mtime
    for start, written in ((0, now + 7200), (1, now - 7200)):  # the newer start on the node whose clock is behind
        log = run / "logs" / f"learner-{job}-{start}-node{start}.log"
        log.write_text(f"start {start}\n")
        os.utime(log, (written, written))
    os.utime(metrics, (now + 7200, now + 7200))
    capsys.readouterr()
    assert main(["status", str(run)]) == 0
    said = capsys.readouterr().out
    assert "iteration 0 done" in said
    assert "; its file is dated 7" in said
    assert "s in the future: compare clocks with `creditgraph doctor --shared" in said
    assert main(["status", str(run), "--logs"]) == 0
    said = capsys.readouterr().out
    assert "start 1" in said
    assert "start 0" not in said
    # A job that was refused the run leaves a log with a higher number.
    (run / "logs" / f"job-{int(job) + 1}.log").write_text("refused\n")
    (run / "holder").write_text(f"{job}\n")
    assert main(["status", str(run), "--logs"]) == 0
    said = capsys.readouterr().out
    assert "start 1" in said
    assert "refused" not in said
    assert main(["cancel", str(run)]) == 0
