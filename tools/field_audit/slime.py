"""slime: rewards are normalised in the rollout manager, spread over tokens or run through GAE in the trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .entry import Config, Function, Table, critic, padded, per_row, with_critic, without_critic
from .source import Source

UTILS = "slime.utils.ppo_utils"
TRAIN = "slime.backends.megatron_utils.loss"
ROLLOUT = "slime.ray.rollout:RolloutManager._post_process_rewards"
table = Table("slime", "THUDM/slime")


def one_rank(source: Source, *modules: str) -> None:
    """Megatron's parallel state of a single process, in place of Megatron."""
    import sys

    mpu = SimpleNamespace(
        get_context_parallel_world_size=lambda: 1,
        get_context_parallel_rank=lambda: 0,
        is_pipeline_last_stage=lambda: True,
        get_data_parallel_group=lambda **_: None,
    )
    core = SimpleNamespace(mpu=mpu)
    for name, module in (("megatron", SimpleNamespace(core=core)), ("megatron.core", core), ("megatron.core.mpu", mpu)):
        sys.modules[name] = module  # type: ignore[assignment]
    source.one_process()
    for name in modules:
        source.module(name).mpu = mpu  # type: ignore[attr-defined]


def _normalized(source: Source, estimator: str, rewards: list[float], group_size: int, std: bool) -> list[float]:
    """What the rollout manager makes of rewards."""
    samples = [SimpleNamespace(get_reward_value=lambda _, r=r: r, index=i) for i, r in enumerate(rewards)]
    args = Config(
        advantage_estimator=estimator,
        rewards_normalization=True,
        grpo_std_normalization=std,
        n_samples_per_prompt=group_size,
        rollout_batch_size=len(rewards) // group_size,
        reward_key=None,
    )
    manager = SimpleNamespace(args=args, custom_reward_post_process_func=None)
    found: list[float] = source.get(ROLLOUT)(manager, samples)[1]
    return found


@table.add(ROLLOUT, label="grpo, a number of samples that is not n_samples_per_prompt × prompts")
def _uneven(found: Function, source: Source) -> Function:
    def call(rewards: list[float], groups: list[int]) -> Any:
        return _normalized(source, "grpo", rewards, 8 * len(rewards), std=True)

    return call


def _trained(estimator: str, label: str = "", whiten: bool = False, std: bool = True) -> None:
    """Rewards through the rollout manager, then through the trainer."""

    @table.add(f"{TRAIN}:compute_advantages_and_returns", label=label or estimator)
    def make(found: Function, source: Source) -> Function:
        one_rank(source, TRAIN)

        def advantages_of(
            rewards: Tensor, mask: Tensor, lengths: Tensor, group_size: int, values: Tensor, gamma: float, lam: float
        ) -> Any:
            args = Config(
                kl_coef=0.0,
                advantage_estimator=estimator,
                gamma=gamma,
                lambd=lam,
                use_rollout_logprobs=False,
                custom_advantage_function_path=None,
                use_opd=False,
                normalize_advantages=whiten,
            )
            data: dict[str, Any] = {
                "log_probs": per_row(torch.zeros(mask.shape), lengths),
                "rewards": _normalized(source, estimator, rewards.tolist(), group_size, std),
                "values": per_row(critic(values, lengths), lengths),
                "response_lengths": lengths.tolist(),
                "total_lengths": lengths.tolist(),
                "loss_masks": per_row(mask.long(), lengths),
            }
            found(args, data)
            return padded(data["advantages"], mask.shape[1]) * mask

        return with_critic(advantages_of) if estimator == "ppo" else without_critic(advantages_of)


_trained("grpo")
_trained("grpo", "grpo without std", std=False)
_trained("reinforce_plus_plus")
_trained("reinforce_plus_plus", "reinforce_plus_plus, normalize_advantages", whiten=True)
_trained("reinforce_plus_plus_baseline")
_trained("ppo")


@table.add(f"{UTILS}:compute_policy_loss", loss=True, eps_clip=0.2, eps_clip_high=0.28)
def _ppo(found: Function) -> Function:
    def call(
        logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
    ) -> Any:
        return found(old_logprobs - logprobs, advantages, eps_clip, eps_clip_high)

    return call


@table.add(f"{UTILS}:compute_policy_loss", loss=True, label="dual clip 3", eps_clip=0.2, eps_clip_high=0.28)
def _dual(found: Function) -> Function:
    def call(
        logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
    ) -> Any:
        return found(old_logprobs - logprobs, advantages, eps_clip, eps_clip_high, 3.0)

    return call


@table.add(f"{UTILS}:compute_cispo_loss", loss=True, low=0.2, high=0.28)
def _cispo(found: Function) -> Function:
    def call(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float) -> Any:
        return found(old_logprobs - logprobs, logprobs, advantages, low, high)

    return call


@table.add(f"{UTILS}:compute_gspo_kl", loss=True, label="then compute_policy_loss", eps_clip=0.2, eps_clip_high=0.28)
def _gspo(found: Function, source: Source) -> Function:
    policy_loss = source.get(f"{UTILS}:compute_policy_loss")

    def call(
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        eps_clip: float,
        eps_clip_high: float,
    ) -> Any:
        rows, old, masks = list(logprobs), list(old_logprobs), list(mask.to(logprobs))
        kl = found(rows, old, rows, masks).view_as(logprobs)
        loss, _ = policy_loss(kl, advantages, eps_clip, eps_clip_high)
        return sum((x * m).sum() / m.sum().clamp(min=1) for x, m in zip(loss, masks, strict=True)) / len(masks)

    return call
