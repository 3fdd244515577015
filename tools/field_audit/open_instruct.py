"""open-instruct: the advantages of its data loader, GAE, and the GRPO loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .entry import Function, Table, critic
from .source import Source

UTILS = "open_instruct.grpo_utils"
RL = "open_instruct.rl_utils"
table = Table("open_instruct", "allenai/open-instruct")


def _group(kind: str) -> None:
    place = "open_instruct.data_loader:DataPreparationActor"

    @table.add(f"{place}._data_preparation_loop", label=kind)
    def make(_: Function, source: Source) -> Function:
        lines = source.lines(place, "scores = np.array(batch.scores)", "advantage_normalization_type", "advantages")

        def call(rewards: np.ndarray, group_size: int) -> Any:
            config = SimpleNamespace(num_samples_per_prompt_rollout=group_size, advantage_normalization_type=kind)
            return lines(self=SimpleNamespace(config=config), batch=SimpleNamespace(scores=rewards.tolist()))

        return call


_group("standard")
_group("centered")


@table.add(f"{RL}:calculate_advantages")
def _gae(found: Function) -> Function:
    def call(
        token_rewards: Tensor, mask: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float
    ) -> Any:
        return found(critic(values, lengths).numpy(), token_rewards.numpy(), gamma, lam)[0] * mask.numpy()

    return call


@table.add(f"{RL}:calculate_advantages_packed")
def _packed(found: Function) -> Function:
    def call(
        token_rewards: Tensor, mask: Tensor, values: Tensor, lengths: Tensor, dones: Tensor, gamma: float, lam: float
    ) -> Any:
        given = [x.numpy() for x in (critic(values, lengths), token_rewards)]
        masks = [x.long().numpy() for x in (dones, mask)]
        return found(*given, gamma, lam, *masks)[0] * mask.numpy()

    return call


def _loss(kind: str, clip: bool, **settings: float) -> None:
    @table.add(f"{UTILS}:compute_grpo_loss", loss=True, label=kind, **settings)
    def make(found: Function, source: Source) -> Function:
        types = source.get(f"{UTILS}:GRPOLossType")
        mean = source.get(f"{RL}:masked_mean")

        def loss_of(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Any:
            config = SimpleNamespace(loss_fn=types(kind), clip_lower=low, clip_higher=high, kl_estimator=2)
            ratio = torch.exp(logprobs - old)  # as in grpo_fast
            tokens, _, _ = found(logprobs, ratio, advantages, None, config, torch.ones_like(ratio))
            return mean(tokens, mask, None, mask.sum())

        def clipped(
            logprobs: Tensor,
            old_logprobs: Tensor,
            advantages: Tensor,
            mask: Tensor,
            clip_lower: float,
            clip_higher: float,
        ) -> Any:
            return loss_of(logprobs, old_logprobs, advantages, mask, clip_lower, clip_higher)

        def bounded(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, high: float) -> Any:
            return loss_of(logprobs, old_logprobs, advantages, mask, 0.2, high)

        return clipped if clip else bounded


_loss("dapo", True, clip_lower=0.2, clip_higher=0.28)
_loss("cispo", False, high=0.28)
