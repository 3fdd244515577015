"""`creditgraph submit`: compose, check, render, and hand the job to SLURM."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.app.cluster.render import ENDED, Job, creditgraph_command, render_array, render_job
from pipeline.app.cluster.settings import Cluster, load_cluster, split_overrides
from pipeline.app.cluster.slurm import Note, sbatch, submitting, test_only
from pipeline.core.errors import ConfigError, RunError, did_you_mean
from pipeline.run.compose import Experiment, build_experiment, compose, list_choices, search_dirs
from pipeline.run.run_directory import write_aside, writing


def main(options: argparse.Namespace) -> int:
    """Submits one run, an array of them, or the evaluation of a run."""
    name, own, rest = split_overrides(options.overrides)
    cluster = load_cluster(name or "one_node", own, options.config_dir)
    if options.evaluate:
        jobs = [evaluation(Path(options.evaluate), rest, options.config_dir)]
        cluster = replace(cluster, nodes=1, ranks_per_node=1, engine_nodes=0, chain=1)
        cluster = cluster if cluster.placement == "here" else replace(cluster, placement="colocated")
    else:
        combinations = sweep(rest) if options.multirun else [rest]
        jobs = [training(combination, cluster, options.config_dir) for combination in combinations]
        twice = [j.run for i, j in enumerate(jobs) if j.run in [k.run for k in jobs[:i]]]
        if twice:
            raise ConfigError(
                f"submit --multirun: two runs would share {twice[0]}; wanted run names that differ. Do not set "
                "run.name."
            )
    if cluster.placement == "here":
        return here(jobs, options.dry_run)
    if options.dry_run:
        for job in jobs:
            text = prepare(job, cluster)
            print(text if len(jobs) == 1 else f"{job.script}")
        return 0
    command = " ".join(["creditgraph submit", *map(shlex.quote, options.overrides)])
    with ExitStack() as held:
        for job in jobs:
            held.enter_context(submitting(job.run, job.kind))  # before its script is touched
            (job.run / ENDED[job.kind]).unlink(missing_ok=True)  # the last word of an earlier job
        for job in jobs:
            prepare(job, cluster)
        if len(jobs) > 1:
            submit_array(jobs, cluster, name, command)
        else:
            submit_one(jobs[0], cluster, name, command)
    return 0


def training(overrides: Sequence[str], cluster: Cluster, config_dirs: Sequence[str]) -> Job:
    """The job of one training run; composes and checks the graph for the cluster's number of ranks."""
    overrides = list(overrides)
    if cluster.root:
        overrides.append(f"run.root={cluster.root}")
    experiment = build_experiment(compose(overrides, config_dirs), " ".join(overrides))
    check_ranks(experiment, cluster)
    run = experiment.run_path.resolve()
    if cluster.servers:
        engines = [n.name for n in experiment.graph.nodes if hasattr(n.config, "servers")]
        if not engines:
            used = ", ".join(n.use for n in experiment.graph.nodes if n.use.startswith("engine."))
            raise ConfigError(
                f"cluster.placement is disaggregated, but the graph's engine ({used or 'none'}) has no servers; wanted "
                "engine=vllm or "
                "engine=sglang, or cluster=colocated."
            )
        found = [
            f"{engine}.{setting}" for engine in engines for setting in (f"rendezvous={run / 'servers'}", "servers=0")
        ]
        if cluster.all_nodes > 1 and not any(
            o.lstrip("+").startswith(f"{engines[0]}.channel.path=") for o in overrides
        ):
            found.append(f"{engines[0]}.channel.path={run / 'weights'}")  # /dev/shm is another one on every node
        if cluster.gpus_per_server > 1 and not any(
            o.lstrip("+").startswith(f"{engines[0]}.tensor_parallel=") for o in overrides
        ):
            found.append(f"{engines[0]}.tensor_parallel={cluster.gpus_per_server}")
        # Named as without them: the settings of a place are not part of what the run is.
        overrides += [
            *found,
            f"{engines[0]}.pool.start_seconds={cluster.ready_seconds}",
            f"run.name={experiment.run.name}",
        ]
    line = " ".join(map(shlex.quote, [*overrides, *_options(config_dirs)]))
    return Job(title=experiment.run.name, run=run, command=f"train {line}", overrides=line)


def check_ranks(experiment: Experiment, cluster: Cluster) -> None:
    """The number of ranks must be a multiple of those one replica of each collective node takes."""
    for node in experiment.graph.nodes:
        ask: Any = getattr(node.cls, "ranks_per_replica", None)
        needed = int(ask(node.config)) if ask and node.placement == "collective" else 1
        if cluster.ranks % needed:
            raise ConfigError(
                f"cluster: {cluster.ranks} ranks (nodes × ranks per node), but one replica of {node.name} takes "
                f"{needed} "
                "(tensor × pipeline parallel); wanted a multiple. Change cluster.nodes or the learner's layout."
            )


def evaluation(run: Path, overrides: Sequence[str], config_dirs: Sequence[str]) -> Job:
    """The job that evaluates a finished run; raises an error for a run or a suite that is not there."""
    if not (run / "config.yaml").exists():
        raise RunError(f"submit --eval {run}: no config.yaml there; wanted the directory of a run.")
    place, known = run.resolve(), list_choices("suite", search_dirs(config_dirs))
    for wanted in (o.removeprefix("suite=") for o in overrides if o.startswith("suite=")):
        if wanted not in known:
            raise ConfigError(
                f"suite={wanted}: no suite of that name; wanted a file of configs/suite.{did_you_mean(wanted, known)}"
            )
    line = " ".join(map(shlex.quote, [str(place), *overrides, *_options(config_dirs)]))
    return Job(title=f"eval {place.name}", run=place, command=f"eval {line}", kind="eval")


def _options(config_dirs: Sequence[str]) -> list[str]:
    return [part for d in config_dirs for part in ("--config-dir", str(Path(d).resolve()))]


def sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of comma-separated values.

    >>> sweep(["recipe=a,b", "run.seed=0,1", "x=[1,2]"])[1]
    ['recipe=a', 'run.seed=1', 'x=[1,2]']
    """
    choices = []
    for text in overrides:
        key, equals, value = text.partition("=")
        several = equals and "," in value and not value.startswith(("[", "{", "'", '"'))
        choices.append([f"{key}={v}" for v in value.split(",")] if several else [text])
    return [list(found) for found in itertools.product(*choices)]


def prepare(job: Job, cluster: Cluster) -> str:
    """Writes the script into the run directory and returns its text."""
    with writing(job.run):
        for folder in ("logs", "weights") if cluster.servers and cluster.all_nodes > 1 else ("logs",):
            (job.run / folder).mkdir(parents=True, exist_ok=True)
    text = render_job(job, cluster)
    write_aside(job.script, text)
    return text


def submit_one(job: Job, cluster: Cluster, name: str, command: str) -> None:
    """Hands one script to SLURM, or a chain of the same one."""
    print(test_only(job.script))
    ids = [sbatch(job.script) for _ in range(cluster.chain)]
    Note(jobs=ids, cluster=name, command=command).write(job.run, job.kind)
    print(
        f"submitted {', '.join(ids)}: {job.title}\n  follow it: creditgraph logs {job.run}\n  state:     creditgraph "
        f"status {job.run}"
    )


def submit_array(jobs: Sequence[Job], cluster: Cluster, name: str, command: str) -> None:
    """Hands several scripts to SLURM as one array."""
    folder = jobs[0].run.parent / ".arrays"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    title = f"{jobs[0].title} and {len(jobs) - 1} more"
    script = folder / f"{jobs[0].run.name}-{len(jobs)}.sh"
    write_aside(script, render_array(title, jobs, cluster, folder))
    print(test_only(script))
    job_id = sbatch(script)
    for i, job in enumerate(jobs):
        Note(jobs=[f"{job_id}_{i}"], cluster=name, command=command).write(job.run)
    print(f"submitted {job_id}: {len(jobs)} runs below {jobs[0].run.parent}")


def here(jobs: Sequence[Job], dry_run: bool) -> int:
    """Runs on this machine, one after the other, without SLURM."""
    import subprocess

    codes = []
    for job in jobs:
        print(f"{creditgraph_command()} {job.command}", flush=True)
        if not dry_run:
            codes.append(
                subprocess.run(["bash", "-c", f"exec {creditgraph_command()} {job.command}"], check=False).returncode
            )
    sys.stdout.flush()
    return max(codes, default=0)
