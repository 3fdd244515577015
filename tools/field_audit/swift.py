"""ms-swift: its advantages, and the GRPO trainer's loss with a stand-in for the trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .entry import Function, Table, with_bounds, without_bounds
from .source import Source

ADV = "swift.rl_core.advantage"
table = Table(
    "swift",
    "modelscope/ms-swift",
    left_out={
        "GRPOTrainer (real)": "a classification of positive against negative rows of whole groups",
        "GRPOTrainer (fipo)": "its weights look ahead over the KL of the row; no check knows what is right",
    },
)


def _advantages(estimator: str, scale: str) -> None:
    @table.add(f"{ADV}:compute_advantages", label=f"{estimator}, {scale}")
    def make(found: Function, source: Source) -> Function:
        found.__globals__["nanstd"] = source.get("swift.utils.torch_utils:nanstd")  # its package loads lazily

        def call(rewards: Tensor, group_size: int) -> Any:
            return found(rewards[:, None], torch.ones(1), group_size, estimator, scale)

        return call


for _estimator, _scale in (
    ("grpo", "group"), ("grpo", "batch"), ("grpo", "none"), ("grpo", "gdpo"), ("rloo", "none"), ("rloo", "group"),
    ("reinforce_plus_plus", "batch"),
):  # fmt: skip
    _advantages(_estimator, _scale)


def _dynamic(estimator: str, scale: str) -> None:
    @table.add(f"{ADV}:compute_advantages_dynamic", label=f"{estimator}, {scale}")
    def make(found: Function) -> Function:
        def call(rewards: Tensor, groups: Tensor) -> Any:
            prompts, requests = [str(g) for g in groups.tolist()], [str(i) for i in range(len(rewards))]
            return found(rewards[:, None], torch.ones(1), prompts, requests, estimator, scale)

        return call


for _estimator, _scale in (("grpo", "group"), ("grpo", "batch"), ("rloo", "none"), ("reinforce_plus_plus", "batch")):
    _dynamic(_estimator, _scale)


def _loss(kind: str, level: str = "token", clip: bool = True, label: str = "", **more: Any) -> None:
    names = {"epsilon_low": 0.2, "epsilon_high": 0.28} if clip else {}

    @table.add(
        "swift.rlhf_trainers.grpo_trainer:GRPOTrainer._compute_loss_and_metrics",
        loss=True,
        label=label or kind,
        **names,
    )
    def make(found: Function) -> Function:
        def loss_of(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Any:
            options = {
                "model": SimpleNamespace(training=True), "compute_entropy": False, "overlong_filter": False,
                "beta": 0.0, "kl_in_reward": False, "rollout_importance_sampling_mode": None, "_has_teacher": False,
                "log_rollout_offpolicy_metrics": False, "importance_sampling_level": level, "loss_type": kind,
                "epsilon_low": low, "epsilon_high": high, "off_policy_sequence_mask_delta": None, "tau_pos": 1.0,
                "tau_neg": 1.05, "sdar_loss_coef": 0.0, "max_completion_length": 8, "real_tau": 1.0,
                "args": SimpleNamespace(delta=None, log_entropy=False, top_entropy_quantile=1.0),
                "accelerator": SimpleNamespace(num_processes=1, gather_for_metrics=lambda x: x, gather=lambda x: x),
                "num_generations": 3, "disable_rollout_importance_sampling": True, "use_gym_env": False,
                "chord_sft_iterator": None,
                "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, None),
                "_undo_gradient_accumulation_scaling": lambda loss: loss,
            }  # fmt: skip
            rows = SimpleNamespace(
                completion_mask=mask,
                truncated_mask=torch.zeros(len(mask), dtype=torch.bool),
                advantages=advantages,
                old_per_token_logps=old,
                rollout_per_token_logps=None,
                ref_per_token_logps=None,
                teacher_per_token_logps=None,
                num_items_in_batch=mask.sum(),
            )
            return _first_loss(found, SimpleNamespace(**options | more), rows)

        return with_bounds(loss_of) if clip else without_bounds(loss_of)


def _first_loss(found: Function, trainer: Any, rows: Any) -> Any:
    found.__globals__["gather_object"] = lambda values: values  # one process
    found.__globals__["gather"] = lambda values: values
    for name in ("nanmin", "nanmax"):
        found.__globals__[name] = lambda x: x.min()  # of metrics only
    return found(trainer, None, {}, rows)[0]


for _kind in ("grpo", "bnpo", "dr_grpo", "dapo"):
    _loss(_kind)
_loss("grpo", "sequence", label="grpo, ratio of the sequence")
_loss("grpo", "sequence_token", label="grpo, ratio of the sequence per token")
_loss("sapo", clip=False)
_loss("cispo", clip=False)
