"""A run directory in Python: rollouts and metrics as DataFrames, recorded outputs as payloads."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from creditgraph.pipeline.app.notebook.frames import COLUMNS, frame, rollout_rows
from creditgraph.pipeline.app.notebook.texts import Texts
from creditgraph.pipeline.app.report.source import read_run
from creditgraph.pipeline.core.errors import RunError, did_you_mean, ranges
from creditgraph.pipeline.core.payloads import Batch, Credit, Prompts, Rewards, Trajectories

_ROLLOUT_CLASSES = tuple(cls.__name__ for cls in (Prompts, Trajectories, Rewards, Credit))


class Run:
    """A run directory. Its configuration is read as text, so no code that it names is loaded.

    Attributes:
        path: the directory.
        config: the resolved configuration.
    """

    def __init__(self, path: str | Path) -> None:
        self._source = read_run(Path(path))
        self.path = self._source.path
        self.config = self._source.config
        self._texts = Texts(str((self.config.get("model") or {}).get("path", "")))

    @property
    def outputs(self) -> list[str]:
        """Names of what is recorded, such as "advantage.credit"."""
        order = {name: place for place, name in enumerate(self._nodes)}
        names = {name for name, _ in self._source.files}
        return sorted(names, key=lambda name: (order.get(name.partition(".")[0], len(order)), name))

    @property
    def iterations(self) -> list[int]:
        """Recorded iterations."""
        return self._source.iterations()

    def read(self, output: str, iteration: int = -1) -> Batch:
        """A recorded output, such as "advantage.credit"; by default of the last recorded iteration.

        Raises:
            RunError: it is not recorded, or its file cannot be read.
        """
        there = self._source.iterations(output)
        if not there:
            raise RunError(f"{self.path}: no output '{output}' is recorded.{did_you_mean(output, self.outputs)}")
        chosen = there[-1] if iteration < 0 else iteration
        batch = self._source.read(output, chosen)
        if not isinstance(batch, Batch):
            why = self._source.notes[-1] if chosen in there else f"recorded iterations: {ranges(there)}"
            raise RunError(f"{self.path}: '{output}' of iteration {chosen} cannot be read; {why}.")
        self._texts.add_to_all(self._rollout_outputs(chosen), batch)
        return batch

    def rollouts(self, iterations: Sequence[int] | None = None) -> Any:
        """A DataFrame of rollouts: prompt, response, reward, correct, credit and text per token, iteration, ids.

        Args:
            iterations: those to read; by default all that are recorded.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        rows = []
        for iteration in self.iterations if iterations is None else iterations:
            rows += rollout_rows(self._rollout_outputs(iteration), iteration, self._learned, self._texts.pieces)
        return frame(rows, COLUMNS, "rollouts()")

    def metrics(self) -> Any:
        """A DataFrame of metrics.jsonl, one row per iteration.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        columns = list(dict.fromkeys(name for row in self._source.rows for name in row))
        return frame([[row.get(name) for name in columns] for row in self._source.rows], columns, "metrics()")

    def _rollout_outputs(self, iteration: int) -> dict[str, Batch]:
        names = [name for name in self.outputs if self._source.classes.get(name) in _ROLLOUT_CLASSES]
        batches = {name: self._source.read(name, iteration) for name in names}
        return {name: batch for name, batch in batches.items() if isinstance(batch, Batch)}

    @property
    def _nodes(self) -> dict[str, Any]:
        nodes = self.config.get("nodes")
        return nodes if isinstance(nodes, dict) else {}

    @cached_property
    def _learned(self) -> list[str]:
        """Wires into the socket `credit` of any node, as written: a learner's comes last in the graph's file."""
        wires = [(spec.get("in") or {}).get("credit") for spec in self._nodes.values() if isinstance(spec, dict)]
        return [wire for wire in wires if isinstance(wire, str)][-1:]

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {len(self._source.rows)} rows of metrics, {len(self.iterations)} recorded)"

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self._source.notes)
        recorded = ", ".join(self.outputs) or "nothing"
        return f"<b>{html.escape(repr(self))}</b><div>recorded: {html.escape(recorded)}</div><ul>{notes}</ul>"


def read(path: str | Path) -> Run:
    """Reads a run directory; nothing of the run is executed and no code that it names is loaded.

        creditgraph.read("runs/first").rollouts().groupby("iteration").reward.mean()

    Raises:
        RunError: there is no such run.
    """
    return Run(path)
