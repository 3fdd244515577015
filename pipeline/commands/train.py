"""`creditgraph train`: compose, check, run or continue, and say how it went."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

from pipeline.compose import (
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


def main(options: argparse.Namespace) -> int:
    """Trains one configuration, or a sweep of them."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    for noisy in ("httpx", "urllib3", "filelock", "datasets", "transformers", "wandb", "torch"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if options.multirun:
        return sweep(options.overrides, options.config_dir)
    experiment = build_experiment(compose(options.overrides, options.config_dir), " ".join(options.overrides))
    if options.check:
        print(f"sound: {len(experiment.graph)} nodes, {'generation overlaps learning' if experiment.graph.overlaps else 'one lane'}")
        return 0
    return train(experiment)


def train(experiment: Experiment) -> int:
    """Runs or continues an experiment; returns the exit code of `Outcome`."""
    from pipeline import draw
    from pipeline.executor import Executor
    from pipeline.metrics import Wandb
    from pipeline.progress import Progress
    from pipeline.results import write_results
    from pipeline.run_directory import RunDirectory, write_aside

    settings = experiment.run
    set_threads(settings.threads)
    with RunDirectory.open(experiment.run_path, experiment.resolved, allow_changes=settings.allow_changes) as run:
        for name, text in (("graph.svg", draw.svg(experiment.graph)), ("graph.mmd", draw.mermaid(experiment.graph))):
            write_aside(run.path / name, text)
        sinks = [] if settings.wandb.mode == "disabled" else [Wandb(settings.wandb, run.path, experiment.resolved)]
        with Executor(experiment.graph, settings, model=experiment.model, data=experiment.data, run=run, sinks=sinks) as executor:
            executor.setup()
            done = executor.restore()
            if done:
                print(f"{run.path}: continuing after iteration {done - 1}", flush=True)
            with Progress(settings.iterations, done) as executor.observer:
                outcome = executor.run()
        _, table = write_results(run.path, title=settings.name)
    print(table)
    print(f"run directory: {run.path}")
    return outcome.exit_code


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
