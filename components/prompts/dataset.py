"""`prompts.dataset`: problems from the embedded task, a local file or the Hugging Face hub, a batch per iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditgraph.components.data.card import LOADING_METRICS
from creditgraph.components.data.fit import chat_misfits, data_misfits
from creditgraph.components.data.loading import first_rows_lacking, load_data, make_prompts
from creditgraph.components.data.store import Row
from creditgraph.components.models.load import context_length, load_tokenizer
from creditgraph.pipeline.core.component import Component, Context, ModelSpec
from creditgraph.pipeline.core.errors import ConfigError, RunError, did_you_mean
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts
from creditgraph.pipeline.core.streams import Stream

MAX_BATCH = 65_536  # problems; a batch stays in memory with all of its rollouts


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Problems of this iteration."""

    batch: Prompts


class DatasetPrompts(Component):
    """Returns the next `batch` problems of a data section, in a keyed order that is reshuffled in every epoch.

    A batch may span two epochs, so every batch is full. The position in the data survives a restart. With several
    replicas each gets its share of the same batch, and prompt ids do not depend on the number of replicas. Rows that
    cannot be used (no answer, not UTF-8, wrong type, longer than the context) are skipped, counted and written to
    rejected.jsonl; data_card.json counts them by reason. Large sources are read once and kept in a file, so memory does
    not grow with them.
    """

    metrics = (
        Metric("epoch", "epochs", "passes over the data so far"),
        Metric("rows", "rows", "problems of the data section"),
        *LOADING_METRICS,
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Data section, batch size and order."""

        split: str = "train"
        """entry of the data section to draw from"""
        batch: int = 8
        """problems per iteration, over all replicas"""
        shuffle: bool = True
        """use a new keyed order in every epoch; off: the order of the source"""
        max_tokens: int = 4096
        """tokens of a prompt; longer ones are rejected and counted, and engines hold no longer rows than prompts of
        this length need"""

        def __post_init__(self) -> None:
            if not 1 <= self.batch <= MAX_BATCH:
                raise ValueError(f"expected batch of 1 to {MAX_BATCH:,} problems per iteration, got {self.batch}.")
            if self.max_tokens < 1:
                raise ValueError(f"expected max_tokens ≥ 1, got {self.max_tokens}.")

    config: Config

    @classmethod
    def misfits(cls, node: Any, graph: Any, model: ModelSpec, data: Mapping[str, dict[str, Any]]) -> list[str]:
        """What of data, verifier, samplers and model does not fit the problems that this node draws."""
        return data_misfits(node.config.split, node, graph, model, data) + chat_misfits(model)

    @classmethod
    def lacks(cls, node: Any, model: ModelSpec, data: Mapping[str, dict[str, Any]]) -> list[str]:
        """Its file, a column, or rows."""
        return first_rows_lacking(data[node.config.split], f"data.{node.config.split}")

    def setup(self, context: Context) -> None:
        """Reads and checks the whole source."""
        super().setup(context)
        config = self.config
        replicas = context.ranks.num_replicas
        if config.batch < replicas:
            raise ConfigError(
                f"node '{context.node}': expected at least one problem per replica, got batch {config.batch} for "
                f"{replicas} replicas. Raise batch (it is the number of all replicas together) or start fewer "
                "processes."
            )
        if config.split not in context.data:
            known = did_you_mean(config.split, context.data) or " The data section is empty."
            raise ConfigError(f"node '{context.node}': split '{config.split}' is not in the data section.{known}")
        self.tokenizer = load_tokenizer(context.model)
        self.rows = load_data(
            context.data[config.split],
            context,
            self.tokenizer,
            place=f"data.{config.split}",
            room=min(config.max_tokens + 1, context_length(context.model)),
            drop_duplicates=True,
        ).rows
        self._start_at(epoch=0, position=0)

    def run(self) -> Outputs:
        """Returns the next problems."""
        rows: list[Row] = []
        while len(rows) < self.config.batch:
            if self.position == len(self.rows):
                self._start_at(self.epoch + 1, position=0)
            taken = self._order[self.position : self.position + self.config.batch - len(rows)]
            rows += [self.rows[int(i)] for i in taken]
            self.position += len(taken)
        self.context.log(epoch=self.epoch + self.position / len(self.rows), rows=len(self.rows))
        # Ids are assigned for the whole batch, so they do not depend on the number of replicas.
        mine = self.context.ranks.share(len(rows))
        return Outputs(batch=make_prompts(rows[mine], self.tokenizer, self.context.common_uids(len(rows))[mine]))

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the data."""
        return {"epoch": self.epoch, "position": self.position, "rows": len(self.rows), "hash": self.rows.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the position of `state_dict`."""
        if int(state["rows"]) != len(self.rows):
            raise RunError(
                f"node '{self.context.node}': expected the checkpoint's data of {state['rows']} problems, got "
                f"{len(self.rows)}. Restore the data or start a new run."
            )
        if state["hash"] != self.rows.digest:
            raise RunError(
                f"node '{self.context.node}': expected the checkpoint's data, got other problems in the same number. "
                "Restore it (data_card.json in the run says where it came from) or start a new run."
            )
        self._start_at(int(state["epoch"]), int(state["position"]))

    def _start_at(self, epoch: int, position: int) -> None:
        self.epoch = epoch
        self.position = position
        self._order: NDArray[np.int64] = np.arange(len(self.rows))
        if self.config.shuffle:
            # Keyed by epoch and not by iteration, so that the order does not depend on the batch size.
            order = Stream(self.context.seed, self.context.node, "order").generator(epoch)
            self._order = order.permutation(len(self.rows))
