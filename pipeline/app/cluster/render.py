"""sbatch scripts from a checked experiment and a cluster description."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from creditgraph.pipeline import ROOT
from creditgraph.pipeline.app.cluster.settings import Cluster
from creditgraph.pipeline.app.cluster.slurm import ENDED, Kind

if TYPE_CHECKING:
    import jinja2

TEMPLATES = ROOT / "slurm"
SCRATCH = "$scratch"  # variable of the job's script: where a node has its copies


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job to submit.

    Attributes:
        title: title for users: the run's name.
        run: absolute path of the run directory, in a folder shared by all nodes.
        command: arguments of `creditgraph` that every learner rank runs, as one shell line.
        overrides: those of the training command, which an engine server reads too, as one shell line.
        kind: "job" trains, "eval" evaluates.
        model: model.path of the run, and the folder with its files, which `cluster.scratch` copies; None: no copy.
    """

    title: str
    run: Path
    command: str
    overrides: str = ""
    kind: Kind = "job"
    model: tuple[str, Path] | None = None

    @property
    def script(self) -> Path:
        """The rendered script."""
        return self.run / f"{self.kind}.sh"


def render_job(job: Job, cluster: Cluster) -> str:
    """The text of the job's script."""
    return _template(f"{job.kind}.sh.jinja").render(
        title=_one_line(job.title),
        script=str(job.script),
        run=str(job.run),
        kind=job.kind,
        ended=ENDED[job.kind],
        cwd=os.getcwd(),
        options=sbatch_options(job, cluster),
        cluster=cluster,
        servers=cluster.servers,
        environment=environment(cluster),
        python=shlex.quote(sys.executable),
        creditgraph=step_command(job, cluster),
        command=job.command,
        overrides=job.overrides,
        srun=srun_command(job, cluster),
        host_srun=srun_command(job, replace(cluster, container="")),
        copies=scratch_copies(job, cluster),
        model=job.model[0] if job.model else "",
    )


def render_array(title: str, jobs: Sequence[Job], cluster: Cluster, log: Path) -> str:
    """A script that runs one job of a list per array task."""
    # All runs have the cluster's options; name and log are the array's, as each task appends to the log of its run.
    options = [o for o in sbatch_options(jobs[0], cluster) if not o.startswith(("--job-name", "--output", "--array"))]
    options = [
        f"--job-name={job_name(title)}",
        _output(log / "array-", "%A_%a"),
        f"--array=0-{len(jobs) - 1}",
        *options,
    ]
    return _template("array.sh.jinja").render(
        title=_one_line(title), options=options, scripts=[str(j.script) for j in jobs]
    )


def sbatch_options(job: Job, cluster: Cluster) -> list[str]:
    """Options of sbatch, one per #SBATCH line."""
    # Tasks are counted per node: servers on the nodes of ranks need additional tasks, those on other nodes do not.
    servers = cluster.servers // (cluster.engine_nodes or cluster.nodes)
    ranks = cluster.ranks // cluster.nodes
    tasks = max(ranks, servers) if cluster.engine_nodes else ranks + servers
    options = [
        f"--job-name={job_name(job.title, job.run if cluster.chain > 1 else None)}",
        _output(job.run / "logs" / f"{job.kind}-", "%j"),
        "--open-mode=append",  # otherwise a requeued job would overwrite its log
        "--requeue",
        "--no-kill",  # a lost node does not end the others: the script replaces it
        f"--nodes={cluster.all_nodes}",
        f"--ntasks-per-node={tasks}",
        f"--cpus-per-task={cluster.cpus_per_task}",
        f"--time={cluster.time}",
    ]
    # To the batch shell only (B:): it forwards the signal to the learner, and decides whether to requeue the job.
    options += [f"--signal=B:USR1@{cluster.warn_seconds}"] if cluster.warn_seconds else []
    options += [f"--gpus-per-node={cluster.gpus_per_node}"] if cluster.gpus_per_node else []
    for name, value in (
        ("mem", cluster.memory),
        ("partition", cluster.partition),
        ("account", cluster.account),
        ("qos", cluster.qos),
    ):
        options += [f"--{name}={value}"] if value else []
    options += ["--dependency=singleton"] if cluster.chain > 1 else []
    return [*options, *cluster.sbatch]


def environment(cluster: Cluster) -> dict[str, str]:
    """Variables of every step; those of the cluster file come last and override others."""
    # Unbuffered, Python writes a line in pieces, and srun puts the rank in front of each. Rust tokenizers in forked
    # processes would warn of a deadlock. Two threads of a CPU rank that compete for a core were measured to be 10 to
    # 20 times slower than one.
    variables = {
        "PYTHONUNBUFFERED": "",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1" if not cluster.gpus_per_node else "8",
    }
    if cluster.interface:
        variables |= {"NCCL_SOCKET_IFNAME": cluster.interface, "GLOO_SOCKET_IFNAME": cluster.interface}
    if cluster.ib_hca:
        variables["NCCL_IB_HCA"] = cluster.ib_hca
    return variables | cluster.environment


def srun_command(job: Job, cluster: Cluster) -> str:
    """srun with the options of every step."""
    # --exact: a step uses only the cores and GPUs it requests and leaves the others to parallel steps.
    # --mem=0: all steps share the job's memory; a limit per node, of the job or of the partition, would otherwise go to
    # the first step whole, and the others would wait for it.
    parts = ["srun", "--exact", "--mem=0", "--export=ALL"]
    parts += ["--distribution=block:block", f"--cpu-bind={cluster.cpu_bind}"] if cluster.cpu_bind else []
    if cluster.container and cluster.container_runtime == "pyxis":
        parts += [f"--container-image={cluster.container}", f"--container-mounts={','.join(mounts(job, cluster))}"]
        parts += [f"--container-workdir={os.getcwd()}"]
    return _shell(parts)


def step_command(job: Job, cluster: Cluster) -> str:
    """What starts creditgraph in a step."""
    if "environment" in scratch_copies(job, cluster):
        # The scripts of a copied environment still name the Python of the original.
        return '"$scratch/environment/bin/python" -P -m creditgraph'
    if not cluster.python:
        return creditgraph_command()
    # -P: a folder of the working directory is not taken for one of the installation.
    command = ["-P", "-m", "creditgraph"]
    if cluster.container and cluster.container_runtime == "apptainer":
        gpus = ["--nv"] if cluster.gpus_per_node else []
        binds = [part for mount in mounts(job, cluster) for part in ("--bind", mount)]
        command = [
            "apptainer",
            "exec",
            *gpus,
            *binds,
            "--pwd",
            os.getcwd(),
            cluster.container,
            cluster.python,
            *command,
        ]
    else:
        command = [cluster.python, *command]
    return _shell(command)


def mounts(job: Job, cluster: Cluster) -> list[str]:
    """Mounts of the container: working directory, folder of runs, scratch, and those of the cluster file."""
    scratch = [SCRATCH] if scratch_copies(job, cluster) else []
    places = dict.fromkeys((os.getcwd(), str(job.run.parent), *scratch))
    return [*(f"{place}:{place}" for place in places), *(m for m in cluster.mounts.split(",") if m)]


def _shell(words: Sequence[str]) -> str:
    """Words of a command as a shell reads them, with the place of scratch copies filled in."""
    return " ".join(map(shlex.quote, words)).replace(SCRATCH, f"'\"{SCRATCH}\"'")


def scratch_copies(job: Job, cluster: Cluster) -> dict[str, Path]:
    """What each node copies to `cluster.scratch`: name of the copy → folder."""
    if not cluster.scratch:
        return {}
    folders = {"environment": Path(sys.prefix), "model": job.model[1] if job.model else None}
    return {name: folder for name in cluster.scratch_copies if (folder := folders[name])}


def creditgraph_command() -> str:
    """The command that runs this installation on another node."""
    # Unlike `python -m`, a script does not put the working directory before this installation.
    script = Path(sys.executable).with_name("creditgraph")
    return shlex.quote(str(script)) if script.exists() else f"{shlex.quote(sys.executable)} -m creditgraph"


def job_name(title: str, run: Path | None = None) -> str:
    """A name for squeue: no spaces, at most 64 characters.

    Jobs of a chain wait for the others of their name, so `run` makes it the run's own.
    """
    own = "" if run is None else f"-{hashlib.sha256(str(run).encode()).hexdigest()[:8]}"
    return ("".join(c if c.isalnum() or c in "-_.=+" else "_" for c in title)[: 64 - len(own)] or "creditgraph") + own


def _output(start: Path, ids: str) -> str:
    # sbatch reads quotes, and fills in what follows a percent sign.
    path = str(start).replace("%", "%%")
    return f'--output="{path}{ids}.log"' if " " in path else f"--output={path}{ids}.log"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _template(name: str) -> jinja2.Template:
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        # "{#" begins a comment in Jinja and ends "${#array[@]}" in a shell.
        comment_start_string="{##",
        comment_end_string="##}",
    )
    templates.filters["quote"] = lambda value: shlex.quote(str(value))
    return templates.get_template(name)
