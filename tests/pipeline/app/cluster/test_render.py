"""Rendered job scripts: their options, and that a shell reads them."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.cluster.render import Job, job_name, render_array, render_job, sbatch_options
from creditgraph.pipeline.app.cluster.settings import Cluster


def job(tmp_path, title="toy run"):
    return Job(title=title, run=tmp_path / "a run", command="train recipe=toy_grpo", overrides="recipe=toy_grpo")


CLUSTERS = {
    "cpu": Cluster(gpus_per_node=0, ranks_per_node=2),
    "disaggregated": Cluster(
        placement="disaggregated",
        nodes=2,
        engine_nodes=1,
        gpus_per_server=4,
        interface="ib0",
        setup=["module load cuda"],
    ),
    "container": Cluster(
        container="/images/cg.sqsh",
        python="/opt/env/bin/python",
        mounts="/data:/data",
        sbatch=["--exclusive"],
        chain=3,
        partition="gpu",
        account="me",
    ),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_shell_reads_the_script(name, tmp_path):
    text = render_job(job(tmp_path), CLUSTERS[name])
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False).stderr == ""
    assert "{{" not in text
    assert "{%" not in text
    evaluation = render_job(replace(job(tmp_path), kind="eval"), CLUSTERS[name])
    assert subprocess.run(["bash", "-n"], input=evaluation, text=True, capture_output=True, check=False).stderr == ""
    array = render_array("two", [job(tmp_path), job(tmp_path)], CLUSTERS[name], tmp_path)
    assert subprocess.run(["bash", "-n"], input=array, text=True, capture_output=True, check=False).stderr == ""
    assert "#SBATCH --array=0-1" in array


def test_options(tmp_path):
    options = sbatch_options(job(tmp_path), CLUSTERS["disaggregated"])
    assert "--nodes=3" in options
    assert "--ntasks-per-node=8" in options
    assert "--gpus-per-node=8" in options
    assert "--requeue" in options
    assert "--signal=B:USR1@300" in options
    container = sbatch_options(job(tmp_path), CLUSTERS["container"])
    assert {"--dependency=singleton", "--exclusive", "--partition=gpu", "--account=me"} <= set(container)
    # Engines and ranks on one node ask for the places of both.
    shared = Cluster(placement="disaggregated", gpus_per_node=0, ranks_per_node=2, servers_per_node=3)
    assert "--ntasks-per-node=5" in sbatch_options(job(tmp_path), shared)


def test_steps(tmp_path):
    text = render_job(job(tmp_path), CLUSTERS["disaggregated"])
    assert 'for i in {0..1}; do start_engine "$i"; done' in text
    assert "--gpus-per-task=4" in text
    # Every rank sees the GPUs of its node's ranks. Left to itself, each step would ask for all GPUs, as the job did.
    assert "--ntasks=16" in text
    assert text.count("--gpus-per-node=8") == 3  # job, canary, learner
    assert "\nunset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK\n" in text
    assert "module load cuda" in text
    assert "export NCCL_SOCKET_IFNAME=ib0" in text
    assert "--container-image=/images/cg.sqsh" in render_job(job(tmp_path), CLUSTERS["container"])


def test_the_step_of_a_server_over_two_nodes(tmp_path):
    cluster = Cluster(placement="disaggregated", engine_nodes=4, nodes_per_server=2, gpus_per_server=16)
    text = render_job(job(tmp_path), cluster)
    assert 'for i in {0..1}; do start_engine "$i"; done' in text
    step = text[text.index("start_engine() {") :].partition("serve ")[0]
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1" in step
    assert "--gpus-per-task=8 --kill-on-bad-exit=1 $overlap" in step
    assert '--index "$1" --count 2 --nodes 2 &' in text
    assert "--ntasks-per-node=8" in sbatch_options(job(tmp_path), cluster)
    places = text[text.index("places() {") :].partition("\n}\n")[0] + "\n}\n"
    script = f"engine_nodes=(a b c d)\n{places} places 0; places 1"
    assert subprocess.run(["bash", "-c", script], text=True, capture_output=True, check=True).stdout.split() == list(
        "0123"
    )


def test_names_with_spaces_and_quotes(tmp_path):
    assert job_name("my run; rm -rf /") == "my_run__rm_-rf__"
    text = render_job(job(tmp_path, "my run's\nsecond line"), CLUSTERS["cpu"])
    assert "--job-name=my_run_s_second_line" in text
    assert f"run='{tmp_path}/a run'" in text
    assert f'#SBATCH --output="{tmp_path}/a run/logs/job-%j.log"' in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False).stderr == ""


def test_jobs_of_a_chain_have_a_name_of_their_own(tmp_path):
    one, two = (Job(title="srpo", run=tmp_path / root / "srpo", command="train") for root in ("a", "b"))
    names = [sbatch_options(j, CLUSTERS["container"])[0] for j in (one, two)]
    assert names[0] != names[1]
    assert len(job_name("x" * 80, tmp_path)) == 64
    assert sbatch_options(one, CLUSTERS["cpu"])[0] == "--job-name=srpo"
    assert "--output=/runs/100%%/logs/job-%j.log" in sbatch_options(
        Job(title="x", run=Path("/runs/100%"), command=""), CLUSTERS["cpu"]
    )


DISAGGREGATED = ["cluster=disaggregated", "cluster.gpus_per_server=2"]


def test_the_learner_of_a_job_finds_its_servers(tmp_path, capsys):
    recipe = ["recipe=toy_grpo", "engine=vllm", f"run.root={tmp_path}", "run.name=apart"]
    assert main(["submit", *recipe, *DISAGGREGATED, "--dry-run"]) == 0
    script = capsys.readouterr().out
    run = tmp_path / "apart"
    for setting in (
        f"rendezvous={run}/servers",
        "servers=0",
        f"channel.path={run}/weights",
        "channel.kind=broadcast",
        "tensor_parallel=2",
    ):
        assert script.count(f"engine.{setting} ") == 2  # the servers read the learner's settings
    assert "engine.pool.start_seconds=900 " in script
    assert (run / "weights").is_dir()
    own = ["engine.channel.path=/scratch", "engine.tensor_parallel=4"]
    assert main(["submit", *recipe, *own, *DISAGGREGATED, "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert f"{run}/weights" not in script
    assert "tensor_parallel=2" not in script


def test_an_engine_without_servers_is_refused(tmp_path, capsys):
    assert main(["submit", "recipe=toy_grpo", *DISAGGREGATED, f"run.root={tmp_path}", "--dry-run"]) == 2
    text = capsys.readouterr().err
    assert "cluster.placement=disaggregated: the graph's engine (engine.local) has no servers; expected" in text


def test_a_sweep_of_jobs_has_a_run_directory_each(tmp_path, capsys):
    command = ["submit", "-m", "recipe=toy_grpo", "run.seed=range(0,2)", f"run.root={tmp_path}", "cluster=one_node"]
    assert main([*command, "--dry-run"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / f"toy_grpo-s{seed}" / "job.sh") for seed in (0, 1)]
    assert main([*command, "run.name=one", "--dry-run"]) == 2
    assert f"two runs would share {tmp_path / 'one'}" in capsys.readouterr().err
