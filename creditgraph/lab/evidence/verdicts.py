"""Verdicts on claims, from the declaration and the measured numbers alone."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from creditgraph.lab.bench.curves import FEWEST_STEPS
from creditgraph.lab.bench.paired import LEVEL, Paired, holm, paired
from creditgraph.lab.evidence.declaration import Claim, Declaration
from creditgraph.lab.evidence.rates import rate_variance
from creditgraph.pipeline.core.errors import ConfigError

Word = Literal[
    "shown",
    "refuted here",
    "no difference above .05",
    "undecided",
    "not testable here",
    "not yet measured",
    "withdrawn",
]
EQUAL = 0.05  # a difference that matters: smaller ones count as none
RIGHT = {"higher": "shown", "lower": "refuted here", "no difference": "no difference above .05"}
DECIDED = tuple(RIGHT.values())
TOKEN_AXES = ("tokens", "processed")  # along which a withdrawn cell compares nothing


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the runs say about a claim.

    Attributes:
        word: the verdict.
        reason: why, where numbers do not say it.
        pair: the measured pair of results.json; empty without one.
        result: the paired differences, better − worse; None without them.
        corrected: p-value after Holm's correction over the paper's claims that can be tested.
        late: whether the claim was declared after its data were measured.
    """

    word: Word
    reason: str = ""
    pair: dict[str, Any] | None = None
    result: Paired | None = None
    corrected: float = math.nan
    late: bool = False


class Results:
    """The measured numbers, next to what is declared now.

    A cell that was measured in another form than the declaration's counts as not measured; one whose rates were chosen
    by another rule counts, and `earlier` says how the rules differ.

    Args:
        declaration: families, cells and claims.
        measured: cell → its entry of results.json.
    """

    def __init__(self, declaration: Declaration, measured: dict[str, Any]) -> None:
        self.declaration = declaration
        known = declaration.cells | declaration.quick
        self.cells = {n: c for n, c in measured.items() if n in known and c["digest"] == declaration.digest(n)}

    def pair(self, cell: str, better: str, worse: str, axis: str) -> dict[str, Any] | None:
        """The measured pair, if need be through a method that both were compared with; None without one.

        A withdrawn comparison counts as none.
        """
        if axis in TOKEN_AXES and self.withdrawn(cell):
            return None
        pairs = [p for p in self.cells.get(cell, {}).get("pairs", ()) if p["axis"] == axis]
        known: dict[tuple[str, str], dict[str, Any]] = {(p["better"], p["worse"]): p for p in pairs}
        if (better, worse) in known:
            return known[better, worse]
        for (method, other), pair in known.items():
            second = known.get((worse, other))
            if method == better and second and (second["at"], second["seeds"]) == (pair["at"], pair["seeds"]):
                return _through(pair, second)
        return None

    def compared(self, cell: str, pair: dict[str, Any], tests: int = 1) -> Paired:
        """The paired differences of a measured pair, better − worse, with the noise of both rates' choice."""
        entry = self.cells[cell]
        seeds = len(entry.get("sweep", {}).get("sweep_seeds", ())) or 1
        rows = (entry["methods"][pair[side]] for side in ("better", "worse"))
        better, worse = pair["accuracies"]
        differences = [b - w for b, w in zip(better, worse, strict=True)]
        return paired(differences, sum(rate_variance(row, seeds) for row in rows), tests)

    def earlier(self, cell: str) -> list[str]:
        """How the rule by which the cell's rates were chosen differs from the declared one, in a few words each."""
        was, now = self.cells[cell].get("sweep", {}), (self.declaration.cells | self.declaration.quick)[cell].sweep()
        said = [f"{len(was.get('sweep_seeds', ()))} seeds"] if was.get("sweep_seeds") != now["sweep_seeds"] else []
        said += ["each method at rates of its own"] * (not was.get("union", False))
        said += ["one batch size"] * (bool(now["batches"]) and not was.get("batches"))
        said += ["rates not widened"] * (bool(now["widenings"]) and not was.get("widenings"))
        return said

    def withdrawn(self, cell: str) -> str:
        """Why the cell's comparisons at equal tokens are withdrawn; "" where they are not."""
        known = self.declaration.cells | self.declaration.quick
        return known[cell].withdrawn if cell in known else ""

    def verdicts(self) -> dict[str, Verdict]:
        """Claim → verdict; p-values are corrected for the paper's claims that can be tested, measured or not."""
        found: dict[str, Verdict] = {}
        papers: dict[str, list[str]] = {}
        for name, claim in self.declaration.claims.items():
            found[name] = self._judge(name, claim)
            if not claim.untestable and found[name].word != "withdrawn":
                papers.setdefault(claim.paper, []).append(name)
        for names in papers.values():
            results = {
                n: self.compared(self.declaration.claims[n].cell, pair, len(names))
                for n in names
                if (pair := found[n].pair) and found[n].word == "undecided"
            }
            corrected = holm([r.p for r in results.values()], len(names))
            for (name, result), p in zip(results.items(), corrected, strict=True):
                found[name] = replace(found[name], result=result, corrected=p, word=_word(result, p))
        return {name: found[name] for name in self.declaration.claims}

    def _judge(self, name: str, claim: Claim) -> Verdict:
        if claim.untestable:
            return Verdict(word="not testable here", reason=claim.untestable)
        if claim.axis in TOKEN_AXES and self.withdrawn(claim.cell):
            return Verdict(word="withdrawn", reason="it compared batch sizes")
        pair = self.pair(claim.cell, claim.better, claim.worse, claim.axis)
        if pair is None:
            failed = self.cells.get(claim.cell, {}).get("failed")
            return Verdict(word="not yet measured", reason="runs failed" if failed else "")
        late = name not in self.cells[claim.cell].get("claims", ())
        slow = [n for n, steps in zip((claim.better, claim.worse), pair["took"]["steps"], strict=True) if few(steps)]
        if slow:
            reason = f"the budget ends before the second optimiser step of {' and '.join(slow)}"
            return Verdict(word="not testable here", reason=reason, pair=pair, late=late)
        batches = [self.cells[claim.cell]["methods"][n].get("batch", 0) for n in (claim.better, claim.worse)]
        if claim.axis == "steps" and len(set(batches)) > 1:
            reason = f"it would compare batch sizes: the steps are of {batches[0]} against {batches[1]} prompts"
            return Verdict(word="not testable here", reason=reason, pair=pair, late=late)
        return Verdict(word="undecided", pair=pair, late=late)

    def scored(self) -> dict[str, dict[str, int]]:
        """Kind of prediction → how many of those made before their data were right, wrong, or are open."""
        verdicts = self.verdicts()
        table: dict[str, dict[str, int]] = {kind: {"right": 0, "wrong": 0, "open": 0} for kind in RIGHT}
        for name, claim in self.declaration.claims.items():
            verdict = verdicts[name]
            if verdict.result is not None and not verdict.late:
                right = "right" if verdict.word == RIGHT[claim.expects] else "wrong"
                table[claim.expects][right if verdict.word in DECIDED else "open"] += 1
        return table


def _word(result: Paired, p: float) -> Word:
    if p <= LEVEL:
        return "shown" if result.difference > 0 else "refuted here"
    return "no difference above .05" if result.within(EQUAL) else "undecided"


def _through(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The pair of two methods that were compared with the same third one, with the same seeds, at the same place."""
    both = (first, second)
    return {
        **first,
        "worse": second["better"],
        "accuracies": [p["accuracies"][0] for p in both],
        "took": {name: [p["took"][name][0] for p in both] for name in first["took"]},
    }


def few(steps: float) -> bool:
    """Whether runs took too few optimiser steps, on average, to be ranked; a run of silent groups took none."""
    return steps < FEWEST_STEPS


def collapsed(row: dict[str, Any], seeds: int) -> float:
    """Share of a method's declared seeds that end below their start, or whose run failed and has no end."""
    held = sum(end >= start for start, end in zip(row["start"], row["end"], strict=True))
    return float(1 - held / seeds)


def read_results(path: Path) -> dict[str, Any]:
    """Cell → numbers of a results.json; {} without the file."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["cells"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no table of results ({error}). Restore it, or remove it.") from error


def as_text(cells: dict[str, Any]) -> str:
    """The content of results.json, one line per method and per pair."""
    parts = []
    for name, cell in cells.items():
        rest = {k: v for k, v in cell.items() if k not in ("methods", "pairs")}
        methods = ",\n".join(f"   {json.dumps(n)}: {json.dumps(row)}" for n, row in cell["methods"].items())
        pairs = ",\n".join(f"   {json.dumps(pair)}" for pair in cell["pairs"])
        head = json.dumps(rest)[1:-1]
        parts.append(f' {json.dumps(name)}: {{{head},\n  "methods": {{\n{methods}\n  }},\n  "pairs": [\n{pairs}\n  ]}}')
    return '{"cells": {\n' + ",\n".join(parts) + "\n}}\n"
