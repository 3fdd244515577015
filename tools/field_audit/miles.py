"""miles: slime's estimators with a parallel state and masks of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .entry import Config, Function, Table, critic, padded, per_row, with_critic, without_critic
from .source import Source

HUB = "miles.backends.training_utils.loss_hub"
table = Table("miles", "radixark/miles")


def _one_rank(source: Source) -> None:
    source.one_process()
    state = SimpleNamespace(cp=SimpleNamespace(size=1, rank=0), effective_dp=SimpleNamespace(group=None))
    for name in ("math_utils", "advantages"):
        source.module(f"{HUB}.{name}").get_parallel_state = lambda: state  # type: ignore[attr-defined]


def _normalized(source: Source, estimator: str, rewards: list[float], size: int, std: bool) -> list[float]:
    """What the rollout side makes of rewards."""
    samples = [
        SimpleNamespace(get_reward_value=lambda _, r=r: r, index=i, rollout_id=None) for i, r in enumerate(rewards)
    ]
    args = Config(
        advantage_estimator=estimator,
        rewards_normalization=True,
        grpo_std_normalization=std,
        n_samples_per_prompt=size,
        rollout_batch_size=len(rewards) // size,
    )
    post_process = source.get("miles.ray.rollout.train_data_conversion:_post_process_rewards")
    found: list[float] = post_process(args, samples, None, prompt_group_sizes=[size] * (len(rewards) // size))[1]
    return found


def _trained(estimator: str, label: str = "", whiten: bool = False, std: bool = True) -> None:
    @table.add(f"{HUB}.advantages:compute_advantages", label=label or estimator)
    def make(found: Function, source: Source) -> Function:
        _one_rank(source)
        normalize = source.get(f"{HUB}.advantages:normalize_advantages")

        def advantages_of(
            rewards: Tensor, mask: Tensor, lengths: Tensor, group_size: int, values: Tensor, gamma: float, lam: float
        ) -> Any:
            args = Config(kl_coef=0.0, advantage_estimator=estimator, gamma=gamma, lambd=lam, qkv_format="thd")
            masks = per_row(mask.long(), lengths)
            given = {"total_lengths": lengths.tolist(), "response_lengths": lengths.tolist()}
            advantages, _ = found(
                args,
                kl=per_row(torch.zeros(mask.shape), lengths),
                rewards=_normalized(source, estimator, rewards.tolist(), group_size, std),
                log_probs=per_row(torch.zeros(mask.shape), lengths),
                loss_masks=masks,
                values=per_row(critic(values, lengths), lengths),
                **given,
            )
            if whiten:
                advantages = normalize(args, advantages, masks, **given)
            return padded(advantages, mask.shape[1]) * mask

        return with_critic(advantages_of) if estimator == "ppo" else without_critic(advantages_of)


_trained("grpo")
_trained("grpo", "grpo without std", std=False)
_trained("reinforce_plus_plus")
_trained("reinforce_plus_plus", "reinforce_plus_plus, normalized", whiten=True)
_trained("reinforce_plus_plus_baseline")
_trained("ppo")


@table.add(f"{HUB}.math_utils:compute_policy_loss", loss=True, eps_clip=0.2, eps_clip_high=0.28)
def _ppo(found: Function) -> Function:
    def call(
        logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
    ) -> Any:
        return found(old_logprobs - logprobs, advantages, eps_clip, eps_clip_high)

    return call


@table.add(
    f"{HUB}.math_utils:compute_gspo_kl", loss=True, label="then compute_policy_loss", eps_clip=0.2, eps_clip_high=0.28
)
def _gspo(found: Function, source: Source) -> Function:
    policy_loss = source.get(f"{HUB}.math_utils:compute_policy_loss")

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
