"""AReaL: the actor's advantages (normalised rewards, then GAE) and its losses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .entry import Config, Function, Table, critic, with_critic, without_critic
from .source import Source

ACTOR = "areal.trainer.ppo.actor:PPOActor"
LOSSES = "areal.utils.functional.functional"
table = Table("areal", "inclusionAI/AReaL")


def _advantages(label: str, gae: bool = False, norm: dict[str, Any] | None = None, kl_ctl: float = 0.0) -> None:
    @table.add(f"{ACTOR}._compute_advantages", label=label)
    def make(found: Function, source: Source) -> Function:
        normalization = source.get("areal.utils.data:Normalization")

        def advantages_of(
            rewards: Tensor, mask: Tensor, lengths: Tensor, group_size: int, values: Tensor, gamma: float, lam: float
        ) -> Any:
            options = {"mean_leave1out": False, "std_unbiased": True, "eps": 1e-5, "group_size": group_size}
            self = SimpleNamespace(
                config=Config(
                    overlong_reward_penalty=False, use_decoupled_loss=False, recompute_logprob=False, max_new_tokens=8
                ),
                reward_bias=0.0,
                reward_scaling=1.0,
                reward_clip=20.0,
                reward_norm=None if norm is None else normalization(Config(options | norm)),
                adv_norm=None,
                kl_ctl=kl_ctl,
                kl_estimator=lambda old, ref: old - ref,
                mask_no_eos_with_zero=False,
                discount=gamma,
                gae_lambda=lam,
            )
            # Two tokens of prompt, and one of padding: a row that fills the batch counts as cut off.
            whole = torch.nn.functional.pad(mask.float(), (2, 1))
            attention = torch.arange(whole.shape[1]) < (lengths + 2)[:, None]
            data = {
                "input_ids": torch.zeros(whole.shape, dtype=torch.long),
                "attention_mask": attention.long(),
                "loss_mask": whole,
                "logprobs": torch.full(whole.shape, -1.0),
                "rewards": rewards,
            }
            if gae:  # the value of a token's state is that of the token before
                data["values"] = torch.nn.functional.pad(critic(values, lengths), (1, 2), value=3.0)
            done = found(self, data)
            # advantages[t] belongs to token t + 1
            return done["advantages"][:, 1 : 1 + mask.shape[1]] * mask

        return with_critic(advantages_of) if gae else without_critic(advantages_of)


_advantages("GRPO: reward_norm by group", norm={"mean_level": "group", "std_level": "group"})
_advantages("RLOO: group mean without the row", norm={"mean_level": "group", "mean_leave1out": True, "std_level": None})
_advantages("Dr. GRPO: group mean", norm={"mean_level": "group", "std_level": None})
_advantages("group mean, std of the batch", norm={"mean_level": "group", "std_level": "batch"})
_advantages("Dr. GRPO, kl_ctl .1 and no model ref", norm={"mean_level": "group", "std_level": None}, kl_ctl=0.1)
_advantages("GAE", gae=True)


def _ppo(label: str, **more: Any) -> None:
    @table.add(f"{LOSSES}:ppo_actor_loss_fn", loss=True, label=label, eps_clip=0.2, eps_clip_higher=0.28)
    def make(found: Function) -> Function:
        def call(
            logprobs: Tensor,
            old_logprobs: Tensor,
            advantages: Tensor,
            mask: Tensor,
            eps_clip: float,
            eps_clip_higher: float,
        ) -> Any:
            return found(
                logprobs=logprobs,
                proximal_logprobs=old_logprobs,
                old_logprobs=old_logprobs,
                advantages=advantages,
                eps_clip=eps_clip,
                loss_mask=mask,
                eps_clip_higher=eps_clip_higher,
                **more,
            )

        return call


_ppo("token")
_ppo("dual clip 3", c_clip=3.0)
_ppo("sequence", importance_sampling_level="sequence")


def _sapo(level: str) -> None:
    @table.add(f"{LOSSES}:sapo_loss_fn", loss=True, label=level)
    def make(found: Function) -> Function:
        def call(
            logprobs: Tensor,
            old_logprobs: Tensor,
            advantages: Tensor,
            mask: Tensor,
            tau_pos: float = 1.0,
            tau_neg: float = 1.05,
        ) -> Any:
            return found(logprobs, old_logprobs, advantages, tau_pos, tau_neg, mask, importance_sampling_level=level)

        return call


_sapo("token")
_sapo("sequence")


@table.add("areal.trainer.ppo.actor:_apply_m2po_masking", loss=True, label="then ppo_actor_loss_fn")
def _m2po(found: Function, source: Source) -> Function:
    ppo = source.get(f"{LOSSES}:ppo_actor_loss_fn")

    def call(
        logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, m2_threshold: float = 0.04
    ) -> Any:
        kept = found(old_logprobs, logprobs.detach(), mask, m2_threshold)
        return ppo(logprobs, old_logprobs, old_logprobs, advantages, 0.2, kept)

    return call
