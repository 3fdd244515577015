"""A method of one's own against a baseline in every family, at the budgets that are declared for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from creditgraph.lab.bench.methods import BASELINE, Method
from creditgraph.lab.evidence.across import across_families
from creditgraph.lab.evidence.declaration import Cell, Declaration, Entry
from creditgraph.lab.evidence.pages import NOTHING, accuracy
from creditgraph.lab.evidence.verdicts import Results, differences, few
from creditgraph.pipeline.app.text import markdown_table
from creditgraph.pipeline.core.errors import ConfigError


def run_name(method: Method) -> str:
    """A method's name, fit for the name of a run."""
    return re.sub(r"[^\w.]+", "_", method.name)


def trial(declaration: Declaration, method: Method, against: Method) -> Declaration:
    """A declaration with a cell for each family: the method and its baseline, no claims.

    Budget, rates and seeds are those of the family's cell with the fewest tokens whose first method is GRPO as shipped.
    """
    if (method.recipe, method.overrides) == (against.recipe, against.overrides):
        raise ConfigError(
            f"--recipe {method.name} is its own baseline; name another recipe, or another with --against."
        )
    cells: dict[str, Cell] = {}
    for name, cell in sorted(declaration.cells.items(), key=lambda item: item[1].tokens):
        first = next(iter(cell.methods.values()))
        plain = first.recipe == BASELINE.recipe and not first.set and not cell.set
        if plain and cell.family not in {c.family for c in cells.values()}:
            base, own = (Entry(recipe=m.recipe, set=m.overrides) for m in (against, method))
            cells[name] = replace(
                cell, methods={run_name(against): base, run_name(method): replace(own, baseline=run_name(against))}
            )
    ordered = {name: cells[name] for name in declaration.cells if name in cells}
    return Declaration(families=declaration.families, cells=ordered, claims={})


def unfair(method: Method, against: Method, config_dirs: Sequence[str | Path] = ()) -> str:
    """What makes the baseline another kind of method, in one sentence; "" if nothing does."""
    taken = []
    for one in (method, against):
        nodes = one.experiment(config_dirs=config_dirs).graph.nodes
        taken.append({n.name: _passes(n.config) for n in nodes if _passes(n.config)})
    if taken[0] == taken[1]:
        return ""
    steps = [", ".join(f"{name} {passes}" for name, passes in nodes.items()) or "none" for nodes in taken]
    return (
        f"{method.name} takes other optimiser steps per batch ({steps[0]}) than {against.name} ({steps[1]}), which "
        "alone may decide the comparison. Name a baseline with as many, for example --against grpo_4_steps."
    )


def trial_text(results: Results, method: Method, against: Method) -> str:
    """A row per family, and what the method gained over them."""
    own, base = run_name(method), run_name(against)
    rows = []
    for name, cell in results.declaration.cells.items():
        measured = results.cells.get(name)
        if measured is None:
            continue
        methods = measured["methods"]
        shown = [f"{accuracy(methods[m])} at {methods[m]['lr']:g}" if m in methods else "failed" for m in (base, own)]
        rows.append([cell.family, f"{cell.tokens:,.0f}", *shown, *_difference(results.pair(name, own, base, "tokens"))])
    if not rows:
        return NOTHING
    head = ["family", "tokens", base, own, "difference [95 %]", "detectable", "steps"]
    lines = [markdown_table(head, rows)]
    for row in across_families(results, fewest=2):
        ahead = sum(gain > 0 for gain in row.gains.values())
        lines.append(
            f"{row.method} is ahead of {row.baseline} in {ahead} of {len(row.gains)} families; mean of families "
            f"{row.result.text()}, with families as the units."
        )
    return "\n\n".join(lines)


def _passes(config: Any) -> str:
    """How often a learner steps per batch; "" for other nodes."""
    minibatches, epochs = getattr(config, "minibatches", 0), getattr(config, "epochs", 0)
    return f"{minibatches} × {epochs}" if minibatches and epochs else ""


def _difference(pair: dict[str, Any] | None) -> list[str]:
    if pair is None:
        return ["–", "–", "–"]
    result = differences(pair)
    steps = " and ".join(f"{s:.0f}" for s in pair["took"]["steps"][::-1])
    if any(map(few, pair["fewest_steps"])):
        return ["not ranked: fewer than two optimiser steps", "–", steps]
    return [result.text(), f"{result.detectable:.3f}", steps]
