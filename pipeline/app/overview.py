"""A folder of runs as rows: how far each one is, its results, and the settings in which runs of one recipe differ."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from creditgraph.pipeline.app.results import Results, summarise
from creditgraph.pipeline.core.errors import RunError, did_you_mean
from creditgraph.pipeline.run.metrics import read_metrics
from creditgraph.pipeline.run.run_directory import METRICS, differences, lock_holder

DEPTH = 4  # folders below the given one in which runs are looked for
# Of the section `run`, what changes the result; the rest is name, place and reporting.
_RESULT = ("run.seed", "run.iterations")


def is_run(folder: Path) -> bool:
    """Whether anything of a run is in the folder."""
    return any((folder / name).exists() for name in ("config.yaml", METRICS, "record"))


def find_runs(folder: Path) -> list[Path]:
    """The runs in a folder and below it, by name; the folder itself where it is one.

    Raises:
        RunError: there is no such folder, or no run in it.
    """
    if not folder.is_dir():
        near = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        raise RunError(f"{folder}: no such run directory.{did_you_mean(folder.name, near) if near else ''}")
    found = list(_below(folder, DEPTH))
    if not found:
        raise RunError(
            f"{folder}: not a run (no config.yaml, metrics.jsonl or record/), and none is in it; expected a folder "
            "that `creditgraph train` wrote, or a folder of them."
        )
    return found


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        try:
            entries = sorted(e.name for e in os.scandir(folder) if e.is_dir(follow_symlinks=False))
        except OSError:  # a folder that may not be read holds nothing to show
            return
        for name in entries:
            if not name.startswith("."):
                yield from _below(folder / name, depth - 1)


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run in a list.

    Attributes:
        path: its directory.
        recipe: name of the recipe, or of the run where it has none.
        config: the configuration; {} where it cannot be read.
        state: running, finished, stopped, or why it cannot be read.
        done, planned: iterations.
        results: sums of metrics.jsonl.
        changed: seconds since the epoch at which metrics.jsonl was last written; 0 without one.
        differs: setting → value, of those in which it differs from another run of the list with the same recipe.
    """

    path: Path
    recipe: str
    config: Mapping[str, Any]
    state: str
    done: int
    planned: int | None
    results: Results
    changed: float
    differs: Mapping[str, Any]


def rows_of(paths: Sequence[Path]) -> list[RunRow]:
    """The rows of some runs, those of one recipe together, in the order of their differing settings."""
    configs = {path: _config(path) for path in paths}
    recipes: dict[str, list[Path]] = {}
    for path, config in configs.items():
        recipes.setdefault(str(config.get("recipe") or path.name), []).append(path)
    rows = []
    for recipe, members in recipes.items():
        names = differing([configs[path] for path in members])
        made = [
            _row(path, recipe, configs[path], {n: value_of(configs[path], n) for n in names if n != "run.iterations"})
            for path in members
        ]
        rows += sorted(made, key=lambda row: [_sortable(v) for v in row.differs.values()])
    return rows


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Dotted names of the settings that are not the same in all configurations."""
    first, *others = configs
    names = dict.fromkeys(name for other in others for name, _, _ in differences(first, other))
    settings = [name for name in names if not name.startswith("run.")]
    return settings + [name for name in _RESULT if name in names]  # those of one setting stand together, seed by seed


def value_of(config: Any, name: str) -> Any:
    """The value of a dotted name; "absent" where there is none."""
    for part in name.split("."):
        if not isinstance(config, Mapping) or part not in config:
            return "absent"
        config = config[part]
    return config


def _sortable(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, int | float)
    return not number, float(value) if number else 0.0, str(value)


def _config(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _row(path: Path, recipe: str, config: Mapping[str, Any], differs: Mapping[str, Any]) -> RunRow:
    metrics = path / METRICS
    try:
        results = summarise(read_metrics(metrics))
        changed = metrics.stat().st_mtime
    except (OSError, ValueError):
        results, changed = summarise([]), 0.0
    section = config.get("run")
    planned = section.get("iterations") if isinstance(section, Mapping) else None
    planned = planned if isinstance(planned, int) else None
    finished = planned is not None and results.iterations >= planned
    state = "running" if lock_holder(path / "lock") else "finished" if finished else "stopped"
    if not config:
        state = "config.yaml cannot be read"
    return RunRow(
        path=path, recipe=recipe, config=config, state=state, done=results.iterations, planned=planned,
        results=results, changed=changed, differs=differs,
    )  # fmt: skip


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Each dotted name → the shortest end of it that no other of them has.

    >>> short_names(["learner.optimizer.lr", "a.kind", "b.kind"])
    {'learner.optimizer.lr': 'lr', 'a.kind': 'a.kind', 'b.kind': 'b.kind'}
    """
    short = {}
    for name in names:
        parts = name.split(".")
        ends = [".".join(parts[-k:]) for k in range(1, len(parts) + 1)]
        short[name] = next(e for e in ends if sum(o == e or o.endswith(f".{e}") for o in names) == 1 or e == name)
    return short


def text_of(value: Any) -> str:
    """A setting's value on one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def age(changed: float) -> str:
    """Such as "12 min ago"."""
    if not changed:
        return ""
    seconds = max(0.0, time.time() - changed)
    for length, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
