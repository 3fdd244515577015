"""Metrics of the run itself, and the sinks that receive all metrics: metrics.jsonl and others, such as wandb."""

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.run.run_directory import replacing, writing

logger = logging.getLogger("creditgraph")

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
    Metric(
        "memory/<node>",
        "GB",
        "largest GPU memory of tensors during the node's `run`, that of other nodes included; of several replicas the "
        "largest, of a learner that of rank 0; without a GPU it is left out",
    ),
    Metric("memory/<node>_reserved", "GB", "the same of what torch has taken from the GPU"),
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

    On opening, rows of iterations after `last_iteration` and a half-written last line are removed (`cut_lines`).

    Args:
        path: the file; made if missing.
        last_iteration: the last iteration that does not run again.
        mark: what `mark` returned when that iteration was checkpointed; a file that begins otherwise is reported.
    """

    def __init__(self, path: Path, last_iteration: int = -1, mark: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        self._bytes = 0
        with writing(path):
            if mark is not None:
                _compare(path, mark)
            # Iterations after the checkpoint run again and are logged again.
            cut_lines(path, last_iteration)
            if path.exists():
                for block in _blocks(path):
                    self._count(block)
            self._file = path.open("a", encoding="utf-8")

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Appends rows."""
        lines = [json.dumps(plain(row), ensure_ascii=False) + "\n" for row in rows]
        with writing(self.path):
            self._file.writelines(lines)
            self._file.flush()
        self._count("".join(lines).encode())

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        """Appends {"iteration": …, name: value, …}."""
        self.write([{"iteration": iteration, **metrics}])

    def mark(self) -> dict[str, Any]:
        """Size and SHA-256 of all that is in the file: {"bytes": …, "sha256": …}."""
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def sync(self) -> None:
        """Flushes to the disk."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        with writing(self.path):
            self._file.close()

    def _count(self, data: bytes) -> None:
        self._digest.update(data)
        self._bytes += len(data)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a .jsonl file; skips half-written lines and lines that are no row; [] if there is no file."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [row for row in map(_row, lines) if row is not None]


def unreadable_lines(path: Path) -> list[int]:
    """Numbers, from 1, of the lines of a .jsonl file that are no row; a last one without its end is being written."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        return [i for i, line in enumerate(file, 1) if line.endswith(b"\n") and _row(line) is None]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; null becomes NaN."""
    return [{k: math.nan if v is None else v for k, v in row.items()} for row in read_lines(path)]


def cut_lines(path: Path, last_iteration: int) -> None:
    """Removes from a .jsonl file its last rows, of later iterations, and a half-written last line.

    All before the last row of an iteration up to `last_iteration` stays as it is, and so do lines that cannot be read;
    lines that are not as they were written are reported.
    """
    if not path.exists():
        return
    end = 0  # of the last row that stays
    at = 0
    latest = -1
    removed = 0  # rows since then
    stray: list[tuple[int, bytes]] = []  # unreadable lines with their places
    odd: list[int] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            row = _row(line)
            at += len(line)
            if not line.endswith(b"\n"):
                break
            if row is None or type(row.get("iteration")) is not int:
                stray.append((at, line))
                odd.append(number)
            elif row["iteration"] > last_iteration:
                removed += 1
            else:
                if row["iteration"] < latest or removed:
                    odd.append(number)
                latest = max(latest, row["iteration"])
                removed = 0
                end = at
    rest = [line for place, line in stray if place > end]
    if odd:
        shown = ", ".join(map(str, odd[:5])) + (", …" if len(odd) > 5 else "")
        logger.warning(
            "%s: lines that are not as they were written: %d (line %s); they are kept. Compare them with a copy.",
            path, len(odd), shown,
        )  # fmt: skip
    if removed:
        logger.info("%s: rows after iteration %d are removed and run again: %d.", path, last_iteration, removed)
    if path.stat().st_size > end + sum(map(len, rest)):
        if rest:
            with replacing(path) as aside, aside.open("wb") as target, path.open("rb") as source:
                target.write(source.read(end))
                target.writelines(rest)
        else:
            os.truncate(path, end)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            yield block


def _compare(path: Path, mark: Mapping[str, Any]) -> None:
    """Reports a file that does not begin as `mark` says."""
    digest = hashlib.sha256()
    left = int(mark["bytes"])
    for block in _blocks(path) if path.exists() else ():
        digest.update(block[:left])
        left -= min(left, len(block))
    if left or digest.hexdigest() != mark["sha256"]:
        state = f"its last {left} bytes of then are missing" if left else "its bytes differ"
        logger.warning(
            "%s: damaged since the checkpoint that the run continues from (%s). What can be read is kept.", path, state
        )


def plain(value: Any) -> Any:
    """Converts a value for JSON: NaN and infinities become None, other types that JSON lacks become text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value if isinstance(value, str | int | bool | None) else str(value)
