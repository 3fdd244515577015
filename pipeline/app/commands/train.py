"""`creditgraph train`: compose, check, run or continue, and say how it went."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from types import FrameType
from typing import Any

from pipeline.core.errors import ConfigError
from pipeline.run.compose import (
    CONFIG_DIR,
    PRIMARY,
    Experiment,
    build_experiment,
    compose,
    finish,
    hydra_overrides,
    parse_overrides,
    search_dirs,
)
from pipeline.run.distributed.team import Team, plan_ranks, rendezvous


def main(options: argparse.Namespace) -> int:
    """Trains one configuration, or a sweep of them."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _not_begun)  # the executor takes over once there is something to save
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    for noisy in ("httpx", "urllib3", "filelock", "datasets", "transformers", "wandb", "torch"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    meeting = rendezvous()
    if meeting.ranks.rank:
        logging.getLogger().setLevel(logging.WARNING)  # what all ranks would say, rank 0 says
    if options.multirun:
        if meeting.ranks.world > 1:
            raise ConfigError(
                f"-m: a sweep of runs on {meeting.ranks.world} processes each; wanted one process. Start one run per "
                "setting."
            )
        return sweep(options.overrides, options.config_dir)
    experiment = build_experiment(compose(options.overrides, options.config_dir), " ".join(options.overrides))
    if options.check:
        print(
            f"sound: {len(experiment.graph)} nodes, "
            f"{'generation overlaps learning' if experiment.graph.overlaps else 'one lane'}"
        )
        return 0
    ranks = plan_ranks(experiment.graph, meeting.ranks)
    if ranks.world == 1:
        return train(experiment)
    from pipeline.run.distributed.processes import run_together
    from pipeline.run.run_settings import resolve_device

    device = resolve_device(experiment.run.device, ranks.local_rank)
    return run_together(meeting, ranks, device, experiment.run.timeout, lambda team: train(experiment, team))


def train(experiment: Experiment, team: Team | None = None) -> int:
    """Runs or continues an experiment, on this rank of a team when one is given; returns the exit code of `Outcome`."""
    from pipeline.app import draw
    from pipeline.app.progress import Progress
    from pipeline.app.results import write_results
    from pipeline.app.trackers import make_sinks
    from pipeline.run.executor import Executor
    from pipeline.run.run_directory import RunDirectory, write_aside

    settings = experiment.run
    set_threads(settings.threads)
    team = team or Team()
    if team.ranks.rank:
        team.barrier()  # rank 0 has the run directory open
        return follow(experiment, team)
    with RunDirectory.open(
        experiment.run_path, experiment.resolved, places=experiment.places, allow_changes=settings.allow_changes
    ) as run:
        for name, text in (("graph.svg", draw.svg(experiment.graph)), ("graph.mmd", draw.mermaid(experiment.graph))):
            write_aside(run.path / name, text)
        team.barrier()
        sinks = make_sinks(settings, run.path, experiment.resolved, experiment.graph)
        parts: dict[str, Any] = {"model": experiment.model, "data": experiment.data, "team": team}
        with Executor(experiment.graph, settings, run=run, sinks=sinks, **parts) as executor:
            executor.setup()
            done = executor.restore()
            if done:
                print(f"{run.path}: continuing after iteration {done - 1}", flush=True)
            with Progress(settings.iterations, done) as executor.observer:
                outcome = executor.run()
        # A preempted run goes on soon, and its machine is wanted now.
        _, table = write_results(run.path, title=settings.name, picture=outcome.exit_code == 0)
    print(table)
    print(f"run directory: {run.path}")
    return outcome.exit_code


def _not_begun(number: int, frame: FrameType | None) -> None:
    print(
        f"creditgraph train: {signal.Signals(number).name} before the first iteration; start again to continue.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(75)


def follow(experiment: Experiment, team: Team) -> int:
    """What the ranks after the first do: run the graph, and leave files and words to rank 0."""
    from pipeline.run.executor import Executor

    parts: dict[str, Any] = {"model": experiment.model, "data": experiment.data, "team": team}
    with Executor(experiment.graph, experiment.run, path=experiment.run_path, **parts) as executor:
        executor.setup()
        executor.restore()
        return executor.run().exit_code


def set_threads(threads: int) -> None:
    """Torch's threads on a CPU; two under contention were seen to run 10 to 20 times slower than one."""
    import torch

    if threads:
        torch.set_num_threads(threads)


def sweep(overrides: list[str], config_dirs: list[str]) -> int:
    """Every combination of comma-separated values through hydra's sweeper, one run directory each."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    dirs = search_dirs(config_dirs)
    codes: list[int] = []

    @hydra.main(config_path=str(CONFIG_DIR), config_name=PRIMARY, version_base="1.3")  # type: ignore[untyped-decorator]
    def job(config: DictConfig) -> None:
        values: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
        chosen = [o.lstrip("+") for o in HydraConfig.get().overrides.task]
        codes.append(train(build_experiment(finish(values, parse_overrides(chosen, dirs)), " ".join(chosen))))
        if codes[-1] == 130:
            raise KeyboardInterrupt  # Ctrl-C ends the sweep, not one run of it
        if codes[-1]:
            raise SystemExit(codes[-1])

    composed = hydra_overrides(parse_overrides(overrides, dirs), dirs)
    sys.argv = ["creditgraph", "--multirun", *composed]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra then hands our sentences on as they are
    job()
    return max(codes, default=0)
