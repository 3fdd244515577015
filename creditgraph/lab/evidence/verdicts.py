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
from creditgraph.pipeline.core.errors import ConfigError

Word = Literal["shown", "refuted here", "undecided", "not testable here", "not yet measured", "withdrawn"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the runs say about a claim.

    Attributes:
        word: the verdict.
        reason: why, where numbers do not say it.
        pair: the measured pair of results.json; empty without one.
        result: the paired differences, better − worse; None without them.
        corrected: p-value after Holm's correction over all claims that can be tested.
    """

    word: Word
    reason: str = ""
    pair: dict[str, Any] | None = None
    result: Paired | None = None
    corrected: float = math.nan


class Results:
    """The measured numbers, next to what is declared now.

    A cell that was measured in another form than the declaration's counts as not measured.

    Args:
        declaration: families, cells and claims.
        measured: cell → its entry of results.json.
    """

    def __init__(self, declaration: Declaration, measured: dict[str, Any]) -> None:
        self.declaration = declaration
        known = declaration.cells | declaration.quick
        self.cells = {n: c for n, c in measured.items() if n in known and c["digest"] == declaration.digest(n)}

    def pair(self, cell: str, better: str, worse: str, axis: str) -> dict[str, Any] | None:
        """The measured pair, None without one; a withdrawn comparison counts as none."""
        if axis == "tokens" and self.withdrawn(cell):
            return None
        wanted = (better, worse, axis)
        pairs = self.cells.get(cell, {}).get("pairs", ())
        return next((p for p in pairs if (p["better"], p["worse"], p["axis"]) == wanted), None)

    def withdrawn(self, cell: str) -> str:
        """Why the cell's comparisons at equal sampled tokens are withdrawn; "" where they are not."""
        known = self.declaration.cells | self.declaration.quick
        return known[cell].withdrawn if cell in known else ""

    def verdicts(self) -> dict[str, Verdict]:
        """Claim → verdict; p-values are corrected for all claims that can be tested, measured or not."""
        claims = self.declaration.claims
        found = {name: self._judge(claim) for name, claim in claims.items()}
        tested = {n: v for n, v in found.items() if v.result is not None}
        planned = sum(not claim.untestable and found[name].word != "withdrawn" for name, claim in claims.items())
        corrected = holm([v.result.p for v in tested.values() if v.result], planned)
        for (name, verdict), p in zip(tested.items(), corrected, strict=True):
            found[name] = replace(verdict, corrected=p, word=_word(verdict.result, p))
        return found

    def _judge(self, claim: Claim) -> Verdict:
        if claim.untestable:
            return Verdict(word="not testable here", reason=claim.untestable)
        if claim.axis == "tokens" and self.withdrawn(claim.cell):
            return Verdict(word="withdrawn", reason="it compared batch sizes")
        pair = self.pair(claim.cell, claim.better, claim.worse, claim.axis)
        if pair is None:
            failed = self.cells.get(claim.cell, {}).get("failed")
            return Verdict(word="not yet measured", reason="runs failed" if failed else "")
        slow = [n for n, steps in zip((claim.better, claim.worse), pair["fewest_steps"], strict=True) if few(steps)]
        if slow:
            reason = f"the budget ends before the second optimiser step of a run of {' and '.join(slow)}"
            return Verdict(word="not testable here", reason=reason, pair=pair)
        return Verdict(word="undecided", pair=pair, result=differences(pair))


def _word(result: Paired | None, p: float) -> Word:
    if result is None or p > LEVEL:
        return "undecided"
    return "shown" if result.difference > 0 else "refuted here"


def few(steps: float) -> bool:
    """Whether runs took too few optimiser steps to be ranked."""
    return steps < FEWEST_STEPS


def differences(pair: dict[str, Any]) -> Paired:
    """The paired differences of a measured pair, better − worse."""
    better, worse = pair["accuracies"]
    return paired([b - w for b, w in zip(better, worse, strict=True)])


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
        raise ConfigError(
            f"{path} is no table of results ({error}). Restore it, or remove it to begin anew."
        ) from error


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
