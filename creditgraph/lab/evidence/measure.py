"""Measures a cell: sweeps learning rates, freezes them, trains on fresh seeds, and sums up the runs."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from creditgraph.lab.bench.curves import Axis, Curve
from creditgraph.lab.bench.methods import Method
from creditgraph.lab.bench.statistics import mean_sd
from creditgraph.lab.bench.training_runs import Plan, train_all
from creditgraph.lab.evidence.declaration import DECLARED, Cell, Declaration, Point, best_point, rated, stem, widened
from creditgraph.lab.evidence.verdicts import as_text, read_results
from creditgraph.pipeline import ROOT
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose
from creditgraph.pipeline.run.run_directory import replacing

AXES: tuple[Axis, ...] = ("tokens", "processed", "steps", "trained")
COSTS = (*AXES, "seconds")
RESULTS = ROOT.parent / "docs" / "evidence" / "results.json"  # of a checkout
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
        kept: cell → what `progress` returned, perhaps on another machine: runs of its sweep are not trained again.
    """

    declaration: Declaration
    folder: Path
    train: Train
    config_dirs: tuple[Path, ...] = ()
    kept: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def cell(self, name: str) -> Cell:
        """A declared cell."""
        return (self.declaration.cells | self.declaration.quick)[name]

    def plan(self, name: str, sweep: bool) -> Plan:
        """The plan of the cell's runs; those of the sweep have a folder of their own."""
        cell = self.cell(name)
        folder = self.folder / name / ("sweep" if sweep else "runs")
        metric = self.declaration.families[cell.family].metric
        return Plan(
            budget=cell.tokens,
            steps=cell.steps,
            folder=folder,
            overrides=self.settings(name, sweep),
            metric=metric,
            config_dirs=self.config_dirs,
            known=self.known(name) if sweep else {},
        )

    def known(self, name: str) -> dict[str, float]:
        """Kept runs of the cell's sweep, in the form in which it is declared, with their accuracies."""
        entry = self.kept.get(name, {})
        runs = entry["finished"] if entry.get("digest") == self.declaration.digest(name) else {}
        return {run.removeprefix("sweep/"): value for run, value in runs.items() if run.startswith("sweep/")}

    def settings(self, name: str, sweep: bool) -> tuple[str, ...]:
        """The settings of a cell's runs, with the folder of the model that its family has of its own."""
        family = self.cell(name).family
        own = bool(self.declaration.families[family].warm_start)
        return self.declaration.settings(name, sweep) + ((f"model.path={self.model_folder(family)}",) if own else ())

    def model_folder(self, family: str) -> Path:
        """Where the model of a family is that has one of its own."""
        return self.folder / "models" / family

    def make_models(self, names: Sequence[str], say: Callable[[str], None]) -> None:
        """Makes the models of these cells' families that are missing.

        Raises:
            ConfigError: a model could not be made.
        """
        for family in dict.fromkeys(self.cell(name).family for name in names):
            out, how = self.model_folder(family), self.declaration.families[family].warm_start
            if how and not out.exists():
                command = ["tools/make_tiny_model", *how.split(), "--out", str(out.with_suffix(".part"))]
                say(" ".join(command))
                if subprocess.run(command, cwd=ROOT.parent, stdout=subprocess.DEVNULL).returncode:
                    raise ConfigError(f"{' '.join(command)} failed, see above.")
                out.with_suffix(".part").rename(out)

    def measure(self, name: str) -> dict[str, Any]:
        """Trains what is missing of a cell and returns its entry of results.json.

        A run that fails is listed; its method goes on with the other seeds, and in a sweep its point counts as 0.
        """
        cell = self.cell(name)
        tried, failed = self._sweep(name)
        points = {
            m: best_point(means(tried[m])) if m in tried else Point(entry.rate) for m, entry in cell.methods.items()
        }
        plan = self.plan(name, sweep=False)
        frozen = {m: rated(m, cell, points[m], plan.overrides) for m in cell.methods}
        failed |= self.train(plan, list(frozen.values()), cell.fresh)
        curves = {n: {s: plan.curve(m, s) for s in cell.fresh} for n, m in frozen.items()}
        finished = {n: {s: c for s, c in by.items() if plan.is_finished(c)} for n, by in curves.items()}
        entry = summary(cell, finished, wanted_pairs(self.declaration, name))
        for method, row in entry["methods"].items():
            row["lr"], row["batch"] = points[method]
            row["tried"] = {point.text: _rounded(values) for point, values in sorted(tried.get(method, {}).items())}
        failed = {run: why.replace(f"{self.folder}/", "") for run, why in failed.items()}
        head = {"digest": self.declaration.digest(name), "commit": commit(), "sweep": cell.sweep()}
        if self.known(name):
            head["sweep_commit"] = self.kept[name]["commit"]
        head["claims"] = committed_claims(name)
        warned = {n: said for n, method in frozen.items() if (said := plan.warning(method, cell.fresh))}
        return {**head, **entry, "failed": failed, **({"warned": warned} if warned else {})}

    def progress(self, name: str) -> dict[str, Any]:
        """Runs of the sweep and fresh runs that are finished, with their accuracies: raw data, and no comparison."""
        cell = self.cell(name)
        done = {f"sweep/{run}": value for run, value in self.known(name).items()}
        commits = [self.kept[name]["commit"]] if done else []
        for sweep, folder in ((True, "sweep"), (False, "runs")):
            plan = self.plan(name, sweep)
            for file in sorted(plan.folder.glob("*/metrics.jsonl")):
                curve = plan.read(file)
                if plan.is_finished(curve):
                    done[f"{folder}/{file.parent.name}"] = _rounded([selected(curve, cell)])[0]
        commits += [now] if (now := commit()) not in commits else []
        return {"digest": self.declaration.digest(name), "commit": ", ".join(commits), "finished": done}

    def _sweep(self, name: str) -> tuple[dict[str, dict[Point, list[float]]], dict[str, str]]:
        """Validation accuracy by sweep seed of method → point → accuracies, and the runs that failed.

        When the best rate of a method is at an edge, all methods get the next one: none is tried at rates of its own.
        """
        cell = self.cell(name)
        plan, known = self.plan(name, sweep=True), self.known(name)
        swept = [m for m, entry in cell.methods.items() if not entry.rate]
        tried: dict[str, dict[Point, list[float]]] = {method: {} for method in swept}
        failed: dict[str, str] = {}
        rates = list(cell.rates)
        for _ in range(cell.widenings + 1):
            chosen = [(m, point) for m in swept for point in cell.points(rates)]
            methods = [rated(m, cell, point, plan.overrides) for m, point in chosen]
            failed |= self.train(plan, methods, cell.sweep_seeds)
            for (m, point), method in zip(chosen, methods, strict=True):
                curves = {plan.name(method, seed): plan.curve(method, seed) for seed in cell.sweep_seeds}
                new = {run: selected(c, cell) for run, c in curves.items() if plan.is_finished(c)}
                tried[m][point] = [(known | new).get(run, 0.0) for run in curves]
            beyond = {widened(means(by_point), cell.factor) for by_point in tried.values()}
            rates = sorted(rate for rate in beyond if rate is not None)
            if not rates:
                break
        return tried, failed


def means(tried: Mapping[Point, Sequence[float]]) -> dict[Point, float]:
    """The mean accuracy of each point over the sweep's seeds."""
    return {point: mean_sd(values)[0] for point, values in tried.items()}


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
            points = [] if entry.rate else cell.points(cell.rates)
            names_ = [rated(method, cell, point, sweep.overrides) for point in points]
            runs = [(m, s) for m in names_ for s in cell.sweep_seeds if sweep.name(m, s) not in sweep.known]
            open_ = sum(not sweep.is_finished(sweep.curve(*run)) for run in runs)
            # Which rate is frozen may not be known yet: fresh runs of any rate count.
            done = [fresh.is_finished(c) for c in fresh.curves_of(f"{stem(method, entry, fresh.overrides)}*-s*")]
            total += (open_ + max(cell.seeds - sum(done), 0)) * (entry.seconds or cell.seconds)
        left[name] = total
    return left


def estimate(lab: Lab, names: Sequence[str], jobs: int) -> str:
    """What is left, by cell."""
    left = seconds_left(lab, names)
    lines = [f"{name:<24}{seconds:>8.0f} s" for name, seconds in left.items()]
    total = sum(left.values())
    return "\n".join([*lines, f"{'in all':<24}{total:>8.0f} s, {total / jobs / 3600:.1f} h with {jobs} at a time"])


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
            row: dict[str, Sequence[float]] = {
                "seeds": list(by_seed),
                "start": _rounded(c.accuracy[0] for c in each),
                "accuracy": _rounded(c.at(cell.tokens) for c in each),
                "end": _rounded(c.accuracy[-1] for c in each),
                "steps": _rounded(c.of("steps", cell.tokens) for c in each),
                "processed": _rounded(c.of("processed", cell.tokens) for c in each),
                "seconds": _rounded(c.of("seconds", cell.tokens) for c in each),
                "length": _rounded(c.of("length", cell.tokens) for c in each),
            }
            methods[name] = {key: values for key, values in row.items() if not any(map(math.isnan, values))}
    known = [(a, b) for a, b in pairs if len(curves.get(a, {}).keys() & curves.get(b, {}).keys()) > 1]
    compared = [_pair(cell, curves, pair, axis) for pair in known for axis in AXES]
    return {"methods": methods, "pairs": [pair for pair in compared if not math.isnan(pair["at"])]}


def _pair(cell: Cell, curves: Mapping[str, Mapping[int, Curve]], pair: tuple[str, str], axis: Axis) -> dict[str, Any]:
    """Two methods after as much of an axis as both have: accuracies by seed, and what both took of the other axes."""
    better, worse = (curves[name] for name in pair)
    seeds = [seed for seed in better if seed in worse]
    runs = [by[seed] for by in (better, worse) for seed in seeds]
    shortest = min(c.end(axis) for c in runs)
    fixed = {"tokens": cell.tokens, "steps": float(cell.steps), "processed": cell.tokens}
    asked = fixed.get(axis, 0.0)
    at = min(asked, shortest) if asked else shortest
    return {
        "better": pair[0],
        "worse": pair[1],
        "axis": axis,
        "at": round(at, 1),
        "seeds": seeds,
        "accuracies": [_rounded(by[seed].at(at, axis) for seed in seeds) for by in (better, worse)],
        "took": {
            name: [round(mean_sd([by[seed].of(name, at, axis) for seed in seeds])[0], 1) for by in (better, worse)]
            for name in COSTS
        },
    }


def commit() -> str:
    """The commit of the code, with "+" where code or settings have changed since; "" outside a repository."""
    git = ["git", "-C", str(ROOT.parent)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    code = ("pipeline", "components", "configs", "creditgraph", "tools")
    changed = subprocess.run([*git, "status", "--porcelain", "--", *code], capture_output=True, text=True).stdout
    return head + ("+" if changed else "")


def selected(curve: Curve, cell: Cell) -> float:
    """Accuracy at the end of the axis by which rates are chosen."""
    amount = float(cell.steps) if cell.select == "steps" else cell.tokens
    return curve.at(amount, cell.select)


def committed_claims(cell: str) -> list[str]:
    """Claims on a cell in the declaration of the commit that is checked out; none outside a repository."""
    shown = ["git", "-C", str(ROOT.parent), "show", f"HEAD:{DECLARED.relative_to(ROOT.parent).as_posix()}"]
    done = subprocess.run(shown, capture_output=True, text=True)
    claims = yaml.safe_load(done.stdout)["claims"] if not done.returncode else {}
    return [name for name, claim in claims.items() if claim.get("cell") == cell]


def compose_all(lab: Lab, names: Sequence[str]) -> dict[str, str]:
    """Composes every method of the cells, so that a mistake shows before anything is trained; cell → what is wrong."""
    wrong = {}
    for name in names:
        try:
            for method, entry in lab.cell(name).methods.items():
                overrides = [f"recipe={entry.recipe}", *lab.settings(name, sweep=True), *entry.set]
                build_experiment(compose(overrides, lab.config_dirs), f"{name}.{method}")
        except CreditgraphError as error:
            wrong[name] = str(error)
    return wrong


def measure_all(lab: Lab, names: Sequence[str], kept: Path, say: Callable[[str], None]) -> bool:
    """Measures cells one after the other and keeps each in a results.json; False when a run failed.

    Raises:
        ConfigError: the table is that of a repository whose code is not that of a commit.
    """
    if kept == RESULTS and not re.fullmatch("[0-9a-f]+", commit()):
        raise ConfigError(
            f"{kept} names the commit of each result: commit the changes first, or name another --results."
        )
    complete = True
    lab.make_models(names, say)
    for name in names:
        say(f"cell {name}: {lab.cell(name).title}")
        entry = lab.measure(name)
        complete &= not entry["failed"]
        cells = read_results(kept)
        cells[name] = dated(entry, cells.get(name))
        order = {n: cells[n] for n in (*lab.declaration.cells, *lab.declaration.quick) if n in cells}
        kept.parent.mkdir(parents=True, exist_ok=True)
        with replacing(kept) as aside:
            aside.write_text(as_text(order), encoding="utf-8")
    return complete


def _rounded(values: Any) -> list[float]:
    return [round(float(v), PLACES) for v in values]
