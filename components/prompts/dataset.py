"""`prompts.dataset`: problems from the embedded task, a local file or the Hugging Face hub, a batch per iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.models.load import load_tokenizer
from components.prompts.loading import LongPrompts, load_problems, load_rows
from components.prompts.store import Row
from pipeline.core.component import Component, Context
from pipeline.core.errors import ConfigError, RunError, did_you_mean
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Prompts
from pipeline.core.streams import Stream

__all__ = ["DatasetPrompts", "Outputs", "load_rows", "make_prompts"]


LOADING_METRICS = (
    Metric("rejected", "rows", "rows of the data section that could not be used, told once when it is read"),
    Metric(
        "duplicates",
        "rows",
        "rows of the data section left out as their question was met before, told once when it is read",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Problems of this iteration."""

    batch: Prompts


class DatasetPrompts(Component):
    """The next `batch` problems of a data section, in an order shuffled anew, by key, in every epoch.

    A batch may span two epochs, so every batch is full. The place in the data survives a restart. With several replicas
    each takes its share of the same batch, prompts having the same ids whatever the number of replicas. Rows that
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
        """What to read and how much of it."""

        split: str = "train"
        """entry of the data section to draw from"""
        batch: int = 8
        """problems per iteration, of all replicas together"""
        shuffle: bool = True
        """a new keyed order in every epoch; off: the order of the source"""
        drop_duplicates: bool = True
        """keep only the first of several rows whose question is the same but for white space and case"""
        reserve: int = 0
        """tokens of the context kept free for the response"""
        long_prompts: LongPrompts = "reject"
        """reject: prompts that do not fit the context are skipped; cut: the beginning of their question is left out"""

        def __post_init__(self) -> None:
            if self.batch < 1:
                raise ValueError(f"batch: found {self.batch}; wanted at least 1 problem per iteration.")
            if self.reserve < 0:
                raise ValueError(f"reserve: found {self.reserve}; wanted 0 or more tokens.")

    config: Config

    def setup(self, context: Context) -> None:
        """Reads and checks the whole source."""
        super().setup(context)
        if self.config.batch < context.ranks.num_replicas:
            count = context.ranks.num_replicas
            raise ConfigError(
                f"node '{context.node}': batch is {self.config.batch}, but there are {count} replicas; wanted at least "
                "a problem per "
                "replica. Raise batch (it is the number of all replicas together) or start fewer processes."
            )
        if self.config.split not in context.data:
            known = did_you_mean(self.config.split, context.data) or " The data section is empty."
            raise ConfigError(f"node '{context.node}': split '{self.config.split}' is not in the data section.{known}")
        self.tokenizer = load_tokenizer(context.model)
        entry = context.data[self.config.split]
        self.rows = load_problems(
            entry,
            context,
            self.tokenizer,
            place=f"data.{self.config.split}",
            reserve=self.config.reserve,
            drop_duplicates=self.config.drop_duplicates,
            long_prompts=self.config.long_prompts,
        ).rows
        self.epoch, self.position = 0, 0
        self._order = self._order_of(0)

    def run(self) -> Outputs:
        """Takes the next problems."""
        chosen: list[Row] = []
        while len(chosen) < self.config.batch:
            if self.position == len(self.rows):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
            taken = self._order[self.position : self.position + self.config.batch - len(chosen)]
            chosen += [self.rows[int(i)] for i in taken]
            self.position += len(taken)
        self.context.log(epoch=self.epoch + self.position / len(self.rows), rows=len(self.rows))
        mine = self.context.ranks.share(len(chosen))
        return Outputs(batch=make_prompts(chosen[mine], self.tokenizer, self.context.common_uids(len(chosen))[mine]))

    def state_dict(self) -> dict[str, Any]:
        """The place in the data."""
        return {"epoch": self.epoch, "position": self.position, "rows": len(self.rows), "hash": self.rows.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken."""
        if int(state["rows"]) != len(self.rows):
            raise RunError(
                f"node '{self.context.node}': the checkpoint was made with {state['rows']} problems, the data now has "
                f"{len(self.rows)}; "
                "wanted the same data. Restore it or start a new run."
            )
        if state.get("hash", self.rows.digest) != self.rows.digest:
            raise RunError(
                f"node '{self.context.node}': the data has as many problems as when the checkpoint was made, but not "
                "the same ones; "
                "wanted the same data. Restore it (data_card.json in the run says where it came from) or start a new "
                "run."
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self.epoch)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if not self.config.shuffle:
            return np.arange(len(self.rows))
        return Stream(self.context.seed, self.context.node, "order").generator(epoch).permutation(len(self.rows))


def make_prompts(rows: Sequence[Row], tokenizer: Any, uids: Tensor) -> Prompts:
    """Rows as a batch, with these uids (int64, one per row)."""
    tokens = [tokenizer(row.text, add_special_tokens=False)["input_ids"] for row in rows]
    return Prompts(
        uid=uids,
        tokens=Jagged.from_rows(tokens, torch.int32),
        text=[row.text for row in rows],
        answer=[row.answer for row in rows],
        metadata=[row.metadata for row in rows],
    )
