"""Reads what `study` compares: gains of training, and scores of creditbench."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.app.bench.credit_bench import GRADIENT_METRICS
from pipeline.app.bench.statistics import mean_sd
from pipeline.app.prediction.study import Cell
from pipeline.core.errors import DataError

# Scores of credit itself; what credit costs is none, because gains are at equal tokens.
CREDIT_SCORES = ("spearman", "pearson", "pearson_1", "pearson_2", "pearson_3", "sign", "error_share", "zero_share")


OWN_DATA = "the recipes' own data"  # family of all cells whose scores were measured without data=…


def read_cells(results: Sequence[Path], scores: Path) -> tuple[list[Cell], list[str]]:
    """The cells that have gains and scores, and notes on what is left out.

    Args:
        results: results.json of tools/evidence (a cell each), or folders of `creditgraph compare` (the folder's name
            is the cell).
        scores: folder with CELL/result.json of creditbench, or CELL/STATE/result.json for several states of the
            policy, whose scores are then called NAME@STATE.

    Raises:
        DataError: a file is missing or of another form.
    """
    cells: list[Cell] = []
    notes: list[str] = []
    for name, gain in (pair for file in results for pair in _gains(file)):
        files = sorted((scores / name).glob("**/result.json"))
        if not files:
            notes.append(f"{scores / name}: no scores, so the cell {name} is left out")
            continue
        table: dict[str, dict[str, float]] = {}
        family = OWN_DATA
        for file in files:
            content = _read(file)
            state = "/".join(file.parent.relative_to(scores / name).parts)
            chosen = [s for s in content.get("settings", {}).get("set", ()) if s.startswith("data=")]
            family = chosen[-1].removeprefix("data=") if chosen else family
            for method, entry in content.get("methods", {}).items():
                known = table.setdefault(method, {})
                known.update({f"{k}@{state}" if state else k: v for k, v in _scores(entry).items()})
        without = sorted(gain.keys() - table.keys())
        if without:
            notes.append(f"{name}: no scores of {', '.join(without)}")
        cells.append(Cell(name=name, family=family, gain=gain, scores=table))
    return cells, notes


def _gains(file: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Cell, and method → mean gain in accuracy at the cell's tokens."""
    if file.is_dir():
        methods = _read(file / "result.json").get("methods", {})
        gain = {}
        for name, row in methods.items():
            starts = [curve["accuracy"][0] for curve in row["curves"].values() if curve["accuracy"]]
            gain[name] = _mean(row["accuracy"].values()) - _mean(starts)
        yield file.name, gain
        return
    for cell, entry in _read(file).get("cells", {}).items():
        methods = entry["methods"]
        yield cell, {name: _mean(row["accuracy"]) - _mean(row["start"]) for name, row in methods.items()}


def _scores(entry: dict[str, Any]) -> dict[str, float]:
    """Means of a method's credit scores, the size of its bias, and the pooled gradient's numbers."""
    mean = {name: pair[0] for name, pair in entry["mean"].items() if name in (*CREDIT_SCORES, "bias")}
    values = mean | {f"gradient {name}": entry["gradient"][name][0] for name in GRADIENT_METRICS}
    known = {name: float(value) for name, value in values.items() if value is not None}
    if "bias" in known:
        known["|bias|"] = abs(known.pop("bias"))
    return known


def _mean(values: Any) -> float:
    return mean_sd([math.nan if v is None else float(v) for v in values])[0]


def _read(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error}); expected results of training or scores.") from None
    return content
