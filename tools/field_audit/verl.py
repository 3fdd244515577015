"""verl: the estimators and policy losses that its two registries name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .entry import Config, Function, Table, critic

CORE = "verl.trainer.ppo.core_algos"
table = Table(
    "verl",
    "verl-project/verl",
    left_out={
        "compute_optimal_token_baseline_advantage, tir": "judged with Σπ² = π² of the sampled token, since the audit has "
        "no distribution over the vocabulary",
        "compute_pf_ppo_reweight_data": "resamples whole batches at random; it gives no advantage",
    },
)
_OPTIONS = Config(
    gamma=1.0, norm_adv_by_std_in_grpo=True, adv_estimator="grpo", use_kl_in_reward=False, lam=1.0
)  # fmt: skip


def _outcome(name: str, label: str = "", **settings: Any) -> None:
    @table.add(f"{CORE}:{name}", label=label, **settings)
    def make(found: Function) -> Function:
        def call(
            token_rewards: Tensor, mask: Tensor, index: np.ndarray, epsilon: float = 1e-6
        ) -> Any:
            return found(token_rewards, mask.float(), index=index, epsilon=epsilon, config=_OPTIONS)

        return call


for _name in (
    "compute_grpo_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_gdpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
):
    _outcome(_name)


def _without_epsilon(name: str) -> None:
    @table.add(f"{CORE}:{name}")
    def make(found: Function) -> Function:
        def call(token_rewards: Tensor, mask: Tensor, index: np.ndarray) -> Any:
            return found(token_rewards, mask.float(), index=index, config=_OPTIONS)

        return call


for _name in (
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_gpg_outcome_advantage",
):
    _without_epsilon(_name)


@table.add(f"{CORE}:compute_reinforce_plus_plus_outcome_advantage")
def _reinforce_plus_plus(found: Function) -> Function:
    def call(token_rewards: Tensor, mask: Tensor) -> Any:
        return found(token_rewards, mask.float(), config=_OPTIONS)

    return call


@table.add(f"{CORE}:compute_remax_outcome_advantage", label="times mask")
def _remax(found: Function) -> Function:
    def call(token_rewards: Tensor, mask: Tensor, baselines: Tensor) -> Any:
        return found(token_rewards, baselines, mask.float(), config=_OPTIONS)[0] * mask

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


def _token_baseline(name: str) -> None:
    @table.add(f"{CORE}:{name}")
    def make(found: Function) -> Function:
        def call(token_rewards: Tensor, mask: Tensor, index: np.ndarray, handle_zero_tail: bool = True) -> Any:
            logprobs = torch.full(mask.shape, -0.7)
            squares = logprobs.exp() ** 2
            return found(token_rewards, mask.float(), index, logprobs, squares, handle_zero_tail=handle_zero_tail)

        return call


_token_baseline("compute_optimal_token_baseline_advantage")
_token_baseline("compute_multi_turn_optimal_token_baseline_advantage")


def _actor(low: float, high: float, dual: float) -> Any:
    """verl's own configuration of an actor."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    return ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        use_dynamic_bsz=True,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
        policy_loss=PolicyLossConfig(dro_beta=0.1),
    )


def _loss(name: str, aggregate: str = "token-mean", label: str = "", low: float = 0.2, high: float = 0.28) -> None:
    @table.add(f"{CORE}:{name}", loss=True, label=label, clip_low=low, clip_high=high)
    def make(found: Function) -> Function:
        def call(
            old_logprobs: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
        ) -> Any:
            config = _actor(clip_low, clip_high, 3.0)
            return found(
                old_logprobs, logprobs, advantages, mask.to(logprobs), loss_agg_mode=aggregate, config=config
            )

        return call


for _mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
    _loss("compute_policy_loss_vanilla", _mode, label=_mode)
_loss("compute_policy_loss_gspo", "seq-mean-token-mean", low=0.0003, high=0.0004)
_loss("compute_policy_loss_clip_cov")


def _bounded(name: str) -> None:
    """Bounds of a probability, a log ratio, or a weight whose gradient is stopped: no clip of the ratio."""

    @table.add(f"{CORE}:{name}", loss=True, low=0.2, high=0.28)
    def make(found: Function) -> Function:
        def call(
            old_logprobs: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float
        ) -> Any:
            return found(old_logprobs, logprobs, advantages, mask.to(logprobs), config=_actor(low, high, 20.0))

        return call


for _name in ("geo_mean", "dppo_tv", "dppo_kl", "cispo"):
    _bounded(f"compute_policy_loss_{_name}")


def _without_clip(name: str) -> None:
    @table.add(f"{CORE}:{name}", loss=True)
    def make(found: Function) -> Function:
        def call(old_logprobs: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Any:
            return found(old_logprobs, logprobs, advantages, mask.to(logprobs), config=_actor(0.2, 0.28, 3.0))

        return call


for _name in ("sapo", "gpg", "kl_cov", "dro"):
    _without_clip(f"compute_policy_loss_{_name}")


@table.add(f"{CORE}:compute_policy_loss_reinforce", loss=True)
def _reinforce(found: Function) -> Function:
    def call(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Any:
        return found(old_logprobs, logprobs, advantages, mask.to(logprobs), config=_actor(0.2, 0.28, 3.0))

    return call


@table.add(f"{CORE}:compute_policy_loss", loss=True, label="legacy", cliprange_low=0.2, cliprange_high=0.28)
def _legacy(found: Function) -> Function:
    def call(
        old_logprobs: Tensor,
        logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        cliprange_low: float,
        cliprange_high: float,
    ) -> Any:
        return found(
            old_logprobs,
            logprobs,
            advantages,
            mask.to(logprobs),
            cliprange=0.2,
            cliprange_low=cliprange_low,
            cliprange_high=cliprange_high,
        )

    return call
