"""SkyRL: the estimators and policy losses of its registries, and the normalisation of its trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .entry import Config, Function, Table, critic

CORE = "skyrl.backends.skyrl_train.utils.ppo_utils"
table = Table(
    "skyrl", "NovaSky-AI/SkyRL", left_out={"cross_entropy_loss": "supervised fine-tuning; it ignores advantages"}
)
for _name in ("compute_grpo_outcome_advantage", "compute_rloo_outcome_advantage", "compute_maxrl_advantage"):

    def _direct(name: str) -> None:
        @table.add(f"{CORE}:{name}")
        def make(found: Function) -> Function:
            def call(token_rewards: Tensor, mask: Tensor, index: np.ndarray) -> Any:
                return found(token_rewards, mask.float(), index=index)

            return call

    _direct(_name)


@table.add(f"{CORE}:compute_reinforce_plus_plus_outcome_advantage")
def _reinforce_plus_plus(found: Function) -> Function:
    def call(token_rewards: Tensor, mask: Tensor) -> Any:
        return found(token_rewards, mask.float(), gamma=1.0)

    return call


def _gae(whitened: bool, label: str) -> None:
    @table.add(f"{CORE}:compute_gae_advantage_return", label=label)
    def make(found: Function) -> Function:
        def call(
            token_rewards: Tensor, mask: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float
        ) -> Any:
            given = critic(values, lengths)
            advantages, returns = found(token_rewards, given, mask.float(), gamma, lam)
            return advantages * mask if whitened else (returns - given) * mask

        return call


_gae(True, "whitened")
_gae(False, "returns − V")


@table.add("skyrl.train.trainer:RayPPOTrainer._normalize_advantages", label="advantage_batch_normalize, after GRPO")
def _normalize(found: Function, source: Any) -> Function:
    grpo = source.get(f"{CORE}:compute_grpo_outcome_advantage")

    def call(token_rewards: Tensor, mask: Tensor, index: np.ndarray) -> Any:
        class Data(dict):  # type: ignore[type-arg]
            def __getitem__(self, key: Any) -> Any:
                if isinstance(key, slice):
                    return Data({name: value[key] for name, value in self.items()})
                return super().__getitem__(key)

        advantages, _ = grpo(token_rewards, mask.float(), index=index)
        data = Data(advantages=advantages, response_mask=mask.float(), loss_mask=mask.float())
        algorithm = Config(advantage_batch_normalize=True, loss_reduction="token_mean", max_seq_len=8)
        config = Config(trainer=Config(algorithm=algorithm, micro_train_batch_size_per_gpu=1))
        done = found(SimpleNamespace(cfg=config), data, [(0, len(mask))])
        # The loss is a sum, so the division by tokens is undone to compare advantages.
        return done["advantages"] * mask.sum() * mask

    return call


_OFF_POLICY = Config(
    tis_ratio_type=None, token_mask_is_threshold_low=None, token_mask_is_threshold_high=None, sequence_mask_metric=None,
    outlier_token_is_threshold_low=None, outlier_token_is_threshold_high=None,
)  # fmt: skip


def _options(**more: Any) -> Config:
    return Config(
        policy_loss_type="regular",
        loss_reduction="sequence_mean",
        eps_clip_low=0.2,
        eps_clip_high=0.28,
        clip_ratio_c=3.0,
        off_policy_correction=_OFF_POLICY,
        sapo=Config(tau_pos=1.0, tau_neg=1.05),
        cispo=Config(cispo_anchor="old", cispo_eps_clip_low=0.2, cispo_eps_clip_high=0.28),
        clip_cov=Config(clip_ratio=0.0002, clip_cov_lb=1.0, clip_cov_ub=5.0),
        kl_cov=Config(kl_cov_frac=0.2, ppo_kl_coef=1.0),
        dppo=Config(dppo_type="binary_tv", delta_low=0.2, delta_high=0.2),
    ) | more


def _clipped(name: str, label: str = "", low: float = 0.2, high: float = 0.28, **more: Any) -> None:
    @table.add(f"{CORE}:{name}", loss=True, label=label, eps_clip_low=low, eps_clip_high=high)
    def make(found: Function) -> Function:
        def call(
            logprobs: Tensor,
            old_logprobs: Tensor,
            advantages: Tensor,
            mask: Tensor,
            eps_clip_low: float,
            eps_clip_high: float,
        ) -> Any:
            config = Config(_options(eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high, **more))
            return found(logprobs, old_logprobs, advantages, config, loss_mask=mask.to(logprobs))

        return call


_clipped("ppo_policy_loss", "regular")
_clipped("ppo_policy_loss", "dual_clip", policy_loss_type="dual_clip")
_clipped("gspo_policy_loss")
_clipped("compute_policy_loss_clip_cov")


def _plain(name: str, label: str = "", rollout: bool = False, **more: Any) -> None:
    @table.add(f"{CORE}:{name}", loss=True, label=label)
    def make(found: Function) -> Function:
        def call(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Any:
            given = {"rollout_logprobs": old_logprobs} if rollout else {}
            config = Config(_options(**more))
            return found(logprobs, old_logprobs, advantages, config, loss_mask=mask.to(logprobs), **given)

        return call


_plain("sapo_policy_loss")
_plain("compute_policy_loss_cispo")
_plain("rollout_is_policy_loss", rollout=True)
_plain("dppo_policy_loss", "binary_tv")
_plain("dppo_policy_loss", "binary_kl", dppo=Config(dppo_type="binary_kl", delta_low=0.05, delta_high=0.05))
_plain("compute_policy_loss_kl_cov")
_plain("importance_sampling_loss")
