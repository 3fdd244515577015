"""`creditgraph submit`: composes, checks and renders a job, and submits it to SLURM."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from creditgraph.components.models.gpus import DEVICES
from creditgraph.pipeline.app.arguments import OVERRIDES_HELP, add_overrides
from creditgraph.pipeline.app.cluster.render import Job, creditgraph_command, render_array, render_job
from creditgraph.pipeline.app.cluster.settings import Cluster, load_cluster, split_overrides
from creditgraph.pipeline.app.cluster.slurm import ENDED, Note, sbatch, submitting, test_only
from creditgraph.pipeline.app.sweep import check_distinct, combinations
from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.run.compose.choices import list_choices, search_dirs
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose
from creditgraph.pipeline.run.run_directory import check_run, make_folder, write_aside, writing

SUMMARY = "Check a recipe, render its SLURM job and submit it."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "examples:\n"
        "  creditgraph submit recipe=srpo_qwen2_5_14b_instruct cluster=disaggregated cluster.partition=gpu --dry-run\n"
        "  creditgraph submit -m recipe=toy_grpo,toy_srpo run.seed=0,1,2 cluster=one_node\n"
        "  creditgraph submit --eval runs/toy_srpo-s0 cluster=one_node\n"
        f"{OVERRIDES_HELP}"
    )
    add_overrides(parser)
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="one job array over every combination of values (key=a,b)"
    )
    parser.add_argument("--eval", dest="evaluate", metavar="RUN", help="evaluate a run instead of training")
    parser.add_argument("--dry-run", action="store_true", help="write and print the script; submit nothing")


def main(options: argparse.Namespace) -> int:
    """Submits one run, an array of them, or the evaluation of a run."""
    name, own, rest = split_overrides(options.overrides)
    cluster = load_cluster(name or "one_node", own, options.config_dir)
    if not options.evaluate and "gpus_per_node" not in own:
        cluster = without_gpus(cluster, rest, options)
    if options.evaluate:
        jobs = [evaluation(Path(options.evaluate), rest, options.config_dir)]
        # An evaluation is one process, which starts its own engine server if it uses one.
        cluster = replace(
            cluster,
            placement="here" if cluster.placement == "here" else "colocated",
            nodes=1,
            ranks_per_node=1,
            engine_nodes=0,
            nodes_per_server=1,
            spare_nodes=0,
            chain=1,
        )
    else:
        chosen = combinations(rest, options.config_dir) if options.multirun else [rest]
        jobs = [training(overrides, cluster, options.config_dir) for overrides in chosen]
        check_distinct([job.run for job in jobs])
    if cluster.placement == "here":
        return run_here(jobs, options.dry_run)
    if options.dry_run:
        for job in jobs:
            text = prepare(job, cluster)
            print(text if len(jobs) == 1 else f"{job.script}")
        return 0
    command = " ".join(["creditgraph submit", *map(shlex.quote, options.overrides)])
    with ExitStack() as held:
        for job in jobs:
            held.enter_context(submitting(job.run, job.kind))  # before its script is touched
            (job.run / ENDED[job.kind]).unlink(missing_ok=True)  # the final message of an earlier job
        for job in jobs:
            prepare(job, cluster)
        if len(jobs) > 1:
            submit_array(jobs, cluster, name, command)
        else:
            submit_one(jobs[0], cluster, name, command)
    return 0


def without_gpus(cluster: Cluster, overrides: Sequence[str], options: argparse.Namespace) -> Cluster:
    """The cluster as a CPU job of one process per node, if it is colocated and every run has run.device=cpu."""
    if cluster.placement != "colocated" or cluster.gpus_per_node == 0:
        return cluster
    chosen = combinations(overrides, options.config_dir) if options.multirun else [overrides]
    devices = {(compose(one, options.config_dir).get("run") or {}).get("device") for one in chosen}
    if devices != {"cpu"}:
        return cluster
    print(
        f"run.device=cpu: the job asks for no GPUs (cluster.gpus_per_node={cluster.gpus_per_node} would).",
        file=sys.stderr,
    )
    return replace(cluster, gpus_per_node=0, ranks_per_node=cluster.ranks_per_node or 1)


def training(overrides: Sequence[str], cluster: Cluster, config_dirs: Sequence[str]) -> Job:
    """The job of one training run; composes and checks the graph for the cluster's number of ranks."""
    overrides = list(overrides)
    if cluster.root:
        overrides.append(f"run.root={cluster.root}")
    experiment = build_experiment(compose(overrides, config_dirs), " ".join(overrides))
    from creditgraph.pipeline.run.distributed.team import DistributedError, Ranks, plan_ranks

    try:
        plan_ranks(experiment.graph, Ranks(world=cluster.ranks))
    except DistributedError as error:
        raise ConfigError(f"{error} In a job, cluster.nodes and cluster.ranks_per_node set their number.") from error
    if cluster.gpu and cluster.gpus_per_node and experiment.run.check_memory:
        from creditgraph.pipeline.app.cluster.memory import check_memory

        size = cluster.gpus_per_server
        check_memory(experiment, DEVICES[cluster.gpu], cluster.ranks, cluster.servers * size, size)
    run = experiment.run_path.resolve()
    if cluster.servers:
        from creditgraph.pipeline.app.cluster.servers import learner_overrides

        overrides += learner_overrides(experiment, cluster, run, overrides)
        # The run is named without these settings, because they determine where it runs, not what it computes.
        overrides.append(f"run.name={experiment.run.name}")
    line = _shell_line([*overrides, *_options(config_dirs)])
    model = model_folder(experiment.model.path) if cluster.scratch and "model" in cluster.scratch_copies else None
    return Job(title=experiment.run.name, run=run, command=f"train {line}", overrides=line, model=model)


def model_folder(path: str) -> tuple[str, Path]:
    """`model.path`, and the folder with its files; ConfigError where they are not on this machine."""
    from creditgraph.components.models.load import cached_file, resolve_model_path

    folder = Path(resolve_model_path(path))
    if not folder.is_dir():
        file = cached_file(path, "config.json")
        if file is None:
            raise ConfigError(
                f"cluster.scratch: model '{path}' is not in the hub's cache of this machine, so nodes cannot copy it. "
                f"Download it with `hf download {path}`, or set cluster.scratch_copies=[environment]."
            )
        folder = file.parent
    return path, folder.resolve()


def evaluation(run: Path, overrides: Sequence[str], config_dirs: Sequence[str]) -> Job:
    """The job that evaluates a finished run; raises an error if the run or the suite does not exist."""
    check_run(run)
    folder = run.resolve()
    known = list_choices("suite", search_dirs(config_dirs))
    for suite in (text.removeprefix("suite=") for text in overrides if text.startswith("suite=")):
        if suite not in known:
            raise ConfigError(
                f"suite={suite}: no suite of that name; expected a file of configs/suite.{did_you_mean(suite, known)}"
            )
    line = _shell_line([str(folder), *overrides, *_options(config_dirs)])
    return Job(title=f"eval {folder.name}", run=folder, command=f"eval {line}", kind="eval")


def _options(config_dirs: Sequence[str]) -> list[str]:
    return [part for d in config_dirs for part in ("--config-dir", str(Path(d).resolve()))]


def _shell_line(words: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, words))


def prepare(job: Job, cluster: Cluster) -> str:
    """Writes the script into the run directory and returns its text."""
    with writing(job.run):
        for folder in ("logs", "weights") if cluster.servers and cluster.all_nodes > 1 else ("logs",):
            (job.run / folder).mkdir(parents=True, exist_ok=True)
    text = render_job(job, cluster)
    write_aside(job.script, text)
    return text


def submit_one(job: Job, cluster: Cluster, name: str, command: str) -> None:
    """Submits one script to SLURM, or a chain of the same one."""
    # Checked first, because a job that can never start would wait in the queue without an error.
    print(test_only(job.script))
    ids = [sbatch(job.script) for _ in range(cluster.chain)]
    Note(jobs=ids, cluster=name, command=command).write(job.run, job.kind)
    print(f"submitted {', '.join(ids)}: {job.title}")
    print(f"  follow it: creditgraph status {job.run} --logs -f")
    print(f"  state:     creditgraph status {job.run}")


def submit_array(jobs: Sequence[Job], cluster: Cluster, name: str, command: str) -> None:
    """Submits several scripts to SLURM as one array."""
    folder = jobs[0].run.parent / ".arrays"
    make_folder(folder)
    title = f"{jobs[0].title} and {len(jobs) - 1} more"
    script = folder / f"{jobs[0].run.name}-{len(jobs)}.sh"
    write_aside(script, render_array(title, jobs, cluster, folder))
    print(test_only(script))
    job_id = sbatch(script)
    for i, job in enumerate(jobs):
        Note(jobs=[f"{job_id}_{i}"], cluster=name, command=command).write(job.run)
    print(f"submitted {job_id}: {len(jobs)} runs below {jobs[0].run.parent}")


def run_here(jobs: Sequence[Job], dry_run: bool) -> int:
    """Runs on this machine, one after the other, without SLURM."""
    codes = []
    for job in jobs:
        line = f"{creditgraph_command()} {job.command}"
        print(line, flush=True)
        if not dry_run:
            codes.append(subprocess.run(["bash", "-c", f"exec {line}"], check=False).returncode)
    return max(codes, default=0)
