"""PipelineRL: advantages of its preprocessor and the loss of its RL step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .entry import Function, Table
from .source import Source

RL = "pipelinerl.finetune.rl"
table = Table(
    "pipelinerl", "ServiceNow/PipelineRL", left_out={"rl_step (gspo)": "it takes packed sequences of its own collator"}
)


def _advantages(std: bool) -> None:
    @table.add(f"{RL}:populate_rl_data", label="divided by std" if std else "without std")
    def make(found: Function, source: Source) -> Function:
        def call(rewards: list[float], groups: list[int], lengths: list[int]) -> Any:
            rows = [
                {
                    "group_id": group,
                    "rollout_index": i,
                    "step_index": 0,
                    "rewards": [reward] * length,
                    "input_ids": [1] * length,
                    "labels": [1] * length,
                    "overflow": [0.0] * length,
                    "advantages": [0.0] * length,
                    "group_tokens": [0.0] * length,
                    "finished": True,
                }
                for i, (reward, group, length) in enumerate(zip(rewards, groups, lengths, strict=True))
            ]
            done = found(rows, 1, SimpleNamespace(divide_advantage_by_std=std))
            return [row["advantages"][0] for row in done]

        return call


_advantages(True)
_advantages(False)


def _loss(kind: str, clip: bool, label: str = "", **more: Any) -> None:
    names = {"epsilon_low": 0.2, "epsilon_high": 0.28} if clip else {"high": 0.28}

    @table.add(f"{RL}:rl_step", loss=True, label=label or kind, **names)
    def make(found: Function, source: Source) -> Function:
        config_of = source.get(f"{RL}:RLConfig")

        def loss_of(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Any:
            # Two possible tokens, 0 and 1; the model's logits give token 1 the wanted log-prob.
            rest = torch.log1p(-logprobs.exp().clamp(max=1 - 1e-7))
            logits = torch.nn.functional.pad(torch.stack([rest, logprobs], -1), (0, 0, 0, 1))

            def wide(x: Tensor) -> Tensor:
                return torch.nn.functional.pad(x, (1, 0))

            labels = torch.where(wide(mask), 1, -100)
            tokens = mask.sum(1, keepdim=True).expand(mask.shape)
            batch = SimpleNamespace(
                input_ids=torch.ones(labels.shape, dtype=torch.long),
                attention_mask=torch.ones_like(labels),
                labels=labels,
                is_packed=False,
                rewards=wide(advantages),
                advantages=wide(advantages),
                ref_logprobs=wide(old),
                old_logprobs=wide(old),
                group_tokens=wide(tokens.to(old)) + 1.0,
                num_labels=wide(tokens.to(old)).clamp(min=1),
                overflow=torch.zeros(labels.shape),
                sentinel=False,
            )
            options = {"kl_coef": 0.0, "final_kl_coef": 0.0, "batch_size": len(mask), **more}
            config = config_of(policy_loss=kind, epsilon_low=low, epsilon_high=high, **options)

            class Model:
                def __call__(self, **_: Any) -> Any:
                    return SimpleNamespace(logits=logits)

            return found(Model(), batch, 0, 1, config)[0]

        def clipped(
            logprobs: Tensor,
            old_logprobs: Tensor,
            advantages: Tensor,
            mask: Tensor,
            epsilon_low: float,
            epsilon_high: float,
        ) -> Any:
            return loss_of(logprobs, old_logprobs, advantages, mask, epsilon_low, epsilon_high)

        def bounded(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, high: float) -> Any:
            return loss_of(logprobs, old_logprobs, advantages, mask, 0.2, high)

        return clipped if clip else bounded


_loss("ppo", True)
_loss("reinforce", False)
