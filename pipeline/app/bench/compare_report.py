"""The table and the figure of creditgraph compare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.app.bench.credit_report import cell
from pipeline.app.bench.curves import NO_DIFFERENCE, Curve, Verdict, default_threshold, paired_test
from pipeline.app.bench.statistics import mean_sd
from pipeline.app.text import markdown_table
from pipeline.core.extras import extra

Curves = Mapping[str, Mapping[int, Curve]]
"""Method → seed → curve, the baseline first."""


@dataclass(frozen=True)
class Row:
    """One method of the comparison.

    Attributes:
        accuracy: seed → accuracy at the budget.
        verdict: against the baseline, None for the baseline.
        reached: seed → tokens to the threshold (NaN: not within the budget).
        speed: tokens of the baseline divided by those of this method, means over seeds; NaN unless all seeds reach it.
        seconds: seed → wall time of training up to the budget.
        iterations: seed → iterations.
    """

    accuracy: dict[int, float]
    verdict: Verdict | None
    reached: dict[int, float]
    speed: float
    seconds: dict[int, float]
    iterations: dict[int, int]


def analyse(curves: Curves, budget: float, threshold: float | None = None) -> tuple[dict[str, Row], float]:
    """Rows by method, the baseline first, and the threshold (`default_threshold` of the baseline when None)."""
    baseline = next(iter(curves))
    bar = default_threshold(list(curves[baseline].values()), budget) if threshold is None else threshold
    rows: dict[str, Row] = {}
    for name, by_seed in curves.items():
        accuracy = {s: c.at(budget) for s, c in by_seed.items()}
        reached = {s: c.reaches(bar, budget) for s, c in by_seed.items()}
        base = rows[baseline].reached if name != baseline else reached
        complete = reached and not any(math.isnan(t) for t in [*reached.values(), *base.values()])
        rows[name] = Row(
            accuracy=accuracy,
            verdict=None if name == baseline else paired_test(accuracy, rows[baseline].accuracy),
            reached=reached,
            speed=mean_sd(list(base.values()))[0] / mean_sd(list(reached.values()))[0] if complete else math.nan,
            seconds={s: c.seconds_at(budget) for s, c in by_seed.items()},
            iterations={s: c.iterations for s, c in by_seed.items()},
        )
    return rows, bar


def table(rows: Mapping[str, Row], budget: float, threshold: float) -> str:
    """A Markdown table, and sentences that list the methods above and not above the baseline."""
    baseline = next(iter(rows))
    head = ["method", f"accuracy at {budget / 1e6:.2f}M tokens", f"against {baseline}", "verdict"]
    head += [f"tokens to {threshold:.2f}", "reached", f"{baseline} tokens / its tokens", "seconds", "seeds"]
    return "\n".join([markdown_table(head, [_cells(name, row) for name, row in rows.items()]), "", *sentences(rows)])


def _cells(name: str, row: Row) -> list[str]:
    verdict = row.verdict
    tokens = [t for t in row.reached.values() if not math.isnan(t)]
    mean, sd = mean_sd(tokens)
    against = "-"
    if verdict is not None:
        against = f"{verdict.difference:+.3f}"
        against += "" if math.isnan(verdict.error) else f" (s.e. {verdict.error:.3f})"
    return [
        name,
        cell(mean_sd(list(row.accuracy.values())), 3),
        against,
        "baseline" if verdict is None else verdict.word,
        cell((mean / 1000, sd / 1000), 0) + ("k" if tokens else ""),
        f"{len(tokens)}/{len(row.reached)}",
        cell((row.speed, math.nan), 2),
        cell(mean_sd(list(row.seconds.values())), 0),
        str(sum(not math.isnan(a) for a in row.accuracy.values())),
    ]


def sentences(rows: Mapping[str, Row]) -> list[str]:
    """Which methods end above, below, or without a significant difference from the baseline."""
    baseline = next(iter(rows))
    texts = {
        "above": f"Above {baseline} at equal sampled tokens",
        NO_DIFFERENCE: f"No significant difference from {baseline} with these seeds, so not shown to beat it",
        "below": f"Below {baseline}",
    }
    lines = []
    for word, text in texts.items():
        names = [n for n, r in rows.items() if r.verdict is not None and r.verdict.word == word]
        lines.append(f"{text}: {', '.join(names) or 'none'}.")
    return lines


def as_json(rows: Mapping[str, Row], curves: Curves) -> dict[str, Any]:
    """Everything in the table, and the curves, as plain values."""
    return {
        name: {
            **vars(row),
            "verdict": None if row.verdict is None else vars(row.verdict),
            "curves": {
                seed: {"tokens": c.tokens.tolist(), "seconds": c.seconds.tolist(), "accuracy": c.accuracy.tolist()}
                for seed, c in curves[name].items()
            },
        }
        for name, row in rows.items()
    }


def draw(curves: Curves, budget: float, threshold: float, path: Path) -> None:
    """Writes the figure: mean accuracy ± its standard deviation over seeds, over sampled tokens and over wall time."""
    with extra("plots", "compare"):
        from matplotlib import colormaps
        from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    palette = colormaps["tab20"]
    for i, (name, by_seed) in enumerate(curves.items()):
        color = palette((i - 1) % 20) if i else "black"
        seeds = [c for c in by_seed.values() if len(c.tokens)]
        if not seeds:
            continue
        for axes, of, end in ((left, "tokens", budget), (right, "seconds", math.inf)):
            grid = np.linspace(0, min(end, *(getattr(c, of)[-1] for c in seeds)), 60)
            each = np.stack([np.interp(grid, getattr(c, of), c.accuracy) for c in seeds])
            mean = each.mean(0)
            sd = each.std(0, ddof=1) if len(seeds) > 1 else np.zeros(len(grid))
            axes.plot(grid, mean, label=name, color=color, linewidth=1.3 if i else 2.2)
            axes.fill_between(grid, mean - sd, mean + sd, color=color, alpha=0.08, linewidth=0)
    left.axhline(threshold, color="k", linestyle=":", linewidth=0.8)
    left.set(xlabel="sampled tokens", ylabel="held-out accuracy, greedy")
    right.set(xlabel="seconds of training on one core")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path)
