"""The table and the figure of tools/compare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.app.bench.credit_report import cell
from pipeline.app.bench.curves import Curve, Verdict, default_threshold, judge_difference
from pipeline.app.bench.statistics import mean_sd


@dataclass(frozen=True)
class Row:
    """One method of the comparison; pairs are mean and standard deviation over seeds.

    Attributes:
        accuracy: seed → accuracy at the budget.
        verdict: against the baseline, None for the baseline.
        reached: seed → tokens to the threshold (NaN: not within the budget).
        speed: tokens of the baseline over those of this method, on means of the seeds that got there; NaN unless all
            did.
        seconds: seed → wall time of training up to the budget.
        iterations: seed → iterations.
    """

    accuracy: dict[int, float]
    verdict: Verdict | None
    reached: dict[int, float]
    speed: float
    seconds: dict[int, float]
    iterations: dict[int, int]


def analyse(
    curves: Mapping[str, Mapping[int, Curve]], budget: float, threshold: float | None = None
) -> tuple[dict[str, Row], float]:
    """Rows by method, the baseline first, and the threshold (`default_threshold` of the baseline when None)."""
    baseline = next(iter(curves))
    bar = default_threshold(list(curves[baseline].values()), budget) if threshold is None else threshold
    rows: dict[str, Row] = {}
    for name, by_seed in curves.items():
        accuracy = {s: c.at(budget) for s, c in by_seed.items()}
        reached = {s: c.reaches(bar, budget) for s, c in by_seed.items()}
        base = rows[baseline].reached if name != baseline else reached
        complete = all(not math.isnan(t) for t in [*reached.values(), *base.values()]) and reached
        rows[name] = Row(
            accuracy=accuracy,
            verdict=None if name == baseline else judge_difference(accuracy, rows[baseline].accuracy),
            reached=reached,
            speed=mean_sd(list(base.values()))[0] / mean_sd(list(reached.values()))[0] if complete else math.nan,
            seconds={s: _seconds_at(c, budget) for s, c in by_seed.items()},
            iterations={s: c.iterations for s, c in by_seed.items()},
        )
    return rows, bar


def _seconds_at(curve: Curve, budget: float) -> float:
    return float(np.interp(budget, curve.tokens, curve.seconds)) if len(curve.tokens) else math.nan


def table(rows: Mapping[str, Row], budget: float, threshold: float) -> str:
    """A Markdown table, and the sentences that say who beats the baseline and who does not."""
    baseline = next(iter(rows))
    head = [
        "method",
        f"accuracy at {budget / 1e6:.2f}M tokens",
        f"against {baseline}",
        "verdict",
        f"tokens to {threshold:.2f}",
    ]
    head += ["reached", f"{baseline} tokens / its tokens", "seconds", "seeds"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, row in rows.items():
        v = row.verdict
        got = [t for t in row.reached.values() if not math.isnan(t)]
        lines.append(
            "| "
            + " | ".join(
                [
                    name,
                    cell(mean_sd(list(row.accuracy.values())), 3),
                    "-"
                    if v is None
                    else f"{v.difference:+.3f}" + ("" if math.isnan(v.error) else f" (s.e. {v.error:.3f})"),
                    "baseline" if v is None else v.word,
                    cell(tuple(x / 1000 for x in mean_sd(got)), 0).replace("nan", "-") + ("k" if got else ""),  # type: ignore[arg-type]
                    f"{len(got)}/{len(row.reached)}",
                    cell((row.speed, math.nan), 2),
                    cell(mean_sd(list(row.seconds.values())), 0),
                    str(sum(not math.isnan(a) for a in row.accuracy.values())),
                ]
            )
            + " |"
        )
    return "\n".join([*lines, "", *sentences(rows)])


def sentences(rows: Mapping[str, Row]) -> list[str]:
    """Which methods end above, below, or not told apart from the baseline."""
    baseline = next(iter(rows))
    out = []
    for word, text in (
        ("above", f"Above {baseline} at equal sampled tokens"),
        ("not told apart", f"Not told apart from {baseline} by these seeds, so not shown to beat it"),
        ("below", f"Below {baseline}"),
    ):
        names = [n for n, r in rows.items() if r.verdict is not None and r.verdict.word == word]
        out.append(f"{text}: {', '.join(names) or 'none'}.")
    return out


def as_json(rows: Mapping[str, Row], curves: Mapping[str, Mapping[int, Curve]]) -> dict[str, Any]:
    """Everything in the table, and the curves, as plain values."""
    return {
        name: {
            **{k: v for k, v in vars(row).items() if k != "verdict"},
            "verdict": None if row.verdict is None else vars(row.verdict),
            "curves": {
                seed: {"tokens": c.tokens.tolist(), "seconds": c.seconds.tolist(), "accuracy": c.accuracy.tolist()}
                for seed, c in curves[name].items()
            },
        }
        for name, row in rows.items()
    }


def draw(curves: Mapping[str, Mapping[int, Curve]], budget: float, threshold: float, path: Path) -> None:
    """Writes the figure: mean accuracy, with its standard deviation over seeds, against sampled tokens and against wall time."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    palette = colormaps["tab20"]
    for i, (name, by_seed) in enumerate(curves.items()):
        style: dict[str, Any] = (
            {"color": "black", "linewidth": 2.2} if i == 0 else {"color": palette((i - 1) % 20), "linewidth": 1.3}
        )
        for axes, of in ((left, "tokens"), (right, "seconds")):
            found = [c for c in by_seed.values() if len(c.tokens)]
            if not found:
                continue
            grid = np.linspace(0, min(budget if of == "tokens" else math.inf, *(getattr(c, of)[-1] for c in found)), 60)
            each = np.stack([np.interp(grid, getattr(c, of), c.accuracy) for c in found])
            mean, sd = each.mean(0), each.std(0, ddof=1) if len(found) > 1 else np.zeros(len(grid))
            axes.plot(grid, mean, label=name, **style)
            axes.fill_between(grid, mean - sd, mean + sd, color=style["color"], alpha=0.08, linewidth=0)
    left.axhline(threshold, color="k", linestyle=":", linewidth=0.8)
    left.set(xlabel="sampled tokens", ylabel="held-out accuracy, greedy")
    right.set(xlabel="seconds of training on one core")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png")
