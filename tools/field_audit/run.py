"""Runs the tables: every entry through the audit, one row each."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from creditgraph.pipeline.app.audit import search
from creditgraph.pipeline.app.audit.audit import all_checks, as_json, run_checks
from creditgraph.pipeline.app.audit.designs import WORDS, recognised
from creditgraph.pipeline.app.audit.loss_target import loss_function
from creditgraph.pipeline.app.audit.targets import AuditError, advantage_function

from .entry import Entry, Table
from .source import Source

TRAINERS = (
    "verl", "trl", "openrlhf", "skyrl", "slime", "miles", "nemo_rl", "prime_rl", "areal", "roll", "rllm",
    "open_instruct", "pipelinerl", "rlinf", "swift", "unsloth",
)  # fmt: skip
LEAST = 8  # checks that must have been evaluated before a function counts as judged


def record(trainer: str, folder: Path | None, version: str, commit: str, file: Path, quick: bool = False) -> None:
    """Judges a trainer and puts its rows into the results file."""
    table = table_of(trainer)
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    rows = list(run_table(trainer, folder, quick=quick))
    found[trainer] = {
        "version": version,
        "repository": table.repository,
        "creditgraph": commit,
        "left_out": table.left_out,
        "rows": rows,
    }
    ordered = {name: found[name] for name in TRAINERS if name in found}
    file.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def table_of(trainer: str) -> Table:
    """The table of a trainer."""
    table: Table = importlib.import_module(f"field_audit.{trainer}").table
    return table


def run_entry(entry: Entry, source: Source) -> dict[str, Any]:
    """One row: verdict of each check, counter-examples, and why it was not judged."""
    row: dict[str, Any] = {
        "function": entry.function,
        "name": entry.name,
        "kind": "loss" if entry.loss else "advantage",
    }
    try:
        function = entry.make(source)
        if entry.loss:
            target: Any = loss_function(function, entry.name, entry.bind, entry.settings)
            checks: Any = tuple(c for c in all_checks() if c.layer == "loss")
        else:
            target = advantage_function(function, entry.name, entry.bind, entry.settings)
            checks = tuple(c for c in all_checks() if c.layer not in ("loss", "records"))
        results = run_checks(target, checks)
    except (AuditError, Exception) as error:  # what a trainer's source raises is its refusal
        return row | {"judged": False, "refused": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    found = json.loads(as_json(results))
    evaluated = [r for r in found if r["verdict"] in ("pass", "fail")]
    ran = all(r["verdict"] == "pass" for r in found if r["check"] in ("returns", "loss_returns"))
    design = None if entry.loss else recognised(target)
    return row | {
        "design": {"words": design.words, "fails": sorted(WORDS.get(design.declare, ()))} if design else {},
        "settings": {k: v for k, v in target.settings.items() if isinstance(v, bool | int | float | str)},
        "judged": ran and len(evaluated) >= LEAST,
        "passes": [r["check"] for r in found if r["verdict"] == "pass"],
        "not_applicable": {r["check"]: r["message"] for r in found if r["verdict"] == "not applicable"},
        "failures": {
            r["check"]: {key: r[key] for key in ("message", "size", "example")} for r in found if r["verdict"] == "fail"
        },
    }


def run_table(trainer: str, folder: Path | None, only: str = "", quick: bool = False) -> Iterator[dict[str, Any]]:
    """The rows of a trainer.

    Args:
        trainer: one of `TRAINERS`.
        folder: its checkout, None for an installed package.
        only: entries whose name contains it.
        quick: look for no smaller counter-examples; verdicts are the same.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if quick:
        search._smallest = lambda *_: None
    table = table_of(trainer)
    source = Source(None if folder is None else folder / table.folder, table.package)
    for entry in table.entries:
        if only in entry.name:
            begin = time.process_time()
            row = run_entry(entry, source)
            yield row | {"seconds": round(time.process_time() - begin, 1)}
