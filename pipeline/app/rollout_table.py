"""A bounded table of the rollouts of one iteration, for sinks that show tables.

Made of the run's records. Of a record, only the rows that are shown become tensors and texts.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.core.errors import DataError
from pipeline.core.graph import Graph
from pipeline.core.payloads import Batch, Credit, Prompts, Rewards, Trajectories
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


class RolloutTables:
    """Makes the tables of a run.

    Args:
        path: of the run directory.
        graph: of the run.
        settings: how many.
        record: what the run records.
    """

    def __init__(self, path: Path, graph: Graph, settings: TableSettings, record: RecordSettings) -> None:
        self._folder = path / "record"
        self._graph = graph
        self._settings = settings
        self._record = record

    def due(self, iteration: int) -> bool:
        """Whether an iteration gets a table."""
        every = self._settings.every
        recorded = self._record.every
        if not every or not recorded or iteration % recorded:
            return False
        # Every n-th recorded iteration, with n the number of records that `every` iterations have.
        return (iteration // recorded) % math.ceil(every / recorded) == 0

    def rows(self, iteration: int) -> list[list[Any]]:
        """Rows of `COLUMNS` for a recorded iteration whose files are written; [] when no rollouts of it are recorded.

        Raises:
            DataError: a file is damaged, or was made by another version.
        """
        uids = self._chosen(iteration)
        if not len(uids):
            return []
        outcome = self._outcomes(iteration, uids)
        credit = self._mean_credit(iteration, uids)
        prompts = self._prompts(iteration)
        rows: dict[int, list[Any]] = {}
        # In the order of the graph, so that a rollout stands under the node that made it and not one that passed it on.
        for name in self._outputs(Trajectories):
            batch: Trajectories | None = self._read(name, iteration, uids)
            if batch is None:
                continue
            for i in range(len(batch)):
                uid = int(batch.uid[i])
                problem, answer = prompts.get(int(batch.prompt_uid[i]), ("", ""))
                reward, correct, reason = outcome.get(uid, (math.nan, "no verdict", ""))
                row = [
                    iteration,
                    name.partition(".")[0],
                    _cut(problem),
                    _cut(batch.text[i]),
                    answer,
                    reward,
                    correct,
                    len(batch.response_tokens.row(i)),
                    credit.get(uid, math.nan),
                    batch.finish_reason[i],
                    _cut(reason),
                    str(uid),
                ]
                rows.setdefault(uid, row)
        return list(rows.values())

    def _chosen(self, iteration: int) -> pa.Array:
        """Uids of the rollouts to show, evenly spaced over those that the learner reads, else over all."""
        trained = [
            f"{wire.source}.{wire.output}"
            for node in self._graph.nodes
            if node.placement == "collective" and {"trajectories", "credit"} <= set(node.wires)
            for wire in node.wires["trajectories"]
        ]
        there = [self._table(name, iteration, ["uid"]) for name in trained]
        if not any(table is not None for table in there):
            there = [self._table(name, iteration, ["uid"]) for name in self._outputs(Trajectories)]
        columns = [table.column("uid").combine_chunks() for table in there if table is not None]
        uids = pa.concat_arrays(columns).unique() if columns else pa.array([], pa.int64())
        if not len(uids):
            return uids
        # Evenly spaced, since rows of a group are neighbours: the first ones would all be of one prompt.
        places = np.linspace(0, len(uids) - 1, self._settings.rows).round().astype(np.int64)
        return uids.take(np.unique(places))

    def _outcomes(self, iteration: int, uids: pa.Array) -> dict[int, tuple[float, str, str]]:
        """uid → reward, whether it is correct, and the verifier's reason."""
        outcomes = {}
        for name in self._outputs(Rewards):
            batch: Rewards | None = self._read(name, iteration, uids)
            if batch is None:
                continue
            for i, uid in enumerate(batch.uid.tolist()):
                verdict = ("yes" if batch.correct[i] else "no") if batch.valid[i] else "no verdict"
                outcomes[uid] = (float(batch.value[i]), verdict, batch.detail[i])
        return outcomes

    def _mean_credit(self, iteration: int, uids: pa.Array) -> dict[int, float]:
        """uid → mean over the trained tokens; of several credits the learner's, which comes last."""
        learned = {
            f"{wire.source}.{wire.output}" for node in self._graph.nodes for wire in node.wires.get("credit", ())
        }
        means = {}
        for name in sorted(self._outputs(Credit), key=learned.__contains__):
            batch: Credit | None = self._read(name, iteration, uids)
            if batch is None:
                continue
            for i, uid in enumerate(batch.uid.tolist()):
                means[uid] = float(batch.advantage.row(i)[batch.mask.row(i)].mean())
        return means

    def _prompts(self, iteration: int) -> dict[int, tuple[str, str]]:
        """Prompt uid → text and reference answer."""
        prompts: dict[int, tuple[str, str]] = {}
        for name in self._outputs(Prompts):
            batch: Prompts | None = self._read(name, iteration, None)
            if batch is not None:
                prompts |= dict(zip(batch.uid.tolist(), zip(batch.text, batch.answer, strict=True), strict=True))
        return prompts

    def _outputs(self, kind: type[Batch]) -> list[str]:
        """Names of the outputs of a class, in the order of the graph."""
        return [
            f"{node.name}.{output}"
            for node in self._graph.nodes
            for output, socket in node.sockets.outputs.items()
            if socket.carries(kind)
        ]

    def _read(self, name: str, iteration: int, uids: pa.Array | None) -> Any:
        """A recorded batch, cut to the rows with certain uids; None when it is not recorded."""
        table = self._table(name, iteration)
        if table is None:
            return None
        # Cut before it becomes a payload: a batch of long responses is a thousand times what is shown.
        if uids is not None:
            table = table.filter(pc.is_in(table.column("uid"), value_set=uids))
        return from_arrow(table, name)

    def _table(self, name: str, iteration: int, columns: list[str] | None = None) -> pa.Table | None:
        file = self._folder / name / f"{iteration:06d}.parquet"
        if not file.exists():
            return None
        try:
            with pq.ParquetFile(file) as open_file:
                return open_file.read(columns=columns, use_threads=False)
        except pa.ArrowException as error:
            raise DataError(f"{file}: not a readable record; it is half-written or damaged. Remove it.") from error


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)"
