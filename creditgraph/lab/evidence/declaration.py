"""What is measured, declared before anything runs: families, cells of methods with a budget, and claims."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from creditgraph.lab.bench.curves import Axis
from creditgraph.lab.bench.methods import Method
from creditgraph.pipeline.app.progress import ACCURACY
from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.core.settings import build_config
from creditgraph.pipeline.run.compose.choices import read_yaml

T = TypeVar("T")
Source = Literal["from the paper's text", "from the authors' release", "second-hand", "our reading", "ours"]
Expected = Literal["higher", "lower", "no difference", "none"]
DECLARED = Path(__file__).resolve().with_name("declared.yaml")
SWEEP = (
    "rates",
    "factor",
    "widenings",
    "sweep_seeds",
    "batches",
)  # settings of a cell that choose a rate, not a result


class Point(NamedTuple):
    """A learning rate, and the prompts of a batch where these are swept too (else 0)."""

    rate: float
    batch: int = 0

    @property
    def text(self) -> str:
        """The key of the point in results.json.

        >>> Point(3e-5).text, Point(3e-5, 4).text
        ('3e-05', '3e-05 x 4')
        """
        return f"{self.rate:g} x {self.batch}" if self.batch else f"{self.rate:g}"


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
    warm_start: str = ""
    """arguments of tools/make_tiny_model for a model of its own, warm-started from another random seed; "" for a
    shipped one"""


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
    rate: float = 0.0
    """learning rate, where it is known and not to be swept; 0 sweeps"""
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
    every: float = 5
    """iterations between evaluations; where batches are swept, of a run with the most prompts, and at least one"""
    select: Literal["tokens", "steps", "processed"] = "tokens"
    """learning rates are chosen by the accuracy at the end of this axis; `processed` compares at `tokens` of those"""
    rates: tuple[float, ...] = (5e-5, 1.5e-4, 4.5e-4)
    """learning rates swept; every method is tried at every rate that one of them needs"""
    batches: tuple[int, ...] = ()
    """prompts per batch, swept like the rate, where methods sample unlike amounts per step; () leaves the recipe's"""
    factor: float = 3.0
    """where the best rate is at an edge, the next one beyond is this many times away"""
    widenings: int = 2
    """how often the sweep is widened at most"""
    sweep_seeds: tuple[int, ...] = (100, 101, 102, 103)
    """random seeds of the sweep, which no result uses"""
    seeds: int = 8
    """fresh random seeds"""
    first_seed: int = 0
    """the first of them: a cell that measures a claim again with more seeds takes none that a result has used"""
    seconds: float = 30.0
    """processor seconds of a run, for the estimate"""
    withdrawn: str = ""
    """why a comparison of its methods at equal tokens says nothing about their credit: no page shows one, and the cell
    is measured only when it is named"""

    def __post_init__(self) -> None:
        if len(set(self.rates)) < 2 or not set(self.sweep_seeds).isdisjoint(self.fresh) or self.seeds < 2:
            raise ValueError("expected two rates or more, two seeds or more, and none of them in sweep_seeds.")
        if self.select == "steps" and not self.steps:
            raise ValueError("select: expected steps above 0 with 'steps', because runs are to be compared at as many.")
        for name, entry in self.methods.items():
            known = [n for n, e in self.methods.items() if not e.baseline]
            if entry.baseline and entry.baseline not in known:
                raise ValueError(f"methods.{name}.baseline: expected one of {', '.join(known)}, got {entry.baseline}.")

    @property
    def fresh(self) -> range:
        """The random seeds of results."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def baseline_of(self, name: str) -> str:
        """The method that a method is compared with; the cell's first one for another baseline, "" for the first."""
        return self.methods[name].baseline or (first if name != (first := next(iter(self.methods))) else "")

    def digest(self, family: Family) -> str:
        """A short mark of all that a result depends on: another mark says that the cell was measured in another form.

        Titles, reasons, estimated seconds and what only pages read do not count, nor how rates are chosen.
        """
        values = asdict(self) | {"family": asdict(family)}
        for name in ("title", "regime", "seconds", "withdrawn", *SWEEP):
            del values[name]
        del values["family"]["title"]
        if not family.warm_start:
            del values["family"]["warm_start"]
        if not self.first_seed:
            del values["first_seed"]
        for entry in values["methods"].values():
            del entry["seconds"], entry["baseline"], entry["knows_errors"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def sweep(self) -> dict[str, Any]:
        """The rule by which rates are chosen, as it is kept beside results."""
        values = asdict(self)
        return {name: list(v) if isinstance(v := values[name], tuple) else v for name in SWEEP} | {"union": True}

    def points(self, rates: Sequence[float]) -> list[Point]:
        """These rates with every batch."""
        return [Point(rate, batch) for rate in rates for batch in self.batches or (0,)]


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
    """what theory expects here, and why, in the words of the day; written before running"""
    expects: Expected
    """the prediction in one word, by which it is scored"""
    primary: bool = False
    """whether it is the claim by which the paper stands or falls here; one of a paper at most"""
    cell: str = ""
    """cell that tests it; "" for one that cannot be tested here"""
    better: str = ""
    """method that the claim says is higher"""
    worse: str = ""
    """method that it is compared with"""
    axis: Axis = "tokens"
    """what both get the same of"""
    untestable: str = ""
    """why it cannot be tested here"""

    def __post_init__(self) -> None:
        if bool(self.untestable) == bool(self.cell and self.better and self.worse):
            raise ValueError("expected either cell, better and worse, or untestable.")
        if bool(self.untestable) != (self.expects == "none"):
            raise ValueError("expects: expected none for what cannot be tested, and a word for every other claim.")


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
    recipe: dict[str, Cell] = field(default_factory=dict)
    """cells of plain GRPO by which `creditgraph evidence` judges a method in minutes"""

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
        primary = [claim.paper for claim in self.claims.values() if claim.primary]
        if twice := sorted({paper for paper in primary if primary.count(paper) > 1}):
            raise ValueError(f"claims: expected one primary claim of a paper, got several of {', '.join(twice)}.")

    def settings(self, name: str, sweep: bool = False) -> tuple[str, ...]:
        """Settings of all runs of a cell.

        A sweep evaluates on validation problems. It reads the accuracy at the end of a run alone, so it evaluates
        nowhere else, unless a run may end far beyond where it is read.
        """
        cell = (self.cells | self.quick)[name]
        family = self.families[cell.family]
        every = 0 if sweep and cell.select == "tokens" else cell.every
        evaluation = () if cell.batches else (f"evaluator.every={every:g}",)
        fixed = [s for s in cell.set if not (cell.batches and s.startswith("prompts.batch="))]
        own = (*family.settings, *evaluation, "run.record.every=0", *fixed)
        return (*own, *family.validation) if sweep else own

    def digest(self, name: str) -> str:
        """The mark of a cell in its present form."""
        cell = (self.cells | self.quick)[name]
        return cell.digest(self.families[cell.family])


def read_declaration(path: Path) -> Declaration:
    """Reads and checks a declaration; all mistakes of the YAML in one ConfigError."""
    result, problems = build_config(Declaration, read_yaml(path), path.name)
    if problems:
        raise ConfigError("\n".join(problems))
    return result  # type: ignore[no-any-return]


def stem(name: str, entry: Entry, settings: Sequence[str]) -> str:
    """The beginning of the names of a method's runs, with a mark of its settings and of the cell's.

    So a run of another declaration is never taken for one of this.
    """
    form = json.dumps([entry.recipe, *entry.set, *settings])
    return f"{name}-{hashlib.sha256(form.encode()).hexdigest()[:6]}-lr"


def rated(name: str, cell: Cell, point: Point, settings: Sequence[str]) -> Method:
    """A method of a cell with its learning rate and batch, as benchmarks train it; `settings` are those of all runs.

    Where batches are swept, a run with fewer prompts evaluates as often per prompt as one with the most.
    """
    entry = cell.methods[name]
    own = [*entry.set, f"learner.optimizer.lr={point.rate:g}"]
    if point.batch:
        own += [
            f"prompts.batch={point.batch}",
            f"evaluator.every={max(1, round(cell.every * max(cell.batches) / point.batch))}",
        ]
    return Method(f"{stem(name, entry, settings)}{point.text.replace(' ', '')}", entry.recipe, tuple(own))


def chosen_cells(declaration: Declaration, names: list[str] | None) -> Mapping[str, Cell]:
    """The named cells in the order given, or all."""
    known = declaration.cells | declaration.quick
    for name in names or ():
        if name not in known:
            raise ConfigError(f"evidence: no cell '{name}'.{did_you_mean(name, known)} Cells: {', '.join(known)}.")
    return {n: known[n] for n in names} if names else {n: c for n, c in declaration.cells.items() if not c.withdrawn}


def best_point(accuracy: Mapping[Point, float]) -> Point:
    """The point of the highest accuracy, of equals the lowest rate with the fewest prompts."""
    return max(sorted(accuracy), key=lambda point: accuracy[point])


def widened(accuracy: Mapping[Point, float], factor: float) -> float | None:
    """The next rate to try, beyond the edge at which the best one is; None with neighbours or without a mistake."""
    point, rates = best_point(accuracy), [point.rate for point in accuracy]
    beyond: dict[float, Callable[[float], float]] = {min(rates): lambda r: r / factor, max(rates): lambda r: r * factor}
    if accuracy[point] >= 1 or point.rate not in beyond:
        return None
    return float(f"{beyond[point.rate](point.rate):.3g}")
