"""`creditgraph train`: composes and checks a configuration, starts or continues its run, and prints the results."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from pipeline.app.arguments import OVERRIDES_HELP, add_overrides
from pipeline.app.sweep import build_all, check_distinct, combinations
from pipeline.core.errors import ConfigError
from pipeline.run.compose import Experiment

if TYPE_CHECKING:
    from pipeline.run.distributed.team import Team

SUMMARY = "Train, or continue the run of that name."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = OVERRIDES_HELP
    add_overrides(parser)
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="sweep: one run for every combination of values (key=a,b, key=range(0,3))",
    )
    parser.add_argument("--check", action="store_true", help="compose and check only; train nothing")


def main(options: argparse.Namespace) -> int:
    """Trains one configuration, or a sweep of them."""
    from pipeline.run.distributed.team import plan_ranks, rendezvous

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _not_begun)  # the executor takes over once there is something to save
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    # Libraries that log every request or file at INFO.
    for noisy in ("httpx", "urllib3", "filelock", "datasets", "transformers", "wandb", "torch"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    meeting = rendezvous()
    if meeting.ranks.rank:
        logging.getLogger().setLevel(logging.WARNING)  # messages common to all ranks are logged by rank 0
    if options.multirun and meeting.ranks.world > 1:
        raise ConfigError(
            f"-m: a sweep of runs on {meeting.ranks.world} processes each; expected one process. Start one run per "
            "setting."
        )
    experiments = _experiments(options)
    if options.check:
        for experiment in experiments:
            lanes = "generation overlaps learning" if experiment.graph.overlaps else "one lane"
            print(f"sound: {len(experiment.graph)} nodes, {lanes}")
        return 0
    if options.multirun:
        return _train_all(experiments)
    (experiment,) = experiments
    ranks = plan_ranks(experiment.graph, meeting.ranks)
    if ranks.world == 1:
        return train(experiment)
    from pipeline.run.distributed.processes import run_together
    from pipeline.run.run_settings import resolve_device

    device = resolve_device(experiment.run.device, ranks.local_rank)
    return run_together(meeting, ranks, device, experiment.run.timeout, lambda team: train(experiment, team))


def _experiments(options: argparse.Namespace) -> list[Experiment]:
    """The experiments of all runs, which are all checked before the first one trains."""
    chosen = [options.overrides]
    if options.multirun:
        chosen = combinations(options.overrides, options.config_dir)
    experiments = build_all(chosen, options.config_dir)
    check_distinct([experiment.run_path for experiment in experiments])
    return experiments


def _train_all(experiments: Sequence[Experiment]) -> int:
    """Trains one run after the other; an interrupt or a failure ends the whole sweep."""
    for experiment in experiments:
        code = train(experiment)
        if code:
            return code
    return 0


def train(experiment: Experiment, team: Team | None = None) -> int:
    """Runs or continues an experiment, on this rank of a team when one is given; returns the exit code of `Outcome`."""
    import torch

    from pipeline.app import draw
    from pipeline.app.progress import Progress
    from pipeline.app.results import write_results
    from pipeline.app.trackers import make_sinks
    from pipeline.run.distributed.team import Team
    from pipeline.run.executor import Executor
    from pipeline.run.run_directory import RunDirectory, write_aside

    settings = experiment.run
    if settings.threads:
        torch.set_num_threads(settings.threads)  # two that compete for a core were measured to be 10 to 20 times slower
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
        # A preempted run will continue soon, and others need its machine now.
        table = write_results(run.path, picture=outcome.exit_code == 0)
    print(table)
    print(f"run directory: {run.path}")
    return outcome.exit_code


def _not_begun(number: int, frame: FrameType | None) -> None:
    # Nothing is saved and nothing has to be closed, and an import that is under way would swallow an exception.
    print(
        f"creditgraph train: {signal.Signals(number).name} before the first iteration; start again to continue.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(75)  # as a run that was stopped and saved: the job script puts it back into the queue


def follow(experiment: Experiment, team: Team) -> int:
    """Runs the graph on a rank after the first, which leaves files and messages to rank 0."""
    from pipeline.run.executor import Executor

    parts: dict[str, Any] = {"model": experiment.model, "data": experiment.data, "team": team}
    with Executor(experiment.graph, experiment.run, path=experiment.run_path, **parts) as executor:
        executor.setup()
        executor.restore()
        return executor.run().exit_code
