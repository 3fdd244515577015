"""What a step of each method takes, in multiples of its baseline's: tokens, seconds, and how long responses become."""

from __future__ import annotations

import math
from collections.abc import Sequence

from creditgraph.lab.bench.paired import Paired, paired
from creditgraph.lab.bench.statistics import mean_sd
from creditgraph.lab.evidence.across import labels
from creditgraph.lab.evidence.verdicts import Results

COSTS = ("tokens", "processed", "seconds", "length")
Pair = tuple[str, str]
"""a method and what it is compared with"""
Logs = dict[Pair, dict[str, list[float]]]
"""pair → cost → logs of the ratio, one per cell where it was recorded"""


def method_costs(results: Results) -> Logs:
    """Methods and their baselines, in the order of the declaration."""
    found: Logs = {}
    for name, measured in results.cells.items():
        cell = results.declaration.cells.get(name)
        for method in measured["methods"] if cell else ():
            if cell and (base := cell.baseline_of(method)) in measured["methods"]:
                _add(found, labels(cell, method), results, name, (method, base))
    return found


def head_to_head(results: Results, first: str, second: str) -> dict[str, list[float]]:
    """Cost → logs of the ratio of two recipes without settings, one per cell that trained both."""
    found: Logs = {}
    for name, measured in results.cells.items():
        entries = results.declaration.cells[name].methods if name in results.declaration.cells else {}
        plain = {e.recipe: m for m, e in entries.items() if not e.set and m in measured["methods"]}
        if first in plain and second in plain:
            _add(found, (first, second), results, name, (plain[first], plain[second]))
    return found.get((first, second), {})


def ratio(logs: Sequence[float]) -> str:
    """Geometric mean of ratios with its 95 % interval over cells, and their number."""
    if not logs:
        return "–"
    mean = paired(logs)
    interval = "" if math.isnan(mean.low) else f" [{math.exp(mean.low):.2f}, {math.exp(mean.high):.2f}]"
    return f"{math.exp(mean.difference):.2f}{interval} ({len(logs)})"


def cheaper(name: str, other: str, logs: Sequence[float]) -> str:
    """Whether a method takes less than another, in a few words."""
    if not logs:
        return "not measured yet"
    mean: Paired = paired(logs)
    decided = mean.high < 0 or mean.low > 0
    said = f"{name} takes {'less' if mean.difference < 0 else 'more'}" if decided else "no difference shown"
    return f"{said}, {ratio(logs)} times {other}'s"


def _add(found: Logs, key: Pair, results: Results, cell: str, methods: Pair) -> None:
    """Adds what the first of two methods of a cell takes, as logs of multiples of the second's."""
    taken = [_per_prompt(results, cell, method) for method in methods]
    row = found.setdefault(key, {cost: [] for cost in COSTS})
    for cost in COSTS:
        own, other = (costs[cost] for costs in taken)
        if own > 0 and other > 0:
            row[cost].append(math.log(own / other))


def _per_prompt(results: Results, cell: str, method: str) -> dict[str, float]:
    """Cost → per optimiser step and prompt of a batch, all seeds' amounts over all seeds' steps; the length is that of
    a response. A mean of the seeds' ratios would be that of the seed with the fewest steps: one took none at all."""
    row = results.cells[cell]["methods"][method]
    prompts = sum(row["steps"]) * (row.get("batch") or 1)
    amounts = {"tokens": [results.declaration.cells[cell].tokens] * len(row["steps"]), **row}
    means = {cost: sum(amounts[cost]) / prompts for cost in COSTS[:-1] if cost in amounts and prompts}
    return dict.fromkeys(COSTS, math.nan) | means | {"length": mean_sd(row.get("length", ()))[0]}
