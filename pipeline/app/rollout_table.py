"""A bounded table of the rollouts of one iteration, for sinks that show tables; of what is recorded, only the rows shown are read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.app.report.rollouts import collect, learner_wires, roles
from pipeline.app.report.source import RunSource, read_table
from pipeline.core.errors import DataError
from pipeline.core.graph import Graph
from pipeline.core.payloads import Batch, Trajectories
from pipeline.run.metrics import TableSettings
from pipeline.run.recording import RecordSettings, from_arrow

COLUMNS = (
    "iteration",
    "node",
    "problem",
    "response",
    "answer",
    "reward",
    "correct",
    "length",
    "mean_credit",
    "finish",
    "reason",
    "uid",
)
LONGEST = 4000  # characters kept of a problem, response or reason
_CORRECT = {0: "no", 1: "yes"}


class RolloutTables:
    """Makes the tables of a run.

    Args:
        path: of the run directory.
        config: the resolved configuration.
        graph: of the run.
        settings: how many.
        record: what the run records.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], graph: Graph, settings: TableSettings, record: RecordSettings
    ) -> None:
        self._run = _Chosen(path, config)
        self._run.__dict__["graph"] = graph  # a cached property; building it again would import the components again
        self._graph, self._settings, self._record = graph, settings, record

    def due(self, iteration: int) -> bool:
        """Whether an iteration gets a table."""
        every, recorded = self._settings.every, self._record.every
        return (
            every > 0
            and recorded > 0
            and iteration % recorded == 0
            and (iteration // recorded) % math.ceil(every / recorded) == 0
        )

    def rows(self, iteration: int) -> list[list[Any]]:
        """Rows of `COLUMNS` for a recorded iteration whose files are written; [] when no rollouts of it are recorded.

        Raises:
            DataError: a file of it cannot be read.
        """
        run = self._run
        names = [f"{n.name}.{o}" for n in self._graph.nodes for o in n.sockets.outputs]
        files = {name: run.path / "record" / name / f"{iteration:06d}.parquet" for name in names}
        run.files = {(name, iteration): file for name, file in files.items() if file.exists()}
        run.__dict__.pop("classes", None)
        damaged = [str(file) for (name, _), file in run.files.items() if not run.classes[name]]
        if damaged:
            raise DataError(f"{damaged[0]}: not a readable record; it is half-written or damaged. Remove it.")
        trained = [w for w in learner_wires(run, "trajectories") if (w, iteration) in run.files]
        shown = [name for name in trained if run.classes[name] == Trajectories.__name__] or roles(run)[
            Trajectories.__name__
        ]
        if not shown:
            return []
        uids = pa.concat_arrays([_uids(run.files[name, iteration]) for name in shown]).unique()
        if not len(uids):
            return []
        run.uids = uids.take(np.unique(np.linspace(0, len(uids) - 1, self._settings.rows).round().astype(np.int64)))
        found = collect([run])
        texts, pieces, row = found.texts.items, found.pieces.items, found.rows
        return [
            [
                iteration,
                texts[row["node"][i]],
                _cut(texts[row["prompt"][i]]),
                _cut("".join(pieces[k] for k in found.tokens["piece"][i].tolist())),
                texts[row["answer"][i]],
                float(row["reward"][i]),
                _CORRECT.get(row["correct"][i], "no verdict"),
                row["length"][i],
                row["mean_credit"][i],
                texts[row["finish"][i]],
                _cut(texts[row["detail"][i]]),
                str(row["uid"][i]),
            ]
            for i in range(len(found))
        ]


class _Chosen(RunSource):
    """A run of which only the rows with certain uids are read."""

    uids: pa.Array

    def read(self, output: str, iteration: int) -> Any:
        """A recorded batch cut to the chosen rows; problems, whose uids are others, in full."""
        file = self.files.get((output, iteration))
        if file is None or not issubclass(_class(self.classes.get(output, "")), Batch):
            return None
        table = read_table(file)
        if self.classes[output] != "Prompts":
            table = table.filter(pc.is_in(table.column("uid"), value_set=self.uids))
        return from_arrow(table, str(file))


def _class(name: str) -> type:
    import pipeline.core.payloads

    found = getattr(pipeline.core.payloads, name, object)
    return found if isinstance(found, type) else object


def _uids(file: Path) -> pa.Array:
    return read_table(file, ["uid"]).column("uid").combine_chunks()


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)"
