"""`creditgraph train`: composes and checks a configuration, starts or continues its run, and prints the results."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from creditgraph.components.models.gpus import DEVICES, Device, kind_of
from creditgraph.pipeline.app.arguments import OVERRIDES_HELP, add_overrides, add_trust
from creditgraph.pipeline.app.costs import cost_lines
from creditgraph.pipeline.app.sweep import build_all, check_distinct, combinations
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.run.compose.experiment import Experiment, build_experiment, settings_of_run

if TYPE_CHECKING:
    from creditgraph.pipeline.app.signal_watch import SignalWatch
    from creditgraph.pipeline.run.distributed.team import Team
    from creditgraph.pipeline.run.run_directory import RunDirectory
    from creditgraph.pipeline.run.stops import Outcome

SUMMARY = "Train, or continue a run: of the same settings, or by its directory."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = f"{OVERRIDES_HELP}\n\ncreditgraph train runs/mine run.iterations=200 continues that run."
    add_overrides(parser)
    add_trust(parser)
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="sweep: one run for every combination of values (key=a,b, key=range(0,3))",
    )
    parser.add_argument("--check", action="store_true", help="compose and check only; train nothing")
    parser.add_argument("--device", choices=sorted(DEVICES), help="with --check: plan the memory of this kind of GPU")
    parser.add_argument("--gpus", type=int, default=8, help="with --device: GPUs of the learner (default 8)")
    parser.add_argument(
        "--engine-gpus", type=int, default=0, help="with --device: further GPUs for engine servers; 0: they share"
    )


def main(options: argparse.Namespace) -> int:
    """Trains one configuration, or a sweep of them."""
    from creditgraph.pipeline.run.distributed.team import allow_files, plan_ranks, rendezvous

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
            print("\n".join([f"valid: {len(experiment.graph)} nodes, {lanes}", *cost_lines(experiment)]))
            if options.device:
                print(planned(experiment, options.device, options.gpus, options.engine_gpus))
        return 0
    if options.device:
        raise ConfigError("--device: plans the memory of GPUs that are not here; expected with --check only.")
    if options.multirun:
        for experiment in experiments:
            check_gpu(experiment, 1, None)
        return _train_all(experiments)
    (experiment,) = experiments
    _set_environment(experiment)
    ranks = plan_ranks(experiment.graph, meeting.ranks)
    allow_files(experiment.graph, ranks.world)
    device = check_gpu(experiment, ranks.world, ranks.local_rank if ranks.world > 1 else None)
    if ranks.world == 1:
        return _ended(train(experiment))
    from creditgraph.pipeline.run.distributed.processes import run_together

    return run_together(meeting, ranks, device, lambda team: _ended(train(experiment, team)))


def _set_environment(experiment: Experiment) -> None:
    for node in experiment.graph.nodes:
        for name, value in node.cls.environment(node.config).items():
            os.environ.setdefault(name, value)


def train_here(experiment: Experiment, stream: TextIO) -> int:
    """Trains in a process that may do other things, such as a notebook; returns the exit code of `Outcome`."""
    from creditgraph.pipeline.app.preflight import check_present
    from creditgraph.pipeline.app.trackers import check_sinks

    check_present(experiment)
    check_sinks(experiment.run)
    _set_environment(experiment)
    check_gpu(experiment, 1, None)
    return train(experiment, stream=stream)


def planned(experiment: Experiment, device: str, gpus: int, engine_gpus: int) -> str:
    """The memory of a configuration on GPUs that need not be here; ConfigError if it does not fit."""
    from creditgraph.pipeline.app.cluster.memory import check_memory
    from creditgraph.pipeline.run.distributed.team import Ranks, plan_ranks

    if gpus < 1 or engine_gpus < 0:
        raise ConfigError(f"--gpus {gpus} --engine-gpus {engine_gpus}: expected at least 1 and 0.")
    plan_ranks(experiment.graph, Ranks(world=gpus))
    memory = check_memory(experiment, DEVICES[device], gpus, engine_gpus)
    unknown = f"unknown, since the files of model '{experiment.model.path}' are not here"
    return f"memory: {memory or unknown}"


def check_gpu(experiment: Experiment, world: int, local_rank: int | None) -> str:
    """The device of this process; ConfigError, before anything loads, for a GPU that is not there or too small."""
    from creditgraph.pipeline.run.run_settings import resolve_device

    device = resolve_device(experiment.run.device, local_rank)
    if device.startswith("cuda") and experiment.run.check_memory:
        import torch

        from creditgraph.pipeline.app.cluster.memory import check_memory

        name = torch.cuda.get_device_name(device)
        memory = float(torch.cuda.get_device_properties(device).total_memory)
        check_memory(experiment, replace(kind_of(name) or Device(name=name), memory=memory), world)
    return device


def _experiments(options: argparse.Namespace) -> list[Experiment]:
    """The experiments of all runs, which are all checked before the first one trains."""
    chosen = [options.overrides]
    if options.multirun:
        chosen = combinations(options.overrides, options.config_dir)
    from creditgraph.pipeline.app.preflight import check_present
    from creditgraph.pipeline.app.trackers import check_sinks

    named = chosen[0][:1]
    if (named and "=" not in named[0]) or (named and Path(named[0]).is_dir()):
        experiments = [of_run(Path(named[0]), chosen[0][1:])]
    else:
        experiments = build_all(chosen, options.config_dir)
    for experiment in experiments:
        if not options.device:  # of GPUs elsewhere, packages and files may be there too
            check_present(experiment)
        check_sinks(experiment.run)
    check_distinct([experiment.run_path for experiment in experiments])
    return experiments


def of_run(path: Path, overrides: Sequence[str]) -> Experiment:
    """The experiment of a run directory, to continue it, with some of its settings changed."""
    from creditgraph.pipeline.run.compose.overrides import deep_merge, parse_settings

    values = deep_merge(settings_of_run(path), parse_settings(overrides))
    values["run"] = {**values["run"], "root": str(path.parent), "name": path.name}
    return build_experiment(values, str(path / "config.yaml"))


def _train_all(experiments: Sequence[Experiment]) -> int:
    """Trains one run after the other; an interrupt or a failure ends the whole sweep."""
    for experiment in experiments:
        code = train(experiment)
        if code:
            return code
    return 0


def train(experiment: Experiment, team: Team | None = None, stream: TextIO | None = None) -> int:
    """Runs or continues an experiment, on this rank of a team when one is given; returns the exit code of `Outcome`.

    Progress goes to `stream`, by default the error stream.
    """
    import torch

    from creditgraph.pipeline.app.drawing import draw
    from creditgraph.pipeline.app.results import write_results
    from creditgraph.pipeline.run.distributed.team import Team
    from creditgraph.pipeline.run.run_directory import RunDirectory, write_aside

    settings = experiment.run
    if settings.threads:
        torch.set_num_threads(settings.threads)  # two that compete for a core were measured to be 10 to 20 times slower
    team = team or Team()
    if team.ranks.rank:
        team.barrier()  # rank 0 has the run directory open
        return follow(experiment, team)
    with RunDirectory.open(
        experiment.run_path, experiment.public, places=experiment.places, allow_changes=settings.allow_changes
    ) as run:
        for name, text in (("graph.svg", draw.svg(experiment.graph)), ("graph.mmd", draw.mermaid(experiment.graph))):
            write_aside(run.path / name, text)
        team.barrier()
        finished = team.from_first(iterations_of_finished(run, settings.iterations))
        outcome, watch = _finished(experiment, run, finished) if finished else _run(experiment, team, run, stream)
        table = write_results(run.path, watch.summary())
    print(table)
    if outcome.status != "finished":
        print(f"stopped at {outcome.completed} of {settings.iterations} iterations; the same command continues the run")
    print(f"run directory: {run.path}")
    return outcome.exit_code


def iterations_of_finished(run: RunDirectory, total: int) -> int:
    """Iterations of a run that has its last checkpoint and its final evaluation; 0 for any other."""
    from creditgraph.pipeline.run.checkpoint import numbered
    from creditgraph.pipeline.run.metrics import read_metrics

    logged = [row.get("iteration", 0) for row in read_metrics(run.metrics_path)[-1:]]
    saved = [int(folder.name) + 1 for folder in numbered(run.path / "checkpoints")[-1:]]
    # The final pass has the number of iterations as its index.
    return saved[0] if saved and logged and min(saved[0], logged[0]) >= total else 0


def _finished(experiment: Experiment, run: RunDirectory, done: int) -> tuple[Outcome, SignalWatch]:
    """Says that there is nothing left to run."""
    from creditgraph.pipeline.run.stops import Outcome

    total = experiment.run.iterations
    print(
        f"{run.path}: finished already, {done} of {total} iterations; "
        f"run.iterations={2 * done} trains on, another run.name starts over",
        flush=True,
    )
    return Outcome("finished", done), _watch(experiment, run)


def _run(
    experiment: Experiment, team: Team, run: RunDirectory, stream: TextIO | None = None
) -> tuple[Outcome, SignalWatch]:
    """Runs what is left of a run."""
    from creditgraph.pipeline.app.progress import Progress
    from creditgraph.pipeline.app.trackers import make_sinks
    from creditgraph.pipeline.run.executor import Executor

    settings = experiment.run
    sinks = make_sinks(settings, run.path, experiment.public, experiment.graph)
    parts: dict[str, Any] = {"model": experiment.model, "data": experiment.data, "team": team}
    with Executor(experiment.graph, settings, run=run, sinks=sinks, **parts) as executor:
        executor.setup()
        done = executor.restore()
        if done:
            total = settings.iterations
            print(f"{run.path}: continuing after iteration {done - 1} ({done} of {total} are done)", flush=True)
        watch = _watch(experiment, run)  # of what `restore` has left in metrics.jsonl
        with Progress(settings.iterations, done, stream, watch) as executor.observer:
            return executor.run(), watch


def _watch(experiment: Experiment, run: RunDirectory) -> SignalWatch:
    from creditgraph.pipeline.app.signal_watch import SignalWatch
    from creditgraph.pipeline.run.metrics import read_metrics

    rows = read_metrics(run.metrics_path)
    return SignalWatch(experiment.graph, run.path, experiment.run.record.every, rows)


def _not_begun(number: int, frame: FrameType | None) -> None:
    # Nothing is saved and nothing has to be closed, and an import that is under way would swallow an exception.
    print(
        f"creditgraph train: {signal.Signals(number).name} before the first iteration; start again to continue.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(75)  # as a run that was stopped and saved: the job script puts it back into the queue


def _ended(code: int) -> int:
    # Schedulers and job scripts send a signal more than once. A second one must not end a process that has saved with
    # another exit code, nor while Python ends, which resets its own handlers; processes started meanwhile inherit none.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
        atexit.register(signal.signal, number, signal.SIG_IGN)
    return code


def follow(experiment: Experiment, team: Team) -> int:
    """Runs the graph on a rank after the first, which leaves files and messages to rank 0."""
    from creditgraph.pipeline.run.executor import Executor

    if team.from_first(0):  # the run is finished already
        return 0
    parts: dict[str, Any] = {"model": experiment.model, "data": experiment.data, "team": team}
    with Executor(experiment.graph, experiment.run, path=experiment.run_path, **parts) as executor:
        executor.setup()
        executor.restore()
        return executor.run().exit_code
