"""The writer that records chosen outputs of a run, and the check of what it wrote."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from creditgraph.pipeline.core.encoding import class_name
from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.handles import Handle
from creditgraph.pipeline.core.payloads import Weights
from creditgraph.pipeline.core.trace import NO_TRACE, Trace
from creditgraph.pipeline.run import packing
from creditgraph.pipeline.run.checkpoint import checksum
from creditgraph.pipeline.run.metrics import JsonLines
from creditgraph.pipeline.run.recording import record_problem, recorded_sums, removed_records, write_payload
from creditgraph.pipeline.run.run_directory import CHECKSUMS, make_folder, write_aside
from creditgraph.pipeline.run.timeline.spans import BRIEF

logger = logging.getLogger("creditgraph")


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """Which outputs are written to the run directory."""

    every: int = 1
    """iterations between records; 0 records nothing"""
    outputs: list[str] | str = "all"
    """outputs as node.output, or "all" """
    keep_gb: float = 0.0
    """size of all records [GB] beyond which those of the oldest iterations are given up at a checkpoint, and removed at
    the next; 0 keeps all. A removed record is named in record/checksums.jsonl, and cannot be replayed"""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"every {self.every}: expected 0 (nothing) or more.")
        if self.keep_gb < 0:
            raise ValueError(f"keep_gb {self.keep_gb:g}: expected 0 (all records are kept) or more.")
        if isinstance(self.outputs, str) and self.outputs != "all":
            raise ValueError(f"outputs {self.outputs!r}: expected a list such as [sampler.trajectories], or 'all'.")


def chosen_outputs(settings: RecordSettings, graph: Graph) -> set[str]:
    """The outputs ("node.output") that are recorded; raises ConfigError for one that the graph does not have."""
    everything = {f"{n.name}.{output}" for n in graph.nodes for output in n.sockets.outputs}
    chosen = everything if settings.outputs == "all" else set(settings.outputs)
    for name in sorted(chosen - everything):
        raise ConfigError(f"run.record.outputs: no output '{name}' in this graph.{did_you_mean(name, everything)}")
    return chosen


class Recorder:
    """Writes chosen outputs to record/<node>.<output>/<iteration>.parquet in a separate thread, later into archives.

    An error of the writer is raised by the next call. Handles (Policy, Verifier) and Weights leave a small JSON note
    instead.
    """

    def __init__(self, path: Path, settings: RecordSettings, graph: Graph, trace: Trace = NO_TRACE) -> None:
        self._path = path
        self._trace = trace
        self._every = settings.every
        self._chosen = chosen_outputs(settings, graph)
        self._error: BaseException | None = None
        # Bounded, so that a slow disk slows the run down instead of filling the memory.
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=64)
        self._thread: threading.Thread | None = None
        self._sums: JsonLines | None = None
        self._written: dict[tuple[int, str], str] = {}  # (iteration, file) → SHA-256, until it is listed
        self._audit: RecordAudit | None = None
        self._budget = settings.keep_gb * 1e9
        self._sizes: dict[tuple[int, str], int] = {}  # (iteration, file) → bytes, of listed files
        self._doomed: list[str] = []  # files that the list names as removed

    def resume(self, last_iteration: int, marks: Mapping[str, Mapping[str, Any]]) -> None:
        """Continues after an iteration; only the rank that writes calls it.

        Records up to it that are damaged are reported while the run goes on.

        Args:
            last_iteration: the last iteration that does not run again.
            marks: those of the checkpoint; that of checksums.jsonl is among them.
        """
        self._sums = JsonLines(self._path / CHECKSUMS, last_iteration, marks.get(f"{self._path.name}/{CHECKSUMS}"))
        # The checkpoint knows that these are removed.
        self._doomed = removed_records(self._path)
        self._remove()
        for name in recorded_sums(self._path) if self._budget else ():
            with suppress(FileNotFoundError):
                self._sizes[int(Path(name).stem), name] = packing.record_size(self._path / name)
        packing.pack(self._path, last_iteration)  # what a kill left loose
        self._audit = RecordAudit(self._path, last_iteration)

    def marks(self) -> dict[str, dict[str, Any]]:
        """What a checkpoint keeps for `resume`, by file of the run directory; call `flush` before."""
        return {f"{self._path.name}/{CHECKSUMS}": self._sums.mark()} if self._sums else {}

    def wants(self, node: str, output: str, iteration: int) -> bool:
        """Whether an output of this iteration is recorded."""
        return self._every > 0 and iteration % self._every == 0 and f"{node}.{output}" in self._chosen

    def put(self, node: str, output: str, iteration: int, value: Any) -> None:
        """Queues a value for the writer, if it is to be recorded."""
        name = f"{node}.{output}"
        if not self.wants(node, output, iteration):
            return
        self._check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
            self._thread.start()
        with self._trace.span("recording", "recording", iteration, BRIEF):  # waits when the writer is too slow
            self._queue.put(lambda: self._write(name, iteration, value))

    def flush(self, iteration: int) -> None:
        """Waits until all queued values are written, lists the files up to `iteration` in checksums.jsonl, packs them.

        With overlapping lanes there may be files of later iterations. They are listed later, so that the list is in the
        order of iterations.
        """
        self._queue.join()
        self._check()
        self._list(iteration)
        self._remove()
        if self._sums is not None:
            if self._budget:
                self._doom(self._sums)
            packing.pack(self._path, iteration)

    def pack(self, iteration: int) -> None:
        """Packs the records up to `iteration` if a segment of them ends there; for runs that seldom save."""
        if self._sums is not None and (iteration + 1) % packing.SEGMENT == 0:
            self._queue.join()
            self._check()
            packing.pack(self._path, iteration)

    def close(self) -> None:
        """Writes the remaining values and ends the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        if self._audit is not None:
            self._audit.finish()
        self._list()
        if self._sums is not None:
            self._sums.close()
            self._sums = None
        self._check()

    def _list(self, iteration: int | None = None) -> None:
        due = sorted(file for file in self._written if iteration is None or file[0] <= iteration)
        if self._sums is not None and due:
            if self._budget:
                self._sizes |= {(i, name): packing.record_size(self._path / name) for i, name in due}
            self._sums.write(
                [{"iteration": i, "file": name, "sha256": self._written.pop((i, name))} for i, name in due]
            )
            self._sums.sync()

    def _doom(self, sums: JsonLines) -> None:
        """Lists the oldest iterations' files beyond the budget as removed; the newest iteration stays.

        They are removed at the next checkpoint: the one that is being written now then knows of it, and no older one
        that a resumed run may fall back to lists a file that is gone.
        """
        newest = max((iteration for iteration, _ in self._sizes), default=0)
        total = sum(self._sizes.values())
        while total > self._budget and (oldest := min(i for i, _ in self._sizes)) < newest:
            files = [key for key in self._sizes if key[0] == oldest]
            total -= sum(self._sizes.pop(key) for key in files)
            self._doomed += [name for _, name in files]
        if self._doomed:
            sums.write([{"iteration": newest, "file": name, "sha256": None} for name in self._doomed])
            sums.sync()
            logger.info(
                "%s: %d records are over run.record.keep_gb=%g and will be removed, the oldest iterations first.",
                self._path,
                len(self._doomed),
                self._budget / 1e9,
            )

    def _remove(self) -> None:
        packing.remove(self._path, self._doomed)
        self._doomed = []

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if self._error is None:
                    job()
            except BaseException as error:
                self._error = error
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _check(self) -> None:
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def _write(self, name: str, iteration: int, value: Any) -> None:
        path = self._path / name / f"{iteration:06d}.parquet"
        make_folder(path.parent)
        with self._trace.span(name, "recording", iteration):
            if isinstance(value, Handle | Weights):
                version = getattr(value, "version", None)
                note = {"class": class_name(type(value)), "iteration": iteration, "version": version}
                path = path.with_suffix(".json")
                write_aside(path, json.dumps(note))
            else:
                write_payload(path, value)
            self._written[iteration, f"{name}/{path.name}"] = checksum(path)


class RecordAudit:
    """Compares a run's records with their checksums in a thread and logs a warning for each damaged one.

    Args:
        folder: a record/ folder.
        last_iteration: later records are left out.
    """

    def __init__(self, folder: Path, last_iteration: int) -> None:
        self._folder = folder
        self._sums = recorded_sums(folder)
        names = {name for name in packing.recorded_files(folder) if int(Path(name).stem) <= last_iteration}
        unlisted = sorted(names - self._sums.keys())
        if unlisted:
            logger.warning(
                "%s: %d records are not listed in %s (first %s), so damage of them would not be seen.",
                folder, len(unlisted), CHECKSUMS, unlisted[0],
            )  # fmt: skip
        self._left = sorted(self._sums, reverse=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="record audit", daemon=True)
        self._thread.start()

    def finish(self, seconds: float = 10.0) -> None:
        """Waits for the end of the comparison; after `seconds` it is ended."""
        self._thread.join(seconds)
        self._stop.set()
        self._thread.join()
        if self._left:
            logger.warning("%s: %d records were not compared with their checksums.", self._folder, len(self._left))

    def _work(self) -> None:
        while self._left and not self._stop.is_set():
            file = self._folder / self._left.pop()
            problem = record_problem(file, self._sums)
            if problem:
                logger.warning("%s: %s. Restore it from a copy, or remove it.", file, problem)
