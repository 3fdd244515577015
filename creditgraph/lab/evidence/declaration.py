"""What is measured, declared before anything runs: families, cells of methods with a budget, and claims."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import yaml

from creditgraph.lab.bench.curves import Axis
from creditgraph.lab.bench.methods import Method
from creditgraph.pipeline.app.progress import ACCURACY
from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.core.settings import build_config

T = TypeVar("T")
Source = Literal["from the paper's text", "from the authors' release", "second-hand", "our reading", "ours"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Problems and the model that is trained on them."""

    title: str
    """what the problems are, one line"""
    settings: tuple[str, ...]
    """data and model, as on the command line"""
    validation: tuple[str, ...] = ("data.eval.split=validation",)
    """settings by which the evaluation takes problems that only the sweep of learning rates sees"""
    metric: str = ACCURACY
    """what is compared: greedy accuracy, or evaluator/mean_at_<n> (with evaluator.samples=<n> in the settings), for
    families whose greedy model starts too high or far from the samples that are trained"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A method of a cell."""

    recipe: str
    """name in configs/recipe"""
    set: tuple[str, ...] = ()
    """further settings, as on the command line"""
    baseline: str = ""
    """method of the same cell with as many optimiser steps per batch and the same clamp of negative advantages; "" for
    a method that is itself a baseline"""
    seconds: float = 0.0
    """processor seconds of a run, for the estimate; 0 takes the cell's"""
    knows_errors: bool = False
    """whether it is given the true first errors, which no user has: it bounds the others, and the README names none"""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Methods on one family with one budget."""

    title: str
    """one line"""
    family: str
    """name of a family"""
    regime: str
    """what the setting is chosen for, by theory, before running"""
    tokens: float
    """sampled tokens at which methods are compared; every run goes on until it has them"""
    methods: dict[str, Entry]
    """name → method; the first is a baseline"""
    steps: int = 0
    """optimiser steps that every run takes at least; 0 is what the tokens pay for"""
    set: tuple[str, ...] = ()
    """settings of all runs"""
    every: int = 5
    """iterations between evaluations"""
    select: Literal["tokens", "steps"] = "tokens"
    """learning rates are chosen by the accuracy at the end of this axis"""
    rates: tuple[float, ...] = (5e-5, 1.5e-4, 4.5e-4)
    """learning rates swept for every method"""
    factor: float = 3.0
    """where the best rate is at an edge, the next one beyond is this many times away"""
    widenings: int = 2
    """how often the sweep is widened at most"""
    sweep_seeds: tuple[int, ...] = (100, 101)
    """random seeds of the sweep, which no result uses"""
    seeds: int = 8
    """fresh random seeds, from 0"""
    seconds: float = 30.0
    """processor seconds of a run, for the estimate"""
    withdrawn: str = ""
    """why a comparison of its methods at equal sampled tokens says nothing about their credit: such results were shown
    once, and no page shows them any more"""

    def __post_init__(self) -> None:
        if len(set(self.rates)) < 2 or not set(self.sweep_seeds).isdisjoint(range(self.seeds)) or self.seeds < 2:
            raise ValueError("expected two rates or more, two seeds or more, and none of them in sweep_seeds.")
        if self.select == "steps" and not self.steps:
            raise ValueError("select: expected steps above 0 with 'steps', because runs are to be compared at as many.")
        for name, entry in self.methods.items():
            known = [n for n, e in self.methods.items() if not e.baseline]
            if entry.baseline and entry.baseline not in known:
                raise ValueError(f"methods.{name}.baseline: expected one of {', '.join(known)}, got {entry.baseline}.")

    def baseline_of(self, name: str) -> str:
        """The method that a method is compared with; the cell's first one for another baseline, "" for the first."""
        return self.methods[name].baseline or (first if name != (first := next(iter(self.methods))) else "")

    def digest(self, family: Family) -> str:
        """A short mark of all that a result depends on: another mark says that the cell was measured in another form.

        Titles, reasons, estimated seconds and what only pages read do not count.
        """
        values = asdict(self) | {"title": "", "regime": "", "seconds": 0, "family": {**asdict(family), "title": ""}}
        values["methods"] = {n: {**e, "seconds": 0, "baseline": ""} for n, e in values["methods"].items()}
        for entry in values["methods"].values():
            del entry["knows_errors"]
        del values["withdrawn"]
        if family.metric == ACCURACY:
            del values["family"]["metric"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Something a paper says, as a comparison that a cell can make."""

    text: str
    """the claim, in one sentence"""
    paper: str
    """arXiv number"""
    page: str
    """page in docs/papers"""
    source: Source
    """how sure we are that the paper says so"""
    prediction: str
    """what theory expects here, and why; written before running"""
    cell: str = ""
    """cell that tests it; "" for one that cannot be tested here"""
    better: str = ""
    """method that the claim says is ahead"""
    worse: str = ""
    """method that it is compared with"""
    axis: Axis = "tokens"
    """what both get the same of"""
    untestable: str = ""
    """why it cannot be tested here"""

    def __post_init__(self) -> None:
        if bool(self.untestable) == bool(self.cell and self.better and self.worse):
            raise ValueError("expected either cell, better and worse, or untestable.")


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """Families, cells in the order in which they run, and claims."""

    families: dict[str, Family]
    """name → family"""
    cells: dict[str, Cell]
    """name → cell"""
    claims: dict[str, Claim]
    """name → claim"""
    quick: dict[str, Cell] = field(default_factory=dict)
    """cells that test the tool; no claim rests on them"""

    def __post_init__(self) -> None:
        cells = self.cells | self.quick
        for name, cell in cells.items():
            if cell.family not in self.families:
                raise ValueError(f"cells.{name}: no family '{cell.family}'.{did_you_mean(cell.family, self.families)}")
        for name, claim in self.claims.items():
            known = cells[claim.cell].methods if claim.cell in cells else {}
            for method in (claim.better, claim.worse):
                if claim.cell and method not in known:
                    near = did_you_mean(method, known) if known else did_you_mean(claim.cell, cells)
                    raise ValueError(f"claims.{name}: no method '{method}' in cell '{claim.cell}'.{near}")

    def settings(self, name: str, sweep: bool = False) -> tuple[str, ...]:
        """Settings of all runs of a cell.

        A sweep evaluates on validation problems. It reads the accuracy at the end of a run alone, so it evaluates
        nowhere else; with `steps` a run may end far beyond them.
        """
        cell = (self.cells | self.quick)[name]
        family = self.families[cell.family]
        every = 0 if sweep and not cell.steps else cell.every
        own = (*family.settings, f"evaluator.every={every}", "run.record.every=0", *cell.set)
        return (*own, *family.validation) if sweep else own

    def digest(self, name: str) -> str:
        """The mark of a cell in its present form."""
        cell = (self.cells | self.quick)[name]
        return cell.digest(self.families[cell.family])


def read_declaration(path: Path) -> Declaration:
    """Reads and checks a declaration; all mistakes of the YAML in one ConfigError."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} cannot be read as YAML ({error}). Name a declaration of cells and claims."
        ) from error
    result, problems = build_config(Declaration, values, path.name)
    if problems:
        raise ConfigError("\n".join(problems))
    return result  # type: ignore[no-any-return]


def stem(name: str, entry: Entry, settings: Sequence[str]) -> str:
    """The beginning of the names of a method's runs, with a mark of its settings and of the cell's.

    So a run of another declaration is never taken for one of this.
    """
    form = json.dumps([entry.recipe, *entry.set, *settings])
    return f"{name}-{hashlib.sha256(form.encode()).hexdigest()[:6]}-lr"


def rated(name: str, entry: Entry, rate: float, settings: Sequence[str]) -> Method:
    """A method with its learning rate, as benchmarks train it; `settings` are those of all runs of the cell."""
    return Method(
        f"{stem(name, entry, settings)}{rate:g}", entry.recipe, (*entry.set, f"learner.optimizer.lr={rate:g}")
    )


def chosen_cells(declaration: Declaration, names: list[str] | None) -> Mapping[str, Cell]:
    """The named cells in the order given, or all."""
    known = declaration.cells | declaration.quick
    for name in names or ():
        if name not in known:
            raise ConfigError(f"evidence: no cell '{name}'.{did_you_mean(name, known)} Cells: {', '.join(known)}.")
    return {name: known[name] for name in names} if names else declaration.cells


def best_rate(accuracy: Mapping[float, float]) -> float:
    """The rate of the highest accuracy, the lower one of equals."""
    return max(sorted(accuracy), key=lambda rate: accuracy[rate])


def widened(accuracy: Mapping[float, float], factor: float) -> float | None:
    """The next rate to try, beyond the edge at which the best one is; None when the best one has neighbours."""
    best = best_rate(accuracy)
    beyond: dict[float, Callable[[float], float]] = {
        min(accuracy): lambda r: r / factor,
        max(accuracy): lambda r: r * factor,
    }
    return float(f"{beyond[best](best):.3g}") if best in beyond else None
