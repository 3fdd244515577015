"""RLinf: its registered advantages and actor losses. Its tensors have time first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .entry import Function, Table, critic

ADV = "rlinf.algorithms.advantages"
LOSS = "rlinf.algorithms.losses"
table = Table(
    "rlinf",
    "RLinf/RLinf",
    left_out={"compute_grpo_dynamic_advantages": "judged with one turn per trajectory"},
)


def _grouped(name: str, label: str = "", **more: Any) -> None:
    @table.add(f"{ADV}:{name}", label=label)
    def make(found: Function) -> Function:
        def call(rewards: Tensor, mask: Tensor, group_size: int) -> Any:
            options = {k: v(rewards) if callable(v) else v for k, v in more.items()}
            shaped = rewards[None, :] if name == "compute_reinpp_advantages" else rewards  # as its preprocessing does
            return found(rewards=shaped, loss_mask=mask.T if name == "compute_reinpp_advantages" else mask.T.float(), group_size=group_size, **options)[0].T * mask

        return call


_grouped("compute_grpo_advantages")
_grouped(
    "compute_grpo_dynamic_advantages",
    "trajectory",
    advantage_mode="trajectory",
    idx_to_traj=lambda r: list(range(len(r))),
)
_grouped("compute_reinpp_advantages", "reinforce++")
_grouped("compute_reinpp_advantages", "reinforce++ baseline", use_reinpp_baseline=True)
_grouped("compute_raw_advantages")
_grouped("compute_raw_advantages", "normalized", normalize_advantages=True)


@table.add(f"{ADV}:compute_gae_advantages_and_returns", label="not normalized")
def _gae(found: Function) -> Function:
    def call(
        token_rewards: Tensor, mask: Tensor, values: Tensor, lengths: Tensor, gamma: float, gae_lambda: float
    ) -> Any:
        # Its episodes end where `dones` says; values have one more step.
        given = torch.nn.functional.pad(critic(values, lengths), (0, 1))
        ends = torch.arange(mask.shape[1] + 1) == lengths[:, None]
        advantages, _ = found(
            rewards=token_rewards.T,
            values=given.T,
            dones=ends.T,
            gamma=gamma,
            gae_lambda=gae_lambda,
            normalize_advantages=False,
        )
        return advantages.T * mask

    return call


def _loss(name: str, label: str = "", **more: Any) -> None:
    @table.add(f"{LOSS}:{name}", loss=True, label=label, clip_ratio_low=0.2, clip_ratio_high=0.28)
    def make(found: Function) -> Function:
        def call(
            logprobs: Tensor,
            old_logprobs: Tensor,
            advantages: Tensor,
            mask: Tensor,
            clip_ratio_low: float,
            clip_ratio_high: float,
        ) -> Any:
            return found(
                logprobs=logprobs.float(),
                old_logprobs=old_logprobs.float(),
                clip_ratio_low=clip_ratio_low,
                clip_ratio_high=clip_ratio_high,
                advantages=advantages.float(),
                loss_mask=mask,
                **more,
            )

        return call


_loss("compute_ppo_actor_loss")
_loss("compute_ppo_actor_loss", "dual clip 3", clip_ratio_c=3.0)
_loss("compute_decoupled_ppo_actor_loss")
