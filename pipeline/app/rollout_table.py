"""A bounded table of the rollouts of one iteration, for sinks that show tables.

It is made from the run's records, of which only the rows to show are converted to tensors and texts.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from creditgraph.pipeline.app.text import cut
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.payloads import Batch, Credit, Prompts, Rewards, Trajectories
from creditgraph.pipeline.run.metrics import TableSettings
from creditgraph.pipeline.run.packing import is_recorded
from creditgraph.pipeline.run.recorder import RecordSettings
from creditgraph.pipeline.run.recording import from_arrow, read_table

logger = logging.getLogger("creditgraph")

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
        path: path of the run directory.
        graph: graph of the run.
        settings: settings of the tables.
        record: settings of the records.
    """

    def __init__(self, path: Path, graph: Graph, settings: TableSettings, record: RecordSettings) -> None:
        self._folder = path / "record"
        self._graph = graph
        self._settings = settings
        self._record = record
        self._waiting: list[int] = []

    def add(self, iteration: int) -> None:
        """Notes an iteration whose table, when it is due, waits for its records."""
        if self.due(iteration):
            self._waiting.append(iteration)

    def take(self) -> list[list[Any]]:
        """Rows of all tables that wait; their records are written when a sink is synced or closed."""
        rows = []
        for iteration in self._waiting:
            # A table must not end a run, so one that cannot be read is logged and left out.
            try:
                rows += self.rows(iteration)
            except (OSError, ValueError, KeyError, TypeError) as error:
                reason = str(error).partition("\n")[0]
                logger.warning("the table of rollouts of iteration %d is left out: %s", iteration, reason)
        self._waiting = []
        return rows

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
        rewards = self._by_uid(Rewards, iteration, uids)
        credit = self._by_uid(Credit, iteration, uids)
        prompts = self._by_uid(Prompts, iteration)
        rows: dict[int, list[Any]] = {}
        # In the order of the graph, so that a rollout is listed under the node that sampled it, not a later one.
        for name in self._outputs(Trajectories):
            batch: Trajectories | None = self._read(name, iteration, uids)
            if batch is None:
                continue
            for i, uid in enumerate(batch.uid.tolist()):
                if uid in rows:
                    continue
                prompt, p = prompts.get(int(batch.prompt_uid[i]), (None, 0))
                reward, r = rewards.get(uid, (None, 0))
                credited, c = credit.get(uid, (None, 0))
                verdict = ("yes" if reward.correct[r] else "no") if reward and reward.valid[r] else "no verdict"
                rows[uid] = [
                    iteration,
                    name.partition(".")[0],
                    cut(prompt.text[p], LONGEST) if prompt else "",
                    cut(batch.text[i], LONGEST),
                    prompt.answer[p] if prompt else "",
                    float(reward.value[r]) if reward else math.nan,
                    verdict,
                    len(batch.response_tokens.row(i)),
                    float(credited.advantage.row(c)[credited.mask.row(c)].mean()) if credited else math.nan,
                    batch.finish_reason[i],
                    cut(reward.detail[r], LONGEST) if reward else "",
                    str(uid),
                ]
        return list(rows.values())

    def _chosen(self, iteration: int) -> pa.Array:
        """Uids of the rollouts to show, evenly spaced over those that the learner reads, else over all."""
        trained = [f"{w.source}.{w.output}" for node in self._graph.learners for w in node.wires["trajectories"]]
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

    def _by_uid(self, kind: type[Batch], iteration: int, uids: pa.Array | None = None) -> dict[int, tuple[Any, int]]:
        """uid → (batch, row) over all outputs of a class; of several credits the learner's, which comes last."""
        learned = [f"{w.source}.{w.output}" for node in self._graph.learners for w in node.wires["credit"]]
        rows: dict[int, tuple[Any, int]] = {}
        for name in sorted(self._outputs(kind), key=learned.__contains__):
            batch = self._read(name, iteration, uids)
            if batch is not None:
                rows |= {uid: (batch, i) for i, uid in enumerate(batch.uid.tolist())}
        return rows

    def _outputs(self, kind: type[Batch]) -> list[str]:
        return [str(wire) for wire in self._graph.outputs_of(kind)]

    def _read(self, name: str, iteration: int, uids: pa.Array | None) -> Any:
        """A recorded batch, cut to the rows with certain uids; None when it is not recorded."""
        table = self._table(name, iteration)
        if table is None:
            return None
        # Filtered before the conversion to a payload: a batch of long responses is a thousand times larger.
        if uids is not None:
            table = table.filter(pc.is_in(table.column("uid"), value_set=uids))
        return from_arrow(table, name)

    def _table(self, name: str, iteration: int, columns: list[str] | None = None) -> pa.Table | None:
        file = self._folder / name / f"{iteration:06d}.parquet"
        if not is_recorded(file):
            return None
        try:
            return read_table(file, columns)
        except pa.ArrowException as error:
            raise DataError(f"{file}: not a readable record; it is half-written or damaged. Remove it.") from error
