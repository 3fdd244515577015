"""Measures a cell: sweeps learning rates, freezes them, trains on fresh seeds, and sums up the runs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from creditgraph.lab.bench.curves import Axis, Curve
from creditgraph.lab.bench.methods import Method
from creditgraph.lab.bench.statistics import mean_sd
from creditgraph.lab.bench.training_runs import Plan, train_all
from creditgraph.lab.evidence.declaration import Cell, Declaration, best_rate, rated, stem, widened
from creditgraph.pipeline import ROOT

AXES: tuple[Axis, ...] = ("tokens", "steps", "trained")
PLACES = 5  # of kept accuracies; those of 500 problems need three

Train = Callable[[Plan, Sequence[Method], Sequence[int]], dict[str, str]]
"""Trains methods with seeds as planned; returns failed run → why."""


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Where and how cells are measured.

    Attributes:
        declaration: what is measured.
        folder: holds a folder per cell with its runs.
        train: trains; `trainer` makes the usual one.
        config_dirs: folders with further recipes.
    """

    declaration: Declaration
    folder: Path
    train: Train
    config_dirs: tuple[Path, ...] = ()

    def cell(self, name: str) -> Cell:
        """A declared cell."""
        return (self.declaration.cells | self.declaration.quick)[name]

    def plan(self, name: str, sweep: bool) -> Plan:
        """The plan of the cell's runs; those of the sweep have a folder of their own."""
        cell = self.cell(name)
        folder = self.folder / name / ("sweep" if sweep else "runs")
        overrides = self.declaration.settings(name, sweep)
        metric = self.declaration.families[cell.family].metric
        return Plan(
            budget=cell.tokens,
            steps=cell.steps,
            folder=folder,
            overrides=overrides,
            metric=metric,
            config_dirs=self.config_dirs,
        )

    def measure(self, name: str) -> dict[str, Any]:
        """Trains what is missing of a cell and returns its entry of results.json.

        A run that fails is listed; its method goes on with the other seeds, and in a sweep its rate counts as 0.
        """
        cell = self.cell(name)
        tried, failed = self._sweep(name)
        rates = {method: best_rate(accuracy) for method, accuracy in tried.items()}
        plan = self.plan(name, sweep=False)
        frozen = {m: rated(m, entry, rates[m], plan.overrides) for m, entry in cell.methods.items()}
        failed |= self.train(plan, list(frozen.values()), range(cell.seeds))
        curves = {n: {s: plan.curve(m, s) for s in range(cell.seeds)} for n, m in frozen.items()}
        finished = {n: {s: c for s, c in by.items() if plan.is_finished(c)} for n, by in curves.items()}
        entry = summary(cell, finished, wanted_pairs(self.declaration, name))
        for method, row in entry["methods"].items():
            row["lr"] = rates[method]
            row["tried"] = {f"{rate:g}": round(value, PLACES) for rate, value in sorted(tried[method].items())}
        failed = {run: why.replace(f"{self.folder}/", "") for run, why in failed.items()}
        return {"digest": self.declaration.digest(name), "commit": commit(), **entry, "failed": failed}

    def _sweep(self, name: str) -> tuple[dict[str, dict[float, float]], dict[str, str]]:
        """Mean validation accuracy of method → rate → accuracy, and the runs that failed."""
        cell = self.cell(name)
        plan = self.plan(name, sweep=True)
        tried: dict[str, dict[float, float]] = {method: {} for method in cell.methods}
        failed: dict[str, str] = {}
        for round_ in range(cell.widenings + 1):
            missing = {m: list(cell.rates) if not round_ else _beyond(known, cell) for m, known in tried.items()}
            chosen = [(m, rate) for m, rates in missing.items() for rate in rates]
            if not chosen:
                break
            methods = [rated(m, cell.methods[m], rate, plan.overrides) for m, rate in chosen]
            failed |= self.train(plan, methods, cell.sweep_seeds)
            for (m, rate), method in zip(chosen, methods, strict=True):
                curves = [plan.curve(method, seed) for seed in cell.sweep_seeds]
                tried[m][rate] = mean_sd([_selected(c, cell) if plan.is_finished(c) else 0.0 for c in curves])[0]
        return tried, failed


def trainer(jobs: int, launch: Callable[[list[str], Path], int], say: Callable[[str], None]) -> Train:
    """Trains by `creditgraph train`, so many runs at a time; finished runs are kept."""
    return lambda plan, methods, seeds: train_all(plan, methods, seeds, jobs, launch, say)


def dated(entry: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """A cell's entry, or the one before if it says the same: numbers keep the commit at which they were measured."""
    return before if before is not None and {**before, "commit": entry["commit"]} == entry else entry


def forget(folder: Path, names: Sequence[str], method: str = "") -> None:
    """Removes all runs of the cells, or those of one method."""
    for name in names:
        for place in folder.glob(f"{name}/*/{method}-*-lr*" if method else name):
            shutil.rmtree(place, ignore_errors=True)


def seconds_left(lab: Lab, names: Sequence[str]) -> dict[str, float]:
    """Cell → declared processor seconds of the runs that are not finished; a widened sweep needs more."""
    left = {}
    for name in names:
        cell = lab.cell(name)
        sweep, fresh = lab.plan(name, sweep=True), lab.plan(name, sweep=False)
        total = 0.0
        for method, entry in cell.methods.items():
            names_ = [rated(method, entry, rate, sweep.overrides) for rate in cell.rates]
            open_ = sum(not sweep.is_finished(sweep.curve(m, s)) for m in names_ for s in cell.sweep_seeds)
            # Which rate is frozen may not be known yet: fresh runs of any rate count.
            done = [fresh.is_finished(c) for c in fresh.curves_of(f"{stem(method, entry, fresh.overrides)}*-s*")]
            total += (open_ + max(cell.seeds - sum(done), 0)) * (entry.seconds or cell.seconds)
        left[name] = total
    return left


def wanted_pairs(declaration: Declaration, name: str) -> list[tuple[str, str]]:
    """Pairs of methods to compare in a cell: each with its baseline, and those of the claims."""
    cell = (declaration.cells | declaration.quick)[name]
    pairs = [(method, base) for method in cell.methods if (base := cell.baseline_of(method))]
    pairs += [(c.better, c.worse) for c in declaration.claims.values() if c.cell == name]
    return list(dict.fromkeys(pairs))


def summary(cell: Cell, curves: Mapping[str, Mapping[int, Curve]], pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The numbers of a cell: per method and seed at equal tokens, and per pair of methods on every axis.

    Args:
        cell: the cell.
        curves: method → seed → curve of a finished run; methods without any are left out.
        pairs: methods to compare; those without two seeds in common are left out.
    """
    methods = {}
    for name, by_seed in curves.items():
        if by_seed:
            each = list(by_seed.values())
            methods[name] = {
                "seeds": list(by_seed),
                "start": _rounded(c.accuracy[0] for c in each),
                "accuracy": _rounded(c.at(cell.tokens) for c in each),
                "end": _rounded(c.accuracy[-1] for c in each),
                "steps": _rounded(c.of("steps", cell.tokens) for c in each),
            }
    known = [(a, b) for a, b in pairs if len(curves[a].keys() & curves[b].keys()) > 1]
    return {"methods": methods, "pairs": [_pair(cell, curves, pair, axis) for pair in known for axis in AXES]}


def _pair(cell: Cell, curves: Mapping[str, Mapping[int, Curve]], pair: tuple[str, str], axis: Axis) -> dict[str, Any]:
    """Two methods after as much of an axis as both have: accuracies by seed, and what both took of the other axes."""
    better, worse = (curves[name] for name in pair)
    seeds = [seed for seed in better if seed in worse]
    runs = [by[seed] for by in (better, worse) for seed in seeds]
    shortest = min(c.end(axis) for c in runs)
    asked = {"tokens": cell.tokens, "steps": float(cell.steps)}.get(axis, 0.0)
    at = min(asked, shortest) if asked else shortest
    return {
        "better": pair[0],
        "worse": pair[1],
        "axis": axis,
        "at": round(at, 1),
        "seeds": seeds,
        "accuracies": [_rounded(by[seed].at(at, axis) for seed in seeds) for by in (better, worse)],
        "fewest_steps": _rounded(min(by[seed].of("steps", at, axis) for seed in seeds) for by in (better, worse)),
        "took": {
            name: [round(mean_sd([by[seed].of(name, at, axis) for seed in seeds])[0], 1) for by in (better, worse)]
            for name in AXES
        },
    }


def commit() -> str:
    """The commit of the code, with "+" where code or settings have changed since; "" outside a repository."""
    git = ["git", "-C", str(ROOT.parent)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    code = ("pipeline", "components", "configs", "creditgraph", "tools")
    changed = subprocess.run([*git, "status", "--porcelain", "--", *code], capture_output=True, text=True).stdout
    return head + ("+" if changed else "")


def _beyond(known: Mapping[float, float], cell: Cell) -> list[float]:
    rate = widened(known, cell.factor)
    return [] if rate is None else [rate]


def _selected(curve: Curve, cell: Cell) -> float:
    """Accuracy at the end of the axis by which rates are chosen."""
    if cell.select == "tokens":
        return curve.at(cell.tokens)
    return curve.at(float(cell.steps) or curve.end(cell.select), cell.select)


def _rounded(values: Any) -> list[float]:
    return [round(float(v), PLACES) for v in values]
