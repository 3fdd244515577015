"""Reads what `study` compares: gains of training, and scores of creditbench."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from creditgraph.lab.bench.credit_bench import GRADIENT_METRICS
from creditgraph.lab.prediction.study import Cell
from creditgraph.pipeline.core.errors import DataError

# Scores of credit itself; what credit costs is none, because gains are at equal tokens.
CREDIT_SCORES = ("spearman", "pearson", "pearson_1", "pearson_2", "pearson_3", "sign", "error_share", "zero_share")


OWN_DATA = "the recipes' own data"  # family of all cells whose scores were measured without data=…


Scores = dict[str, dict[str, dict[str, dict[str, float]]]]
"""Cell → state of the policy → method → score → value."""


def read_cells(results: Sequence[Path], scores: Path) -> tuple[list[Cell], list[str]]:
    """The cells that have gains and scores, and notes on what is left out.

    Args:
        results: results.json of tools/evidence (a cell each), or folders of `creditgraph compare` (the folder's name
            is the cell).
        scores: scores.json of tools/evidence, or a folder with CELL/result.json of creditbench, or with
            CELL/STATE/result.json for several states of the policy, whose scores are then called NAME@STATE.

    Raises:
        DataError: a file is missing or of another form.
    """
    cells: list[Cell] = []
    notes: list[str] = []
    families, known = _scores_in(scores) if scores.is_dir() else _scores_of_file(scores)
    for name, gain in (pair for file in results for pair in _gains(file).items()):
        if name not in known:
            notes.append(f"{scores / name}: no scores, so the cell {name} is left out")
            continue
        table: dict[str, dict[str, float]] = {}
        for state, methods in known[name].items():
            for method, values in methods.items():
                row = table.setdefault(method, {})
                row.update({f"{k}@{state}" if state else k: v for k, v in values.items()})
        without = sorted(gain.keys() - table.keys())
        if without:
            notes.append(f"{name}: no scores of {', '.join(without)}")
        cells.append(Cell(name=name, family=families[name], runs=gain, scores=table))
    return cells, notes


def scores_of(entry: dict[str, Any]) -> dict[str, float]:
    """Means of a method's credit scores, the size of its bias, and the pooled gradient's numbers, from creditbench."""
    mean = {name: pair[0] for name, pair in entry["mean"].items() if name in (*CREDIT_SCORES, "bias")}
    values = mean | {f"gradient {name}": entry["gradient"][name][0] for name in GRADIENT_METRICS}
    known = {name: float(value) for name, value in values.items() if value is not None}
    if "bias" in known:
        known["|bias|"] = abs(known.pop("bias"))
    return known


def _scores_of_file(file: Path) -> tuple[dict[str, str], Scores]:
    """Cell → family, and the scores, of a file of tools/evidence."""
    cells: Any = read_json(file).get("cells")
    try:
        return {n: c["family"] for n, c in cells.items()}, {n: c["scores"] for n, c in cells.items()}
    except (AttributeError, KeyError, TypeError):
        raise DataError(
            f"{file}: holds no scores; expected scores.json of tools/evidence, or a folder of creditbench's results."
        ) from None


def _scores_in(folder: Path) -> tuple[dict[str, str], Scores]:
    """Cell → family, and the scores, of a folder of creditbench's results."""
    families: dict[str, str] = {}
    scores: Scores = {}
    for file in sorted(folder.glob("*/**/result.json")):
        name, *state = file.parent.relative_to(folder).parts
        content = read_json(file)
        chosen = [s for s in content.get("settings", {}).get("set", ()) if s.startswith("data=")]
        families[name] = chosen[-1].removeprefix("data=") if chosen else families.get(name, OWN_DATA)
        methods = content.get("methods", {})
        scores.setdefault(name, {})["/".join(state)] = {m: scores_of(entry) for m, entry in methods.items()}
    return families, scores


def _gains(file: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Cell → method → seed → gain in accuracy at the cell's tokens; runs without an accuracy are left out."""
    try:
        if file.is_dir():
            methods = read_json(file / "result.json").get("methods", {})
            return {file.name: {name: _compared(row) for name, row in methods.items()}}
        cells = read_json(file).get("cells", {})
        return {cell: {n: _trained(row) for n, row in entry["methods"].items()} for cell, entry in cells.items()}
    except (AttributeError, KeyError, TypeError, IndexError):
        raise DataError(
            f"{file}: holds no gains; expected results.json of tools/evidence, or a folder of `creditgraph compare`."
        ) from None


def _compared(row: dict[str, Any]) -> dict[str, float]:
    """Seed → gain, of a method of `creditgraph compare`."""
    starts = {seed: curve["accuracy"] for seed, curve in row["curves"].items()}
    return {seed: end - starts[seed][0] for seed, end in row["accuracy"].items() if end is not None and starts[seed]}


def _trained(row: dict[str, Any]) -> dict[str, float]:
    """Seed → gain, of a method of tools/evidence."""
    runs = zip(row["seeds"], row["start"], row["accuracy"], strict=True)
    return {str(seed): end - start for seed, start, end in runs if start is not None and end is not None}


def read_json(file: Path) -> dict[str, Any]:
    """The content of results or scores; DataError where the file is missing or holds something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error}); expected results of training or scores.") from None
    if not isinstance(content, dict):
        raise DataError(f"{file}: expected results of training or scores, a JSON object, got {type(content).__name__}.")
    return content
