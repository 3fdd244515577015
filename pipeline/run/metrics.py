"""Metrics of the run itself, and the sinks that receive all metrics: metrics.jsonl and others, such as wandb."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pipeline.core.metric import Metric
from pipeline.run.run_directory import writing

EXECUTOR_METRICS = (
    Metric("iteration", "number", "the iteration, from 0; for the final pass, the number of iterations"),
    Metric("seconds/<node>", "s", "wall time of the node's `run`; the longest of several replicas"),
    Metric("seconds/iteration", "s", "wall time since the previous iteration was logged"),
    Metric(
        "seconds/cpu",
        "s",
        "processor time of this process, all threads, during `seconds/iteration`; not one of its phases",
    ),
    Metric(
        "seconds/executor",
        "s",
        "wall time of the executor between nodes, and of writing the metrics of the previous iteration",
    ),
    Metric("seconds/checkpoint", "s", "wall time of the checkpoint after the previous iteration"),
    Metric("seconds/waiting_<lane>", "s", "wall time in which a lane (generation, learning) waited for the other one"),
    Metric(
        "utilisation/engine",
        "share",
        "time since the previous iteration in which the engine loaded weights, generated or scored",
    ),
    Metric("utilisation/learner", "share", "time in which the learner ran"),
    Metric("utilisation/credit", "share", "time in which verifiers, rewards and credit nodes ran"),
    Metric("utilisation/waiting", "share", "time in which the main lane waited for the other lane or for other ranks"),
    Metric(
        "rejected/<node>", "rows", "rows the node skipped in this iteration; rejected.jsonl has each with its reason"
    ),
)


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """Mirroring to Weights & Biases (pip install 'creditgraph[wandb]')."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    """offline writes below the run directory (send it later with `wandb sync`); online sends while running"""
    project: str = "creditgraph"
    """project name"""
    entity: str = ""
    """user or team; "" means the account's default"""
    checkpoints: bool = False
    """also keep every checkpoint as an artifact; offline, each is copied to wandb's staging folder"""


@dataclass(frozen=True, kw_only=True)
class TensorboardSettings:
    """Mirroring to TensorBoard (pip install 'creditgraph[tensorboard]')."""

    enabled: bool = False
    """write event files to tensorboard/ in the run directory"""


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """Tables of rollouts for wandb and TensorBoard."""

    every: int = 10
    """iterations between tables, counting recorded ones only; 0 writes none"""
    rows: int = 16
    """rollouts per table, evenly spaced over those of the iteration"""

    def __post_init__(self) -> None:
        if self.every < 0 or self.rows < 1:
            raise ValueError(f"every {self.every} and rows {self.rows}: expected every ≥ 0 and rows ≥ 1.")


class Sink(Protocol):
    """Receives the metrics of one iteration at a time, from one thread."""

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        """Records the metrics of an iteration."""

    def sync(self) -> None:
        """Makes everything logged so far durable; it is called after the records so far were written."""

    def close(self) -> None:
        """Ends the sink."""


class JsonLines:
    """A .jsonl file, one object per line, flushed per line; NaN and infinities are null.

    On opening, lines of iterations after `last_iteration` and a half-written last line are cut off.
    """

    def __init__(self, path: Path, last_iteration: int = -1) -> None:
        self.path = path
        with writing(path):
            # Iterations after the checkpoint run again and are logged again.
            cut_lines(path, last_iteration)
            self._file = path.open("a", encoding="utf-8")

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Appends rows."""
        with writing(self.path):
            self._file.writelines(json.dumps(plain(row), ensure_ascii=False) + "\n" for row in rows)
            self._file.flush()

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        """Appends {"iteration": …, name: value, …}."""
        self.write([{"iteration": iteration, **metrics}])

    def sync(self) -> None:
        """Flushes to the disk."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        with writing(self.path):
            self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a .jsonl file; skips half-written lines and lines that are no row; [] if there is no file."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; null becomes NaN."""
    return [{k: math.nan if v is None else v for k, v in row.items()} for row in read_lines(path)]


def cut_lines(path: Path, last_iteration: int) -> None:
    """Cuts a .jsonl file before its first line that is unreadable or belongs to a later iteration."""
    if not path.exists():
        return
    good = 0
    with path.open("rb") as file:
        for line in file:
            try:
                keep = line.endswith(b"\n") and int(json.loads(line)["iteration"]) <= last_iteration
            except (ValueError, KeyError, TypeError):
                keep = False
            if not keep:
                break
            good += len(line)
    if good < path.stat().st_size:
        os.truncate(path, good)


def plain(value: Any) -> Any:
    """Converts a value for JSON: NaN and infinities become None, other types that JSON lacks become text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value if isinstance(value, str | int | bool | None) else str(value)
