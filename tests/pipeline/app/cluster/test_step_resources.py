"""Memory, processor cores, copies and containers of a job's steps, with a real SLURM where one can be had."""

import shlex
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
from slurm_jobs import CPU_NODE, TOYS, last_line

from creditgraph.components.models.load import resolve_model_path
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.cluster.render import Job, render_job
from creditgraph.pipeline.app.cluster.settings import Cluster
from creditgraph.pipeline.core.errors import GraphError

on_slurm = pytest.mark.xdist_group("slurm")
STAND_IN = TOYS / "stand_in.sh"
STEPS = [
    "recipe=toy_grpo",
    "engine=vllm",
    "cluster=disaggregated",
    "cluster.nodes=1",
    "cluster.engine_nodes=0",
    "cluster.gpus_per_node=0",
    "cluster.ranks_per_node=2",
    "cluster.servers_per_node=2",
    "cluster.cpus_per_task=1",
    f"cluster.python={STAND_IN}",
]


@on_slurm
@pytest.mark.parametrize("memory", ["cluster.partition=pernode", "cluster.memory=1G"])
def test_steps_of_a_job_with_memory_per_node_run_side_by_side(slurm, tmp_path, monkeypatch, memory):
    """Without --mem=0 the first step has the memory of the node, and the ranks wait for engines that cannot start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CREDITGRAPH_TEST_PLACE", str(tmp_path))
    assert main(["submit", *STEPS, memory, f"run.root={tmp_path}", "run.name=beside"]) == 0
    run = tmp_path / "beside"
    slurm.wait("the end", lambda: (run / "ended").exists())
    assert (run / "ended").read_text() == "finished\n"
    ranks = [
        dict(x.split("=", 1) for x in (tmp_path / f"rank-{i}").read_text().split("\n") if "=" in x) for i in (0, 1)
    ]
    assert [rank["SLURM_NTASKS_PER_NODE"] for rank in ranks] == ["2", "2"]
    assert [rank["SLURM_DISTRIBUTION"] for rank in ranks] == ["block:block"] * 2


@pytest.fixture
def small_environment(tmp_path, monkeypatch):
    """An environment of a few files that has the packages of this one, which are gigabytes."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    packages = sysconfig.get_path("purelib")
    own = sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    Path(own, "packages.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
    monkeypatch.setattr("sys.prefix", str(folder))
    monkeypatch.setattr("sys.executable", str(folder / "bin" / "python"))


@on_slurm
def test_a_run_from_copies_on_the_nodes_own_disk(slurm, tmp_path, monkeypatch, small_environment):
    monkeypatch.chdir(tmp_path)
    scratch = tmp_path / "local disk"
    scratch.mkdir()
    run = tmp_path / "copied"
    settings = ["recipe=toy_grpo", "prompts.batch=2", "evaluator.num_problems=2", "run.iterations=1"]
    own = [*CPU_NODE, "cluster.ranks_per_node=1", f"cluster.scratch={scratch}"]
    assert main(["submit", *settings, *own, f"run.root={tmp_path}", "run.name=copied", "cluster.sbatch=[--hold]"]) == 0
    # Both copies are used: the model's original is no model, and the environment's Python is that of the copy.
    script = (run / "job.sh").read_text()
    assert '"$scratch/environment/bin/python" -P -m creditgraph train' in script
    slurm.call("scontrol", "release", slurm.job(run))
    slurm.wait("the end", lambda: (run / "ended").exists())
    assert (run / "ended").read_text() == "finished\n"
    job = slurm.job(run)
    assert (
        f"copying to {scratch}/creditgraph-{job}: environment, model" in (run / "logs" / f"job-{job}.log").read_text()
    )
    assert list(scratch.iterdir()) == []


@on_slurm
def test_a_disk_without_room_ends_the_job_with_the_reason(slurm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    own = [*CPU_NODE, "cluster.ranks_per_node=1", f"cluster.scratch={tmp_path}/file"]
    assert main(["submit", "recipe=toy_grpo", *own, f"run.root={tmp_path}", "run.name=full"]) == 0
    run = tmp_path / "full"
    slurm.wait("the end", lambda: (run / "ended").exists())
    ended = (run / "ended").read_text().strip()
    assert ended.startswith(f"failed: no copy in {tmp_path}/file/creditgraph-{slurm.job(run)}: ")
    assert ended.endswith("expected a folder on every node with room for it, see cluster.scratch")
    assert last_line(run / "logs" / f"job-{slurm.job(run)}.log") == ended


def test_the_model_is_read_from_the_copy(monkeypatch, tmp_path):
    monkeypatch.setenv("CREDITGRAPH_MODEL_COPY", f"tiny={tmp_path}/model")
    assert resolve_model_path("tiny") == f"{tmp_path}/model"
    monkeypatch.setenv("CREDITGRAPH_MODEL_COPY", f"other={tmp_path}/model")
    assert resolve_model_path("tiny").endswith("components/models/tiny")


def step(script, what):
    """The command of the step that runs `what`, its lines joined."""
    joined = script.replace("\\\n", " ")
    return next(line for line in joined.splitlines() if f"creditgraph {what}" in line)


def test_a_container_has_its_own_python_and_sees_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job(title="run", run=tmp_path / "runs" / "run", command="train recipe=toy_grpo")
    own = {"container": "/images/cg.sif", "python": "/opt/env/bin/python", "mounts": "/data:/data"}
    seen = f"{tmp_path}:{tmp_path},{tmp_path}/runs:{tmp_path}/runs,/data:/data"
    words = shlex.split(step(render_job(job, Cluster(**own)), "train"))
    assert f"--container-mounts={seen}" in words
    assert f"--container-workdir={tmp_path}" in words
    assert words[words.index("-m") - 2 :][:5] == ["/opt/env/bin/python", "-P", "-m", "creditgraph", "train"]
    words = shlex.split(step(render_job(job, Cluster(**own, container_runtime="apptainer")), "train"))
    assert not [word for word in words if word.startswith("--container")]
    inside = words[words.index("apptainer") :]
    binds = [part for mount in seen.split(",") for part in ("--bind", mount)]
    image = ["--pwd", str(tmp_path), "/images/cg.sif", "/opt/env/bin/python", "-P", "-m", "creditgraph", "train"]
    assert inside[: 3 + len(binds) + len(image)] == ["apptainer", "exec", "--nv", *binds, *image]


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_a_container_sees_copies_where_a_shell_fills_in_their_place(tmp_path, monkeypatch, runtime):
    monkeypatch.chdir(tmp_path)
    job = Job(title="run", run=tmp_path / "run", command="train recipe=toy_grpo", model=("tiny", tmp_path))
    cluster = Cluster(
        container="i", python="/py", container_runtime=runtime, scratch="$TMPDIR", scratch_copies=["model"]
    )
    script = render_job(job, cluster)
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False).stderr == ""
    print_words = f'scratch="/a b"; printf "%s\\n" {step(script, "train").rstrip("& ")}'
    shown = subprocess.run(["bash", "-c", print_words], capture_output=True, text=True, check=True).stdout
    assert "/a b:/a b" in shown
    assert 'CREDITGRAPH_MODEL_COPY=tiny="$scratch/model"' in script


def test_networks_and_binding_reach_every_step(tmp_path):
    job = Job(title="run", run=tmp_path / "run", command="train recipe=toy_grpo")
    script = render_job(job, Cluster(nodes=2, interface="ib0", ib_hca="mlx5_0,mlx5_1"))
    for line in ("NCCL_SOCKET_IFNAME=ib0", "GLOO_SOCKET_IFNAME=ib0", "NCCL_IB_HCA=mlx5_0,mlx5_1"):
        assert f"\nexport {line}\n" in script
    words = shlex.split(step(script, "train"))
    assert {"--mem=0", "--ntasks=16", "--ntasks-per-node=8", "--distribution=block:block", "--cpu-bind=cores"} <= {
        *words
    }
    unbound = shlex.split(step(render_job(job, Cluster(cpu_bind="")), "train"))
    assert not [word for word in unbound if word.startswith(("--cpu-bind", "--distribution"))]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"container": "i"}, "container, but no python"),
        ({"scratch": "/local", "python": "/py"}, "scratch copies the environment that submits, but the steps run /py"),
    ],
)
def test_settings_that_contradict_each_other(settings, said):
    with pytest.raises((ValueError, GraphError), match=said):
        Cluster(**settings)


def test_a_model_that_is_not_here_cannot_be_copied(tmp_path, capsys):
    settings = [
        "recipe=grpo_qwen3_4b",
        f"run.root={tmp_path}",
        "cluster=one_node",
        "cluster.scratch=/local",
        "--dry-run",
    ]
    assert main(["submit", *settings]) == 2
    assert (
        "is not in the hub's cache of this machine, so nodes cannot copy it. Download it with"
        in capsys.readouterr().err
    )
