"""Held-out problems: loading them, and when they are due."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from creditgraph.components.data.fit import data_misfits
from creditgraph.components.data.loading import first_rows_lacking, load_data, make_prompts
from creditgraph.components.models.load import load_tokenizer
from creditgraph.components.rollouts.requests import SamplingSettings
from creditgraph.pipeline.core.component import Component, Context, ModelSpec
from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.core.payloads import Prompts
from creditgraph.pipeline.core.streams import Stream

# Iteration part of uids, larger than any training iteration, so that held-out prompts never share an id with training
# prompts.
_HELD_OUT = (1 << 24) - 1


@dataclass(frozen=True, kw_only=True)
class HeldOutSettings(SamplingSettings):
    """Which problems are held out, and when they are evaluated."""

    split: str = "eval"
    """entry of the data section that holds the problems"""
    every: int = 10
    """iterations between evaluations; 0 evaluates only before and after training"""
    num_problems: int = 200
    """number of problems from the start of the held-out data; 0 uses all"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.every, self.num_problems) < 0:
            raise ValueError(f"expected every and num_problems ≥ 0, got {self.every} and {self.num_problems}.")


class HeldOut(Component):
    """Base of evaluators on held-out problems.

    Attributes:
        prompts: this replica's problems.
        count: number of problems of all replicas.
    """

    final_pass: ClassVar[bool] = True
    prompts: Prompts
    count: int

    @classmethod
    def misfits(cls, node: Any, graph: Any, model: ModelSpec, data: Mapping[str, dict[str, Any]]) -> list[str]:
        """What of data, verifier, mode and model does not fit the held-out problems."""
        return data_misfits(node.config.split, node, graph, model, data)

    @classmethod
    def lacks(cls, node: Any, model: ModelSpec, data: Mapping[str, dict[str, Any]]) -> list[str]:
        """Its file, a column, or rows."""
        return first_rows_lacking(data[node.config.split], f"data.{node.config.split}")

    def setup(self, context: Context) -> None:
        """Loads the held-out problems."""
        super().setup(context)
        split = self.config.split
        if split not in context.data:
            known = did_you_mean(split, context.data)
            raise ConfigError(
                f"node '{context.node}': expected held-out problems in data.{split}, but the configuration has no such "
                f"section.{known} Add it or remove the node."
            )
        tokenizer = load_tokenizer(context.model)
        loaded = load_data(context.data[split], context, tokenizer, place=f"data.{split}")
        rows = loaded.rows[: self.config.num_problems or None]
        first = (_HELD_OUT << 39) | (context.node_index << 32)
        self.count = len(rows)
        # Ids are those of all problems, so that every number of replicas draws the same samples.
        mine = context.ranks.share(len(rows))
        self.prompts = make_prompts(rows[mine], tokenizer, torch.arange(first, first + len(rows))[mine])

    def due(self) -> bool:
        """Whether this iteration evaluates."""
        iteration = self.context.iteration
        every = self.config.every
        return iteration == 0 or iteration >= self.context.iterations or (every > 0 and iteration % every == 0)

    def stream(self) -> Stream:
        """Random numbers that are the same at every evaluation."""
        return Stream(self.context.seed, self.context.node, "evaluation")
