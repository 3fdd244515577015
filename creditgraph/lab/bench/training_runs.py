"""Runs `creditgraph train` for many methods and seeds, each until it has sampled its budget of tokens.

Finished runs are kept, so a second start trains only what is missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from creditgraph.lab.bench.curves import Curve, next_iterations, read_curve
from creditgraph.lab.bench.methods import Method
from creditgraph.pipeline.app.progress import ACCURACY
from creditgraph.pipeline.run.metrics import read_metrics
from creditgraph.pipeline.run.run_directory import make_folder

MAX_ROUNDS = 6  # a run that needs more rounds samples next to nothing per iteration, and would never end
MOST = 3.0  # times its budget: a run that has sampled so much without its steps may have stalled, all groups silent
SLOWED = 0.1  # of its former steps per token: what a run that has stalled takes at most in the last third of its tokens


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of the training runs.

    Attributes:
        budget: sampled tokens per run, evaluation not counted.
        steps: optimiser steps that each run takes at least; one that stalls is held to have kept its last accuracy.
        folder: holds the run directories and logs.
        pilot: iterations of the first round of a method's first run, from which the rest is planned.
        overrides: settings for every run, as on the command line.
        config_dirs: further folders with recipes.
        metric: what the curves take for accuracy.
        known: names of runs that another machine has finished.
    """

    budget: float
    folder: Path
    steps: int = 0
    pilot: int = 6
    overrides: tuple[str, ...] = ()
    config_dirs: tuple[str | Path, ...] = ()
    metric: str = ACCURACY
    known: Collection[str] = ()

    def name(self, method: Method, seed: int) -> str:
        """Name of a run and its directory."""
        # "=", "/" and "," are special in hydra's grammar.
        return re.sub(r"[^\w.-]", "-", f"{method.name}-s{seed}")

    def curve(self, method: Method, seed: int) -> Curve:
        """The run's curve so far."""
        return self.read(self.folder / self.name(method, seed) / "metrics.jsonl")

    def curves_of(self, pattern: str) -> list[Curve]:
        """The curves so far of the runs whose names fit a pattern such as "grpo-*-s0"."""
        return [self.read(file) for file in sorted(self.folder.glob(f"{pattern}/metrics.jsonl"))]

    def first_round(self, method: Method, seeds: Sequence[int]) -> int:
        """Iterations of a new run's first round, from the tokens per iteration of other seeds; `pilot` without any."""
        others = [c for c in (self.curve(method, seed) for seed in seeds) if c.total_tokens]
        if not others:
            return self.pilot
        iterations, tokens = sum(c.iterations for c in others), sum(c.total_tokens for c in others)
        wanted = [(self.budget, tokens)]
        wanted += [(self.steps, taken)] if (taken := sum(c.total_steps for c in others)) else []
        # 5 % more, so that one round is enough
        needed = max(1, *(math.ceil(1.05 * amount * iterations / total) for amount, total in wanted))
        return min(needed, math.ceil(1.05 * MOST * self.budget * iterations / tokens))

    def is_finished(self, curve: Curve) -> bool:
        """Whether the curve covers the budget and the steps."""
        return curve.end("tokens") >= self.budget and curve.end("steps") >= self.steps

    def next_round(self, curve: Curve, stretch: int = 1) -> int:
        """Iterations that a run needs, from what it took so far; `stretch` multiplies those that are missing."""
        missing = next_iterations(curve, self.budget, self.steps) - curve.iterations
        most = MOST * self.budget
        if curve.total_tokens >= most:  # and it has not stalled
            most = MOST * curve.total_tokens
        return min(curve.iterations + stretch * missing, next_iterations(curve, most))

    def command(self, method: Method, seed: int, iterations: int) -> list[str]:
        """The arguments of `creditgraph` that train, or continue, to so many iterations."""
        own = [
            f"run.seed={seed}",
            f"run.root={self.folder}",
            f"run.name={self.name(method, seed)}",
            f"run.iterations={iterations}",
        ]
        dirs = [part for folder in self.config_dirs for part in ("--config-dir", str(folder))]
        return ["train", *method.overridden(*self.overrides, *own), *dirs]

    def log(self, method: Method, seed: int) -> Path:
        """Where the output of a run is kept."""
        return self.folder / "logs" / f"{self.name(method, seed)}.log"

    def warning(self, method: Method, seeds: Sequence[int]) -> str:
        """The last sentence with which the first run that warned did so, "" where none did."""
        for file in (self.log(method, seed) for seed in seeds):
            text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
            if said := re.findall(r"^WARNING (.+)$", text, re.MULTILINE):
                return str(said[-1])
        return ""

    def read(self, file: Path) -> Curve:
        """The curve of a run's metrics; one that stalled is held to have kept its last accuracy."""
        curve = read_curve(read_metrics(file), self.metric)
        return curve.held_to(self.steps) if self.has_stalled(curve) else curve

    def has_stalled(self, curve: Curve) -> bool:
        """Whether it has sampled `MOST` times its budget and all but stopped taking steps."""
        end = curve.end("tokens")
        if not end >= MOST * self.budget:
            return False
        before = curve.of("steps", 2 / 3 * end)
        return (curve.end("steps") - before) * 2 <= SLOWED * before


def train_one(
    plan: Plan,
    method: Method,
    seed: int,
    launch: Callable[[list[str], Path], int],
    say: Callable[[str], None],
    seeds: Sequence[int] = (),
) -> str:
    """Trains one run in rounds until its curve covers the budget; returns "" or what went wrong.

    Args:
        plan, method, seed: plan, method and random seed of the run.
        launch: runs `creditgraph` with arguments, its output in a file, and returns the exit code.
        say: receives progress as sentences.
        seeds: random seeds of the comparison; finished runs determine how many iterations this one needs.
    """
    log = plan.log(method, seed)
    for round_ in range(MAX_ROUNDS):
        curve = plan.curve(method, seed)
        if plan.is_finished(curve):
            return ""
        try:
            # A run that fails to get there samples less and less: means of its past say too little.
            more = plan.next_round(curve, 2 ** max(round_ - 2, 0)) if curve.iterations else 0
        except ValueError as error:
            return str(error)
        iterations = more or plan.first_round(method, seeds)
        say(
            f"{plan.name(method, seed)}: {curve.iterations} → {iterations} iterations ({curve.total_tokens:.0f} of "
            f"{plan.budget:.0f} tokens)"
        )
        code = launch(plan.command(method, seed, iterations), log)
        if code:
            return f"exit code {code}, see {log}"
    if plan.is_finished(plan.curve(method, seed)):
        return ""
    return f"still below the budget after {MAX_ROUNDS} rounds, see {log}; start again to continue"


def train_all(
    plan: Plan,
    methods: Sequence[Method],
    seeds: Sequence[int],
    jobs: int,
    launch: Callable[[list[str], Path], int],
    say: Callable[[str], None],
) -> dict[str, str]:
    """Trains every method with every seed, `jobs` at a time; returns the runs that failed: name → what went wrong.

    Seed by seed, so that methods keep pace; `launch` and `say` as in `train_one`.
    """
    make_folder(plan.folder / "logs", "--output DIR")
    failed: dict[str, str] = {}
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        running = {
            plan.name(method, seed): pool.submit(train_one, plan, method, seed, launch, say, seeds)
            for seed in seeds
            for method in methods
            if plan.name(method, seed) not in plan.known
        }
        try:
            for name, future in running.items():
                problem = future.result()
                if problem:
                    failed[name] = problem
                    say(f"{name}: {problem}")
        except KeyboardInterrupt:
            # The terminal interrupts the processes, too; waiting ones must not start.
            pool.shutdown(cancel_futures=True)
            raise
    return failed
