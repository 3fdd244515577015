"""The table and the figure of creditgraph compare."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from creditgraph.lab.bench.credit_report import cell
from creditgraph.lab.bench.curves import FEWEST_STEPS, Curve, default_threshold
from creditgraph.lab.bench.paired import LEVEL, Paired, holm, paired
from creditgraph.lab.bench.statistics import Floats, mean_sd
from creditgraph.pipeline.app.text import markdown_table
from creditgraph.pipeline.core.errors import extra

MOST_LINES = 7  # of a large panel
PER_ROW = 7  # small panels
NO_DIFFERENCE = "no significant difference"
NOT_RANKED = "not ranked"
NOT_TESTED = "not tested"
# Black for the baseline, then blue, orange, green, magenta, violet, teal: no two are near-equal, also in print.
COLORS = ("#000000", "#0b5cc4", "#b35900", "#008811", "#dd1177", "#aa00ff", "#00a0a0")

Curves = Mapping[str, Mapping[int, Curve]]
"""Method → seed → curve, the baseline first."""


@dataclass(frozen=True)
class Row:
    """One method of the comparison.

    Attributes:
        accuracy: seed → accuracy at the budget.
        steps: seed → optimiser steps at the budget.
        against: paired differences from the baseline at the budget, None for the baseline.
        word: "above", "below" or `NO_DIFFERENCE`, by p-values that are corrected for the number of methods; "baseline",
            or "not ranked" for fewer than two optimiser steps within the budget, on average, or "not tested" with
            fewer than two seeds that reach the budget in both.
        reached: seed → tokens to the threshold (NaN: not within the budget).
        speed: tokens of the baseline divided by those of this method, means over seeds; NaN unless all seeds reach it.
        seconds: seed → wall time of training up to the budget.
        iterations: seed → iterations.
    """

    accuracy: dict[int, float]
    steps: dict[int, float]
    against: Paired | None
    word: str
    reached: dict[int, float]
    speed: float
    seconds: dict[int, float]
    iterations: dict[int, int]


def analyse(curves: Curves, budget: float, threshold: float | None = None) -> tuple[dict[str, Row], float]:
    """Rows by method, the baseline first, and the threshold (`default_threshold` of the baseline when None)."""
    baseline = next(iter(curves))
    bar = default_threshold(list(curves[baseline].values()), budget) if threshold is None else threshold
    against = {
        name: paired([c.at(budget) - by_seed[s].at(budget) for s, c in curves[name].items() if s in by_seed])
        for by_seed in [curves[baseline]]
        for name in curves
    }
    others = [name for name in curves if name != baseline]
    corrected = dict(zip(others, holm([against[n].p for n in others]), strict=True))
    rows: dict[str, Row] = {}
    for name, by_seed in curves.items():
        reached = {s: c.reaches(bar, budget) for s, c in by_seed.items()}
        base = rows[baseline].reached if name != baseline else reached
        complete = reached and not any(math.isnan(t) for t in [*reached.values(), *base.values()])
        steps = {s: c.of("steps", budget) for s, c in by_seed.items()}
        rows[name] = Row(
            accuracy={s: c.at(budget) for s, c in by_seed.items()},
            steps=steps,
            against=None if name == baseline else against[name],
            word="baseline" if name == baseline else _word(against[name], corrected[name], steps),
            reached=reached,
            speed=mean_sd(list(base.values()))[0] / mean_sd(list(reached.values()))[0] if complete else math.nan,
            seconds={s: c.of("seconds", budget) for s, c in by_seed.items()},
            iterations={s: c.iterations for s, c in by_seed.items()},
        )
    return rows, bar


def _word(against: Paired, p: float, steps: Mapping[int, float]) -> str:
    if mean_sd(list(steps.values()))[0] < FEWEST_STEPS:
        return NOT_RANKED
    if against.pairs < 2:
        return NOT_TESTED
    if p > LEVEL:
        return NO_DIFFERENCE
    return "above" if against.difference > 0 else "below"


def table(rows: Mapping[str, Row], budget: float, threshold: float) -> str:
    """A Markdown table, and sentences that list the methods above and not above the baseline."""
    baseline = next(iter(rows))
    head = ["method", f"accuracy at {budget / 1e6:.2f}M tokens", "steps", f"against {baseline}", "verdict"]
    head += [f"tokens to {threshold:.2f}", "reached", f"{baseline} tokens / its tokens", "seconds", "seeds"]
    return "\n".join([markdown_table(head, [_cells(name, row) for name, row in rows.items()]), "", *sentences(rows)])


def _cells(name: str, row: Row) -> list[str]:
    tokens = [t for t in row.reached.values() if not math.isnan(t)]
    mean, sd = mean_sd(tokens)
    return [
        name,
        cell(mean_sd(list(row.accuracy.values())), 3),
        cell((mean_sd(list(row.steps.values()))[0], math.nan), 0),
        "-" if row.against is None else row.against.text(),
        row.word,
        cell((mean / 1000, sd / 1000), 0) + ("k" if tokens else ""),
        f"{len(tokens)}/{len(row.reached)}",
        cell((row.speed, math.nan), 2),
        cell(mean_sd(list(row.seconds.values())), 0),
        str(sum(not math.isnan(a) for a in row.accuracy.values())),
    ]


def sentences(rows: Mapping[str, Row]) -> list[str]:
    """Which methods end above, below, or without a significant difference from the baseline, or are not ranked."""
    baseline = next(iter(rows))
    texts = {
        "above": f"Above {baseline} at equal sampled tokens",
        NO_DIFFERENCE: f"No significant difference from {baseline} with these seeds, so not shown to beat it",
        "below": f"Below {baseline}",
        NOT_RANKED: "Not ranked, since the budget ends before their second optimiser step",
        NOT_TESTED: f"Not tested, for want of two seeds that reach the budget as {baseline}'s do",
    }
    lines = []
    for word, text in texts.items():
        names = [n for n, r in rows.items() if r.word == word]
        if names or word not in (NOT_RANKED, NOT_TESTED):
            lines.append(f"{text}: {', '.join(names) or 'none'}.")
    return lines


def as_json(rows: Mapping[str, Row], curves: Curves) -> dict[str, Any]:
    """Everything in the table, and the curves, as plain values."""
    return {
        name: {
            **vars(row),
            "against": None if row.against is None else vars(row.against),
            "curves": {
                seed: {"tokens": c.tokens.tolist(), "seconds": c.seconds.tolist(), "accuracy": c.accuracy.tolist()}
                for seed, c in curves[name].items()
            },
        }
        for name, row in rows.items()
    }


def chosen(curves: Curves, budget: float, most: int = MOST_LINES) -> tuple[list[str], list[str]]:
    """The methods of the large panels, the baseline first, then the best at the budget; and the rest, by accuracy."""
    baseline, *others = [name for name, by_seed in curves.items() if any(len(c.tokens) for c in by_seed.values())]
    final = {name: _accuracy(curves[name], budget) for name in others}
    ranked = sorted(others, key=lambda name: (-final[name], name))
    return [baseline, *ranked[: most - 1]], ranked[most - 1 :]


def _accuracy(by_seed: Mapping[int, Curve], budget: float) -> float:
    """Mean accuracy at the budget, −1 without any."""
    known = [a for c in by_seed.values() if not math.isnan(a := c.at(budget))]
    return sum(known) / len(known) if known else -1.0


def band(seeds: Sequence[Curve], along: str, end: float = math.inf) -> tuple[Floats, Floats, Floats, Floats]:
    """Places from 0 to `end`, the mean accuracy there, and mean ∓ standard deviation over seeds, cut to 0 … 1."""
    grid = np.linspace(0, min(end, *(getattr(c, along)[-1] for c in seeds)), 60)
    each = np.stack([np.interp(grid, getattr(c, along), c.accuracy) for c in seeds])
    mean = each.mean(0)
    sd = each.std(0, ddof=1) if len(seeds) > 1 else np.zeros(len(grid))
    return grid, mean, np.clip(mean - sd, 0, 1), np.clip(mean + sd, 0, 1)


def draw(curves: Curves, budget: float, threshold: float, path: Path) -> None:
    """Writes the figure: mean accuracy and its standard deviation over seeds.

    At most `MOST_LINES` methods over sampled tokens and over wall time: the baseline and the best at the budget. Each
    other method has a small panel over sampled tokens, with the baseline in it.
    """
    with extra("plots", "compare"):
        from matplotlib.figure import Figure

    best, rest = chosen(curves, budget)
    rows = math.ceil(len(rest) / PER_ROW)
    figure = Figure(figsize=(12, 6 + 1.7 * rows), dpi=110, layout="constrained")
    grid = figure.add_gridspec(1 + rows, 2 * PER_ROW, height_ratios=[3.6, *[1.1] * rows])
    left = figure.add_subplot(grid[0, :PER_ROW])
    right = figure.add_subplot(grid[0, PER_ROW:], sharey=left)
    for name, color in zip(best, COLORS, strict=False):
        _line(left, curves[name], "tokens", color, name, budget)
        _line(right, curves[name], "seconds", color, name)
    left.axhline(threshold, color=COLORS[0], linestyle=":", linewidth=0.9, label=f"threshold {threshold:.2f}")
    left.set(xlabel="sampled tokens", ylabel="held-out accuracy, greedy")
    right.set(xlabel="seconds of training on one core")
    left.legend(fontsize=8, loc="lower right")
    for place, name in enumerate(rest):
        column = 2 * (place % PER_ROW)
        axes = figure.add_subplot(grid[1 + place // PER_ROW, column : column + 2], sharey=left)
        _line(axes, curves[best[0]], "tokens", COLORS[0], best[0], budget)
        _line(axes, curves[name], "tokens", COLORS[1], name, budget)
        axes.set_title(name, fontsize=8, color=COLORS[1])
        axes.tick_params(labelsize=6, labelleft=column == 0)
    for axes in figure.axes:
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    small = f"; below: each other method (blue) with {best[0]} (black), over sampled tokens" if rest else ""
    figure.suptitle(
        f"Line: mean over seeds, band: its standard deviation. Above: {best[0]} (black) and the best at "
        f"{budget / 1e6:g}M tokens{small}",
        fontsize=9,
    )
    figure.savefig(path)


def _line(axes: Any, by_seed: Mapping[int, Curve], along: str, color: str, label: str, end: float = math.inf) -> None:
    seeds = [c for c in by_seed.values() if len(c.tokens)]
    grid, mean, low, high = band(seeds, along, end)
    axes.plot(grid, mean, label=label, color=color, linewidth=1.6)
    axes.fill_between(grid, low, high, color=color, alpha=0.12, linewidth=0)
