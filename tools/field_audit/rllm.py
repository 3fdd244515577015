"""rLLM: its estimators, which take a list of groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from .entry import Config, Function, Table
from .source import Source

ADV = "rllm.trainer.algorithms.advantage"
table = Table(
    "rllm",
    "rllm-org/rllm",
    left_out={
        "policy losses": "those of verl, Tinker or Fireworks; it has none of its own",
        "TinkerDataProcessor.compute_distill_advantages_per_token": "distillation without a reward",
    },
)
_OPTIONS = SimpleNamespace(norm_adv_by_std_in_grpo=True)


def _grouped(name: str, label: str = "", options: Any = _OPTIONS) -> None:
    @table.add(f"{ADV}:{name}", label=label)
    def make(found: Function) -> Function:
        def call(rewards: np.ndarray, groups: np.ndarray) -> Any:
            rows = [np.flatnonzero(groups == group) for group in dict.fromkeys(groups.tolist())]
            given = [rewards[i] for i in rows]
            out = np.zeros(len(rewards))
            for i, advantages in zip(rows, found(given, options)[0], strict=True):
                out[i] = advantages
            return out

        return call


_grouped("calculate_grpo_advantages")
_grouped("calculate_grpo_advantages", "without std", SimpleNamespace(norm_adv_by_std_in_grpo=False))
_grouped("calculate_rloo_advantages")
_grouped("calculate_reinforce_advantages")
_grouped("calculate_reinforce_plus_plus_baseline_advantages")
_grouped("calculate_prpo_advantages")


@table.add("rllm.experimental.fully_async.utils:compute_grpo_outcome_advantage", label="a row per trajectory")
def _async_grpo(found: Function) -> Function:
    def call(token_rewards: Tensor, mask: Tensor, index: np.ndarray, epsilon: float = 1e-6) -> Any:
        uuids = np.array([f"row {i}" for i in range(len(mask))])
        return found(token_rewards, mask.float(), uuids, index, epsilon)

    return call


@table.add("rllm.trainer.deprecated.tinker_data_processor:TinkerAdvantageComputer.compute_grpo_advantages")
def _tinker(found: Function, source: Source) -> Function:
    def call(rewards: np.ndarray, groups: np.ndarray) -> Any:
        out = np.zeros(len(rewards))
        for group in dict.fromkeys(groups.tolist()):
            rows = np.flatnonzero(groups == group)
            out[rows] = found(Config(), rewards[rows].tolist())
        return out

    return call

