"""A method of one's own against a baseline: in minutes on two families with controls, or in every declared family."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from creditgraph.lab.bench.methods import BASELINE, TURNS, Method
from creditgraph.lab.bench.paired import Paired, stratified
from creditgraph.lab.evidence import controls
from creditgraph.lab.evidence.across import across_families
from creditgraph.lab.evidence.declaration import Cell, Declaration, Entry
from creditgraph.lab.evidence.pages import NOTHING, accuracy, warnings
from creditgraph.lab.evidence.verdicts import Results, few
from creditgraph.pipeline.app.text import markdown_table
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.handles import Environments

MARGIN = 0.03  # smaller differences are none
Word = Literal["helps", "hurts", "no difference above .03", "too noisy"]
CODES: dict[Word, int] = {"helps": 0, "hurts": 3, "no difference above .03": 4, "too noisy": 5}
"""Exit codes; 1 says that a run failed, 2 that the call is wrong."""
FLIPPED = (f"advantage.use={controls.__name__}:FlippedAdvantage",)
CONTROLS: dict[str, dict[str, tuple[str, ...]]] = {
    BASELINE.recipe: {
        "oracle": (
            f"advantage.use={controls.__name__}:OracleAdvantage",
            "+nodes.advantage.in.prompts=sampler.prompts",
            "+nodes.advantage.in.policy=engine.policy",
        ),
        "flipped": FLIPPED,
    },
    TURNS[0].recipe: {"oracle": (f"advantage.use={controls.__name__}:OracleTurns",), "flipped": FLIPPED},
}
"""Recipe of GRPO → name → settings of it: one that must help, and one that must hurt."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is said of a method.

    Attributes:
        word: the verdict.
        reason: why it is no other one; "" where numbers say it.
        result: the difference in accuracy; None without any.
    """

    word: Word
    reason: str
    result: Paired | None


def run_name(method: Method) -> str:
    """A method's name, fit for the name of a run."""
    return re.sub(r"[^\w.]+", "_", method.name)


def is_of_turns(method: Method, config_dirs: Sequence[str | Path] = ()) -> bool:
    """Whether a method plays episodes."""
    nodes = method.experiment(config_dirs=config_dirs).graph.nodes
    return any(node.outputs_of(Environments) for node in nodes)


def trial(
    declaration: Declaration, method: Method, against: Method, full: bool = False, turns: bool = False
) -> Declaration:
    """A declaration with a cell for each family: the method and its baseline, no claims.

    In short those of `declaration.recipe`, with the controls. In full, budget, rates and seeds are those of the
    family's cell with the fewest tokens and seeds whose first method is GRPO as shipped, over turns or not.
    """
    if (method.recipe, method.overrides) == (against.recipe, against.overrides):
        raise ConfigError(f"{method.name} is its own baseline; name another recipe, or another with --against.")
    plain = TURNS[0].recipe if turns else BASELINE.recipe
    cells = {}
    if not full:
        for name, cell in declaration.recipe.items():
            if next(iter(cell.methods.values())).recipe == plain:
                cells[name] = _with_controls(cell, method, against)
        return replace(declaration, cells=cells, claims={}, quick={}, recipe={})
    for name, cell in sorted(declaration.cells.items(), key=lambda item: (item[1].tokens, item[1].seeds)):
        first = next(iter(cell.methods.values()))
        known = {c.family for c in cells.values()}
        if declaration.families[cell.family].warm_start:
            continue  # a further model of a family that is there
        if first.recipe == plain and not first.set and not cell.withdrawn and cell.family not in known:
            base, own = (Entry(recipe=m.recipe, set=m.overrides) for m in (against, method))
            methods = {run_name(against): base, run_name(method): replace(own, baseline=run_name(against))}
            cells[name] = replace(cell, methods=methods, select="tokens")
    ordered = {name: cells[name] for name in declaration.cells if name in cells}
    return replace(declaration, cells=ordered, claims={}, quick={}, recipe={})


def _with_controls(cell: Cell, method: Method, against: Method) -> Cell:
    """The cell with its GRPO, the controls at GRPO's rate, the baseline if it is another, and the method."""
    name, grpo = next(iter(cell.methods.items()))
    methods = {name: grpo}
    for control, settings in CONTROLS[grpo.recipe].items():
        methods[control] = replace(grpo, set=(*grpo.set, *settings), baseline=name)
    base = name
    if (against.recipe, against.overrides) != (grpo.recipe, grpo.set):
        base = run_name(against)
        methods[base] = Entry(recipe=against.recipe, set=against.overrides)
    methods[run_name(method)] = Entry(recipe=method.recipe, set=method.overrides, baseline=base)
    return replace(cell, methods=methods)


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


def judge(results: Results, method: Method, full: bool = False) -> Trial:
    """The verdict: over families and seeds in short, over families as units in full."""
    own, names = run_name(method), list(results.declaration.cells)
    if full:
        rows = across_families(results, fewest=2)
        return _judged(rows[0].result if rows else _over_families(results, names, own))
    for control, sign in (("oracle", 1), ("flipped", -1)):
        seen = _over_families(results, names, control)
        if seen is None or not sign * (seen.low if sign > 0 else seen.high) > 0:
            said = seen.text() if seen else "not measured"
            return Trial(word="too noisy", reason=f"the control {control} is not seen ({said})", result=None)
    return _judged(_over_families(results, names, own))


def _judged(result: Paired | None) -> Trial:
    if result is None or math.isnan(result.low):
        return Trial(word="too noisy", reason="fewer than two runs in common", result=None)
    if result.low > 0 or result.high < 0:
        return Trial(word="helps" if result.low > 0 else "hurts", reason="", result=result)
    if result.within(MARGIN):
        return Trial(word="no difference above .03", reason="", result=result)
    return Trial(word="too noisy", reason=f"a difference of {result.detectable:.3f} would be seen", result=result)


def _over_families(results: Results, names: Sequence[str], method: str) -> Paired | None:
    """The mean over families of the differences from the method's baseline, with seeds as the units."""
    compared = []
    for name in names:
        cell = results.declaration.cells[name]
        pair = results.pair(name, method, cell.baseline_of(method), "tokens")
        if pair is None or any(map(few, pair["took"]["steps"])):
            return None
        compared.append(results.compared(name, pair))
    return stratified(compared)


def trial_text(results: Results, method: Method, against: Method, full: bool = False) -> str:
    """A row per family and method, and the verdict."""
    rows = []
    for name, cell in results.declaration.cells.items():
        methods = results.cells.get(name, {}).get("methods", {})
        for other in cell.methods:
            if (base := cell.baseline_of(other)) and methods:
                shown = [
                    f"{accuracy(methods[m])} at {methods[m]['lr']:g}" if m in methods else "failed"
                    for m in (base, other)
                ]
                rows.append([cell.family, other, *shown, *_difference(results, name, other, base)])
    if not rows:
        return NOTHING
    head = ["family", "method", "baseline", "its own", "difference [95 %]", "steps"]
    found = judge(results, method, full)
    said = f": {found.result.text()}" if found.result else ""
    why = f" ({found.reason})" if found.reason else ""
    units = "families" if full else "seeds within families"
    last = f"{method.name} against {against.name}: {found.word}{said}{why}, with {units} as the units."
    warned = "".join(map(warnings, results.cells.values()))
    return f"{markdown_table(head, rows)}{warned}\n\n{last}"


def _passes(config: Any) -> str:
    """How often a learner steps per batch; "" for other nodes."""
    minibatches, epochs = getattr(config, "minibatches", 0), getattr(config, "epochs", 0)
    return f"{minibatches} × {epochs}" if minibatches and epochs else ""


def _difference(results: Results, cell: str, method: str, base: str) -> list[str]:
    pair = results.pair(cell, method, base, "tokens")
    if pair is None:
        return ["–", "–"]
    steps = " and ".join(f"{s:.0f}" for s in pair["took"]["steps"][::-1])
    if any(map(few, pair["took"]["steps"])):
        return ["not ranked: fewer than two optimiser steps", steps]
    return [results.compared(cell, pair).text(), steps]
