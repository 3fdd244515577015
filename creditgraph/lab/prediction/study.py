"""Does a score of credit, measured before training, predict what training gains? Tested on held-out families.

Cells are comparisons of methods at equal tokens; families of problems are split into two halves, by name. On one half
each score gets its direction (does more of it mean more gain?), and all scores together a ridge regression of the ranks
of gains on the ranks of scores; both are tested on the other half, and then the halves change places. τ is Kendall's
τ-b between scores and gains of a cell's methods, averaged over cells. Its interval is the bootstrap's over families and
methods, directions being those of the fit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from creditgraph.lab.bench.statistics import Floats, ranks
from creditgraph.pipeline.app.text import markdown_table, visible
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.streams import Stream, key_of

COMBINED = "all scores together"
LEAST_TAU = 0.5
FEWEST = 3  # methods of a cell
DRAWS = 1000
RIDGE = 1.0  # in units of the variance of a rank

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Methods trained on one family of problems at equal tokens.

    Attributes:
        name: of the cell.
        family: of its problems; cells of a family are never on both sides of the split.
        runs: method → seed → what training gained.
        scores: method → score → value; NaN and missing ones are left out.
    """

    name: str
    family: str
    runs: Mapping[str, Mapping[str, float]]
    scores: Mapping[str, Mapping[str, float]]

    @property
    def gain(self) -> dict[str, float]:
        """Method → its mean gain."""
        return {method: sum(runs.values()) / len(runs) for method, runs in self.runs.items() if runs}

    @property
    def methods(self) -> list[str]:
        """Methods with a gain and scores."""
        return [m for m, gain in self.gain.items() if m in self.scores and math.isfinite(gain)]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How well a score predicts gains on held-out families.

    Attributes:
        tau: mean of Kendall's τ over held-out cells; NaN where no cell has enough methods with this score.
        low, high: 95 % interval.
        directions: +1 or −1 as fitted on each half; 0 for the combination.
        cells: held-out cells.
    """

    tau: float
    low: float
    high: float
    directions: tuple[int, ...] = field(default=())
    cells: int = 0

    @property
    def predicts(self) -> bool:
        """τ ≥ .5, and an interval above 0."""
        return self.tau >= LEAST_TAU and self.low > 0


def kendall(x: Floats, y: Floats) -> Floats:
    """Kendall's τ-b of arrays [..., N] along their last axis; NaN where one is constant.

    >>> float(kendall(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0]))), float(kendall(np.ones(2), np.arange(2.0)))
    (0.3333333333333333, nan)
    """
    a, b = (np.sign(v[..., :, None] - v[..., None, :]) for v in (x, y))
    pairs = np.sqrt((a != 0).sum((-2, -1)) * (b != 0).sum((-2, -1), dtype=np.float64))
    agreed: Floats = (a * b).sum((-2, -1))
    tau: Floats = np.divide(agreed, pairs, out=np.full(pairs.shape, np.nan), where=pairs > 0)
    return tau


def halves(families: Sequence[str]) -> dict[str, int]:
    """Family → 0 or 1, as many of each as can be, in an order that depends on the names alone."""
    return {family: i % 2 for i, family in enumerate(sorted(set(families), key=lambda f: key_of("half", f)))}


def study(cells: Sequence[Cell]) -> dict[str, Prediction]:
    """Score → how well it predicts, the best first.

    Raises:
        DataError: fewer than two families with enough methods.
    """
    usable = [cell for cell in cells if len(cell.methods) >= FEWEST]
    half = halves([cell.family for cell in usable])
    if len(half) < 2:
        raise DataError(
            f"{len(half)} families have {FEWEST} methods with a gain and scores; expected at least two, one to fit and "
            "one to test. Train on more families, or measure the scores of those that were trained."
        )
    names = sorted({score for cell in usable for m in cell.methods for score in cell.scores[m]})
    held: dict[str, list[tuple[Cell, Floats, Floats]]] = {name: [] for name in (COMBINED, *names)}
    directions: dict[str, list[int]] = {name: [] for name in held}
    for test in (0, 1):
        fitted = [cell for cell in usable if half[cell.family] != test]
        tested = [cell for cell in usable if half[cell.family] == test]
        weights = _ridge(fitted, names)
        for cell in tested:
            held[COMBINED].append((cell, _rank_table(cell, names) @ weights, _gains(cell, cell.methods)))
        for name in names:
            pairs = [pair for cell in fitted if len((pair := _pair(cell, name))[0]) >= FEWEST]
            known = [tau for pair in pairs if math.isfinite(tau := float(kendall(*pair)))]
            if not known:
                continue
            directions[name].append(1 if sum(known) >= 0 else -1)
            held[name] += [
                (c, directions[name][-1] * x, y) for c in tested for x, y in [_pair(c, name)] if len(x) >= FEWEST
            ]
    result = {name: _predicted(name, parts, tuple(directions[name])) for name, parts in held.items() if parts}
    return dict(sorted(result.items(), key=lambda item: -item[1].tau if math.isfinite(item[1].tau) else math.inf))


def repeatability(cells: Sequence[Cell]) -> dict[str, float]:
    """Cell → Kendall's τ between methods' mean gains over half of the seeds and over the others, mean of all splits.

    A score that equals the true gains would reach at least this: here half as many seeds stand for the truth, and both
    sides have noise. Cells of fewer methods, or without two seeds that all of them share, are left out.
    """
    result = {}
    for cell in cells:
        seeds = sorted(set.intersection(*(set(cell.runs[m]) for m in cell.methods))) if cell.methods else []
        if len(cell.methods) < FEWEST or len(seeds) < 2:
            continue
        gains = np.array([[cell.runs[m][seed] for seed in seeds] for m in cell.methods])
        sides = [np.isin(np.arange(len(seeds)), half) for half in combinations(range(len(seeds)), len(seeds) // 2)]
        tau = [float(kendall(gains[:, side].mean(1), gains[:, ~side].mean(1))) for side in sides]
        known = [one for one in tau if math.isfinite(one)]
        if known:
            result[cell.name] = sum(known) / len(known)
    return result


def repeatability_line(cells: Sequence[Cell]) -> str:
    """How well gains repeat, in one sentence; "" where no cell has two seeds."""
    tau = repeatability(cells)
    if not tau:
        return ""
    low = [name for name, one in tau.items() if one < LEAST_TAU]
    which = f"; in {', '.join(low)} it is below {LEAST_TAU}" if low else ""
    return (
        f"Gains of half of the seeds predict those of the others with τ = {sum(tau.values()) / len(tau):+.2f}{which}."
    )


def study_table(result: Mapping[str, Prediction]) -> str:
    """What predicts, in one sentence, and the table."""
    good = [name for name, score in result.items() if score.predicts]
    head = ["score", "more is", "τ, held out", "95 %", "cells"]
    rows = []
    for name, f in result.items():
        sides = set(f.directions)
        direction = "fitted" if not sides else "better" if sides == {1} else "worse" if sides == {-1} else "undecided"
        interval = "–" if math.isnan(f.low) else f"{f.low:+.2f} to {f.high:+.2f}"
        rows.append([visible(name), direction, "–" if math.isnan(f.tau) else f"{f.tau:+.2f}", interval, str(f.cells)])
    said = f"{', '.join(good)} predict" if len(good) > 1 else f"{good[0]} predicts" if good else "No score predicts"
    first = f"{said} the gain of training on held-out families (τ ≥ {LEAST_TAU}, interval above 0)."
    return f"{first}\n\n{markdown_table(head, rows)}"


def _pair(cell: Cell, score: str) -> tuple[Floats, Floats]:
    """The score and the gain of the methods that have it."""
    methods = [m for m in cell.methods if math.isfinite(cell.scores[m].get(score, math.nan))]
    return np.array([cell.scores[m][score] for m in methods], np.float64), _gains(cell, methods)


def _gains(cell: Cell, methods: Sequence[str]) -> Floats:
    gain = cell.gain
    return np.array([gain[m] for m in methods], np.float64)


def _centred(x: Floats) -> Floats:
    """Ranks within a cell, from −1 to 1."""
    place: Floats = (2 * ranks(x) - len(x) - 1) / max(len(x) - 1, 1)
    return place


def _rank_table(cell: Cell, names: Sequence[str]) -> Floats:
    """Ranks of each score [methods, names]; a score that a method lacks has the middle rank."""
    table = np.zeros((len(cell.methods), len(names)))
    for j, name in enumerate(names):
        values = np.array([cell.scores[m].get(name, math.nan) for m in cell.methods], np.float64)
        known = np.isfinite(values)
        table[known, j] = _centred(values[known])
    return table


def _ridge(cells: Sequence[Cell], names: Sequence[str]) -> Floats:
    """Weights of the scores' ranks [names] that give the ranks of gains."""
    x = np.concatenate([_rank_table(cell, names) for cell in cells])
    y = np.concatenate([_centred(_gains(cell, cell.methods)) for cell in cells])
    weights: Floats = np.linalg.solve(x.T @ x + RIDGE * len(x) / 3 * np.eye(len(names)), x.T @ y)
    return weights


def _predicted(name: str, parts: Sequence[tuple[Cell, Floats, Floats]], directions: tuple[int, ...]) -> Prediction:
    rng = Stream("credit prediction", name).generator()
    families = sorted({cell.family for cell, _, _ in parts})
    total, count = np.zeros(DRAWS), np.zeros(DRAWS)
    for _ in families:
        drawn = rng.integers(0, len(families), DRAWS)
        for cell, x, y in parts:
            here = drawn == families.index(cell.family)
            rows: Ints = rng.integers(0, len(x), (int(here.sum()), len(x)))
            tau = kendall(x[rows], y[rows])
            total[here] += np.nan_to_num(tau)
            count[here] += np.isfinite(tau)
    means = total[count > 0] / count[count > 0]
    low, high = (float(end) for end in np.quantile(means, (0.025, 0.975))) if len(means) else (math.nan, math.nan)
    known = [one for _, x, y in parts if math.isfinite(one := float(kendall(x, y)))]
    held = sum(known) / len(known) if known else math.nan
    return Prediction(tau=held, low=low, high=high, directions=directions, cells=len(parts))
