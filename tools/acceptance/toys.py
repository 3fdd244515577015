"""Toy GRPO and SRPO on the device against their curves on a CPU, which a command has stored beside this file."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from launch import ROOT

from acceptance.measure import Run

RECIPES = ("toy_grpo", "toy_srpo")
SEEDS = tuple(range(6))
ITERATIONS = 24
CURVES = Path(__file__).with_name("toy_curves.json")
METRIC = "rewards/mean"


def stage(run: Run) -> None:
    """Mean rewards per iteration. Engines draw the same random numbers, so the first iterations nearly agree."""
    import hydra  # noqa: F401 - so that a missing package is named before anything starts
    import omegaconf  # noqa: F401

    stored = json.loads(CURVES.read_text(encoding="utf-8"))
    iterations = 2 if run.small else ITERATIONS
    for recipe in RECIPES:
        curves = {int(seed): curve[:iterations] for seed, curve in stored["curves"][recipe].items()}
        seeds = (0,) if run.small else (0, 1)
        for seed in seeds:
            curve = train(recipe, seed, iterations, run.device, run.scratch)
            if len(curve) != iterations:
                run.check(f"{recipe}, seed {seed}: iterations", len(curve), iterations, at_least=True)
                continue
            _compare(run, recipe, seed, curve, curves)


def _compare(run: Run, recipe: str, seed: int, curve: list[float], curves: dict[int, list[float]]) -> None:
    """The curve within the spread of the CPU's seeds, and close to that of its own seed at the start."""
    means = [statistics.mean(c) for c in curves.values()]
    spread = statistics.stdev(means)
    mean = statistics.mean(curve)
    away = abs(mean - statistics.mean(means)) / spread
    first = abs(curve[0] - curves[seed][0])
    run.row(
        recipe=recipe,
        seed=seed,
        mean_reward=mean,
        cpu=statistics.mean(means),
        cpu_sd=spread,
        same_seed_cpu=means[seed],
        first_gap=first,
    )
    # A new seed lies within t₀.₉₉₉ · sd · √(1 + 1/n) of n others; five degrees of freedom.
    run.check(
        f"{recipe}, seed {seed}: mean reward, CPU standard deviations away", away, 5.9 * math.sqrt(1 + 1 / len(means))
    )
    # 16 prompts × 8 responses: a few responses change where rounding turns a draw.
    run.check(f"{recipe}, seed {seed}: first iteration against the CPU's", first, 0.05)


def train(recipe: str, seed: int, iterations: int, device: str, scratch: Path) -> list[float]:
    """Mean reward of each iteration of a run."""
    folder = scratch / f"{recipe}-{seed}-{device}"
    shutil.rmtree(folder, ignore_errors=True)
    settings = [
        f"recipe={recipe}",
        f"run.seed={seed}",
        f"run.iterations={iterations}",
        f"run.device={device}",
        f"run.root={folder.parent}",
        f"run.name={folder.name}",
        "evaluator.every=0",
        "run.record.every=0",
    ]
    start = "import sys; sys.path.insert(0, sys.argv.pop(1)); from creditgraph import main; sys.exit(main())"
    command = [sys.executable, "-c", start, str(ROOT), "train", *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    file = folder / "metrics.jsonl"
    if not file.exists():
        return []
    lines = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    return [line[METRIC] for line in lines if METRIC in line]


def write_curves(scratch: Path, commit: str) -> None:
    """Trains every recipe and seed on this CPU and stores the curves."""
    import torch

    curves = {
        recipe: {
            str(seed): [round(value, 6) for value in train(recipe, seed, ITERATIONS, "cpu", scratch)] for seed in SEEDS
        }
        for recipe in RECIPES
    }
    found = {"command": "tools/gpu_acceptance --write-curves", "commit": commit, "torch": torch.__version__}
    text = json.dumps({**found, "metric": METRIC, "curves": curves}, indent=1)
    # One line per seed.
    text = re.sub(r"\[[^\]]*\]", lambda match: " ".join(match[0].split()), text)
    CURVES.write_text(text + "\n", encoding="utf-8")
