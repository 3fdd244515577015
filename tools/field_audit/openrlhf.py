"""OpenRLHF: the estimators of its experience maker and its policy loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .entry import Config, Function, Table, critic
from .source import Source

table = Table("openrlhf", "OpenRLHF/OpenRLHF")
MAKER = "openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker"
LOSS = "openrlhf.models.loss:PolicyLoss"


def _experience(estimator: str) -> None:
    @table.add(f"{MAKER}.compute_advantages_and_returns", label=estimator)
    def make(found: Function, source: Source) -> Function:
        maker = source.get(MAKER)

        def advantages_of(rewards: Tensor, mask: Tensor, group_size: int, values: Any, gamma: float, lam: float) -> Any:
            algo = Config(advantage=Config(estimator=estimator, gamma=gamma, lambd=lam, no_std_norm=False))
            reward = Config(clip_range=None, overlong=Config(buffer_len=None, penalty_factor=None))
            reward |= {"overlong_buffer_len": None, "stop_properly_penalty_coef": None}
            args = Config(algo=algo, rollout=Config(n_samples_per_prompt=group_size), reward=Config(reward))
            self = SimpleNamespace(
                strategy=SimpleNamespace(args=args),
                kl_ctl=SimpleNamespace(value=0.0),
                advantage_estimator=estimator,
                get_advantages_and_returns=lambda *a: maker.get_advantages_and_returns(None, *a),
                get_cumulative_returns=lambda *a: maker.get_cumulative_returns(None, *a),
            )
            experience = SimpleNamespace(
                index=list(range(len(rewards))),
                rewards=rewards,
                kl=torch.zeros(mask.shape),
                action_mask=mask.long(),
                values=values,
                info={},
                advantages=None,
                returns=None,
            )
            return found(self, [experience])[0].advantages * mask

        def plain(rewards: Tensor, mask: Tensor, group_size: int) -> Any:
            return advantages_of(rewards, mask, group_size, None, 1.0, 1.0)

        def of_critic(
            rewards: Tensor, mask: Tensor, group_size: int, values: Tensor, lengths: Tensor, gamma: float, lam: float
        ) -> Any:
            return advantages_of(rewards, mask, group_size, critic(values, lengths), gamma, lam)

        return of_critic if estimator == "gae" else plain


for _estimator in ("reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "gae"):
    _experience(_estimator)


@table.add(f"{MAKER}.get_advantages_and_returns")
def _gae(found: Function) -> Function:
    def call(token_rewards: Tensor, mask: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float) -> Any:
        return found(None, critic(values, lengths), token_rewards, mask.long(), gamma, lam)[0] * mask

    return call


def _loss(label: str, **options: Any) -> None:
    @table.add(LOSS, loss=True, label=label, clip_eps_low=0.2, clip_eps_high=0.28)
    def make(found: Function) -> Function:
        def call(
            logprobs: Tensor,
            old_logprobs: Tensor,
            advantages: Tensor,
            mask: Tensor,
            clip_eps_low: float,
            clip_eps_high: float,
        ) -> Any:
            loss = found(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, **options)
            return loss(logprobs, old_logprobs, advantages, action_mask=mask.long(), rollout_log_probs=old_logprobs)[0]

        return call


_loss("ppo")
_loss("ppo, mean per row", token_level_loss=False)
_loss("ppo, dual clip 3", dual_clip=3.0)
_loss("gspo", policy_loss_type="gspo")
for _level, _mode in (("token", "clip"), ("token", "mask"), ("seq", "mask")):
    _loss(f"ppo, correction of {_level} by {_mode}", is_correction_level=_level, is_correction_mode=_mode)
for _gating in ("binary_kl", "tv"):
    _loss(
        f"ppo, correction of token by {_gating}",
        is_correction_level="token",
        is_correction_gating=_gating,
        is_correction_threshold=[0.0, 0.2],
    )
