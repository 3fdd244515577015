"""Learning curves: runs that differ only by their seed become one line with a band."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditgraph.pipeline.app.progress import ACCURACY, REWARD, SAMPLED_TOKENS
from creditgraph.pipeline.app.report.source import RunSource
from creditgraph.pipeline.app.results import is_number, phase_seconds

POINTS = 200  # of one line
AXES = {"iteration": "iteration", "tokens": "sampled tokens", "time": "seconds"}

Floats = NDArray[np.float64]


def groups(runs: Sequence[RunSource]) -> list[tuple[str, list[int]]]:
    """(label, numbers of its runs): runs whose configuration differs in its section "run" alone (seed, place, length)
    share a group."""
    members: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        config = {k: v for k, v in run.config.items() if k != "run"}
        key = json.dumps(config, sort_keys=True, default=str) if run.config else run.name
        members.setdefault(key, []).append(i)
    firsts = [runs[numbers[0]] for numbers in members.values()]
    recipes = [str(run.config.get("recipe") or run.name) for run in firsts]
    labels: list[str] = []
    for run, recipe in zip(firsts, recipes, strict=True):
        label = recipe if recipes.count(recipe) == 1 and recipe not in labels else run.name
        while label in labels:
            label += "'"
        labels.append(label)
    return list(zip(labels, members.values(), strict=True))


def axis(rows: Sequence[dict[str, Any]], name: str) -> Floats:
    """The position of each row of a metrics.jsonl on an axis: its iteration, or tokens or seconds up to its end."""
    if name == "iteration":
        return np.array([float(r.get("iteration", i)) for i, r in enumerate(rows)])
    if name == "tokens":
        spent = [r.get(SAMPLED_TOKENS, 0.0) for r in rows]
    else:
        spent = [r.get("seconds/iteration", 0.0) + r.get("seconds/checkpoint", 0.0) for r in rows]
    return np.cumsum(np.nan_to_num(np.array(spent, np.float64)))


def metric_names(runs: Sequence[RunSource]) -> list[str]:
    """Every logged metric except durations, held-out accuracy and reward first."""
    items = (item for run in runs for row in run.rows for item in row.items())
    logged = {name for name, value in items if name != "iteration" and isinstance(value, int | float)}
    first = [name for name in (ACCURACY, REWARD) if name in logged]
    return first + sorted(logged.difference(first))


def line(runs: Sequence[RunSource], metric: str, along: str) -> list[list[float]]:
    """[x, mean, lowest, highest, runs] per point; between its own points a run is interpolated, outside them it does
    not count."""
    series: list[tuple[Floats, Floats]] = []
    for run in runs:
        at = axis(run.rows, along)
        pairs = [(x, float(r[metric])) for x, r in zip(at, run.rows, strict=True) if is_number(r.get(metric))]
        if pairs:
            xs, ys = np.array(pairs).T
            # Tokens do not rise in an iteration that samples nothing.
            keep = np.append(np.diff(xs) > 0, True)  # the last value at an x
            series.append((xs[keep], ys[keep]))
    if not series:
        return []
    grid = np.unique(np.concatenate([x for x, _ in series]))
    if len(grid) > POINTS:
        grid = np.linspace(grid[0], grid[-1], POINTS)
    table = np.array([np.interp(grid, x, y, left=math.nan, right=math.nan) for x, y in series])
    points = []
    for x, column in zip(grid, table.T, strict=True):
        known = column[~np.isnan(column)]
        if len(known):
            points.append(
                [_short(x), _short(known.mean()), _short(known.min()), _short(known.max()), float(len(known))]
            )
    return points


def all_lines(runs: Sequence[RunSource]) -> dict[str, Any]:
    """metric → axis → group label → points, with the labels."""
    grouped = groups(runs)
    lines = {
        metric: {
            along: {label: line([runs[i] for i in members], metric, along) for label, members in grouped}
            for along in AXES
        }
        for metric in metric_names(runs)
    }
    return {"groups": [{"label": label, "runs": members} for label, members in grouped], "axes": AXES, "lines": lines}


def phases(run: RunSource, most: int = 7) -> list[list[Any]]:
    """[iteration, node, seconds] of the nodes that took longest in all; the rest as "other". Waiting and the CPU clock
    are left out."""
    total: dict[str, float] = {}
    for row in run.rows:
        for node, seconds in phase_seconds(row).items():
            total[node] = total.get(node, 0.0) + seconds
    shown = sorted(total, key=lambda n: -total[n])[:most]
    bars: list[list[Any]] = []
    for row in run.rows:
        rest = 0.0
        for node, seconds in phase_seconds(row).items():
            if node in shown:
                bars.append([row.get("iteration", 0), node, _short(seconds)])
            else:
                rest += seconds
        if len(total) > most:
            bars.append([row.get("iteration", 0), "other", _short(rest)])
    return bars


def _short(value: float) -> float:
    return float(f"{value:.5g}")
