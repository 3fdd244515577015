"""Reads a run directory; missing, damaged and still growing files become notes, not errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import yaml

from creditgraph.pipeline.app.overview import find_runs
from creditgraph.pipeline.core.errors import CreditgraphError, RunError, ranges
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.run.metrics import read_lines, read_metrics, unreadable_lines
from creditgraph.pipeline.run.packing import open_parquet, recorded_files
from creditgraph.pipeline.run.recording import KEY, from_arrow, read_table, recorded_sums
from creditgraph.pipeline.run.run_directory import lock_holder
from creditgraph.pipeline.run.timeline.files import trace_files

Key = tuple[str, int]  # ("node.output", iteration)
T = TypeVar("T")


@dataclass
class RunSource:
    """The content of a run directory.

    Attributes:
        path: the directory.
        config: the resolved configuration; {} when it cannot be read.
        rows: metrics, one dict per line.
        rejected: rows of rejected.jsonl.
        card: data_card.json, where the run wrote one.
        traces: files of its timeline.
        files: ("node.output", iteration) → Parquet file, which may be in an archive (`pipeline/run/packing.py`).
        running: whether a process holds the run's lock.
        notes: sentences about missing parts.
    """

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    card: dict[str, Any] = field(default_factory=dict)
    traces: list[Path] = field(default_factory=list)
    files: dict[Key, Path] = field(default_factory=dict)
    running: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @cached_property
    def graph(self) -> Graph | None:
        """The run's graph; None when its configuration no longer builds (a note says why)."""
        if not self.config:
            return None
        from creditgraph.pipeline.run.compose.experiment import build_experiment
        from creditgraph.pipeline.run.trust import check_trusted

        try:
            check_trusted(self.path, self.config)
        except RunError as error:
            self.note(f"{error} Until then the graph, and explanations that need it, are left out")
            return None
        try:
            return build_experiment(self.config, str(self.path / "config.yaml")).graph
        except (CreditgraphError, ImportError, TypeError, KeyError, AttributeError) as error:
            self.note(
                f"the graph of its config.yaml does not build in this version ({_first_line(error)}); the graph "
                "section is left out"
            )
            return None

    @cached_property
    def classes(self) -> dict[str, str]:
        """Recorded output → its payload class, of the first readable file; "" when none is."""
        classes: dict[str, str] = {}
        for (name, _), file in self.files.items():
            if not classes.get(name):
                classes[name] = schema_class(file)
        return classes

    def note(self, text: str) -> None:
        """Adds a note, unless it is there already."""
        if text not in self.notes:
            self.notes.append(text)

    def iterations(self, output: str | None = None) -> list[int]:
        """Recorded iterations, of one output or of any."""
        return sorted({i for name, i in self.files if output is None or name == output})

    def outputs(self) -> list[str]:
        """Names of recorded outputs, in graph order where the graph is known."""
        names = {name for name, _ in self.files}
        known = [f"{n.name}.{o}" for n in self.graph.nodes for o in n.sockets.outputs] if self.graph is not None else []
        return [n for n in known if n in names] + sorted(names.difference(known))

    def read(self, output: str, iteration: int) -> Any:
        """A recorded payload; None, with a note, when it is not there or cannot be read."""
        file = self.files.get((output, iteration))
        if file is None:
            return None
        try:
            return from_arrow(read_table(file), str(file))
        except (pa.ArrowException, OSError) as error:
            self.note(f"record/{output}/{file.name} is half-written or damaged ({_first_line(error)}) and left out")
        except (CreditgraphError, ValueError, KeyError, TypeError) as error:
            self.note(f"record/{output}/{file.name} is left out: {_first_line(error).removeprefix(f'{file}: ')}")
        return None


def read_run(path: Path) -> RunSource:
    """Looks through a run directory.

    Raises:
        RunError: there is no such folder, or it is not that of one run.
    """
    if (found := find_runs(path)) != [path]:
        raise RunError(f"{path}: a folder of {len(found)} runs; expected one of them, such as {found[0]}.")
    run = RunSource(path)
    run.config = _guarded(run, "config.yaml", lambda p: _mapping(yaml.safe_load(_text(p)))) or {}
    run.rows = _guarded(run, "metrics.jsonl", read_metrics) or []
    for name in ("metrics.jsonl", "rejected.jsonl"):
        damaged = _guarded(run, name, unreadable_lines)
        if damaged:
            run.note(f"{name}: {len(damaged)} lines cannot be read (line {ranges(damaged)[:80]}) and are left out")
    there = recorded_files(path / "record")
    lost = sorted(recorded_sums(path / "record").keys() - set(there))
    if lost:
        run.note(f"{len(lost)} recorded files are missing, first record/{lost[0]}")
    run.rejected = _guarded(run, "rejected.jsonl", read_lines) or []
    run.card = _guarded(run, "data_card.json", lambda p: _mapping(json.loads(_text(p)))) or {}
    run.traces = trace_files(path)
    if not run.rows:
        run.note("no metrics (metrics.jsonl is missing or empty), so there are no curves")
    for file in (path / "record" / name for name in there if name.endswith(".parquet")):
        run.files[file.parent.name, int(file.stem)] = file
    if not run.files:
        run.note(
            "nothing is recorded (record/ is empty), so there are no rollouts; train with run.record.every=1 to see "
            "them"
        )
    run.running = bool(lock_holder(path / "lock"))
    if run.running:
        run.note("still running: the report has what was written so far")
    return run


def _guarded(run: RunSource, name: str, read: Callable[[Path], Any]) -> Any:
    try:
        return read(run.path / name)
    except FileNotFoundError:
        if name not in ("rejected.jsonl", "data_card.json"):
            run.note(f"no {name}")
    except (OSError, ValueError, yaml.YAMLError) as error:
        run.note(f"{name} cannot be read ({_first_line(error)})")
    return None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _mapping(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError("not a mapping")
    return content


def schema_class(file: Path) -> str:
    """The payload class named in a record's schema; "" when it cannot be read."""
    try:
        with open_parquet(file) as open_file:
            return str(json.loads((open_file.schema_arrow.metadata or {})[KEY])["class"]).rpartition(":")[2]
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        return ""


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` items, evenly spaced, first and last among them."""
    places = np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)
    return [items[i] for i in np.unique(places)]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
