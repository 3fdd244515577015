"""TRL: the lines of its trainers that make advantages, and their losses with a stand-in for the trainer."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .entry import Function, Table, with_bounds, without_bounds
from .source import Source

GRPO = "trl.trainer.grpo_trainer:GRPOTrainer"
RLOO = "trl.trainer.rloo_trainer:RLOOTrainer"
table = Table(
    "trl",
    "huggingface/trl",
    left_out={
        "A2POTrainer.compute_loss": "a regression of log-ratios on rewards; it weighs no log-probs by advantages",
        "SDPOTrainer": "distillation from its own context; its policy term is GRPO's",
        "AsyncGRPOTrainer.compute_loss": "it takes packed rows of its own data collator and the model's fused head",
    },
)


def _advantages(label: str, **options: Any) -> None:
    @table.add(f"{GRPO}._generate_and_score_completions", label=label)
    def make(_: Function, source: Source) -> Function:
        lines = source.lines(
            f"{GRPO}._generate_and_score_completions", "unscorable_mask =", "torch.nan_to_num(advantages", "advantages"
        )

        def call(rewards: Tensor, group_size: int) -> Any:
            settings = {"multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group", **options}
            self = SimpleNamespace(reward_weights=torch.ones(1), reward_funcs=[None], **settings)
            return lines(self=self, rewards_per_func=rewards[:, None], num_generations=group_size, device="cpu")

        return call


_advantages("scale_rewards group")
_advantages("scale_rewards batch", scale_rewards="batch")
_advantages("scale_rewards none", scale_rewards="none")
_advantages("normalize_then_sum", multi_objective_aggregation="normalize_then_sum")


def _rloo(normalize: bool) -> None:
    @table.add(f"{RLOO}._generate_and_score_completions", label="normalize_advantages" if normalize else "")
    def make(_: Function, source: Source) -> Function:
        lines = source.lines(
            f"{RLOO}._generate_and_score_completions", "unscorable_mask =", "torch.nan_to_num(advantages", "advantages"
        )

        def call(rewards: Tensor, group_size: int) -> Any:
            self = SimpleNamespace(
                reward_weights=torch.ones(1), reward_clip_range=None, beta=0.0, normalize_advantages=normalize
            )
            return lines(self=self, rewards_per_func=rewards[:, None], num_generations=group_size, device="cpu")

        return call


_rloo(False)
_rloo(True)


_SCORE = "trl.experimental.async_grpo.async_rollout_worker:_AsyncRolloutLoop._score_group"


@table.add(_SCORE)
def _async(_: Function, source: Source) -> Function:
    lines = source.lines(_SCORE, "scored_mask =", "scored_mask.any()", "advantages")

    def call(rewards: np.ndarray, groups: np.ndarray) -> Any:
        out = np.zeros(len(rewards))
        for group in dict.fromkeys(groups.tolist()):
            out[groups == group] = lines(rewards=rewards[groups == group])
        return out

    return call


def _trainer(logprobs: Tensor, mask: Tensor, **options: Any) -> Any:
    """What `_compute_loss` reads of a trainer, for a model that gives these log-probs."""
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    accelerator.gather_for_metrics = accelerator.gather
    settings = {
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "importance_sampling_level": "token",
        "beta": 0.0,
        "loss_type": "grpo", "use_vllm": False, "model": SimpleNamespace(training=True), "epsilon_low": 0.2,
        "epsilon_high": 0.28, "current_gradient_accumulation_steps": 1, "max_completion_length": 8,
        "accelerator": accelerator, "aux_loss_enabled": False, "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)}, "vllm_importance_sampling_correction": False,
        "args": SimpleNamespace(
            delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
            vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0, steps_per_generation=1,
        ),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    }  # fmt: skip
    return SimpleNamespace(**settings | options)


def _loss(
    kind: str,
    label: str = "",
    clip: bool = True,
    place: str = GRPO,
    bounds: tuple[float, float] = (0.2, 0.28),
    **more: Any,
) -> None:
    names = dict(zip(("epsilon_low", "epsilon_high"), bounds, strict=True)) if clip else {}

    @table.add(f"{place}._compute_loss", loss=True, label=label or kind, **names)
    def make(found: Function, source: Source) -> Function:
        weights = source.get(f"{GRPO}.get_gamma_weights")

        def loss_of(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Any:
            empty = torch.zeros(len(mask), 0, dtype=torch.long)
            per_row = "rloo" in place or "gmpo" in place
            inputs = {
                "prompt_ids": empty,
                "prompt_mask": empty,
                "completion_ids": mask.long(),
                "completion_mask": mask.long(),
                "advantages": (advantages * mask).sum(1) / mask.sum(1).clamp(min=1) if per_row else advantages,
                "old_per_token_logps": old,
                "old_logps": (old * mask).sum(1),
                "num_items_in_batch": mask.sum(),
            }
            options = {"loss_type": kind, "epsilon_low": low, "epsilon_high": high, "get_gamma_weights": weights}
            return found(_trainer(logprobs, mask, **options | more), None, inputs)

        return with_bounds(loss_of) if clip else without_bounds(loss_of, 5.0 if kind == "cispo" else 0.28)


for _kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
    _loss(_kind)
for _kind in ("cispo", "sapo", "vespo"):
    _loss(_kind, clip=False)
_loss("grpo", "grpo, ratio of the sequence", importance_sampling_level="sequence")
_loss("luspo", "luspo, ratio of the sequence", importance_sampling_level="sequence")
_loss("rloo", clip=False, place=RLOO)  # its bounds are those of the whole sequence's ratio
_loss("gmpo", place="trl.experimental.gmpo.gmpo_trainer:GMPOTrainer", bounds=(0.4, 0.4))
