"""ROLL: reward normalisation and advantages of its two pipelines, and the policy losses of its RLVR worker."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .entry import Config, Function, Table, critic, with_critic, without_critic
from .source import Source

FUNCTIONALS = "roll.utils.functionals"
WORKER = "roll.pipeline.rlvr.actor_pg_worker:ActorPGWorker"
table = Table("roll", "alibaba/ROLL")


class _Data(SimpleNamespace):
    """In place of its DataProto."""


def _advantages(
    label: str,
    mean: str | None,
    std: str | None,
    estimator: str = "reinforce",
    whiten: bool = False,
    place: str = f"{FUNCTIONALS}:compute_advantage",
) -> None:
    """Rewards through `reward_norm`, then the token level."""

    @table.add(place, label=label)
    def make(found: Function, source: Source) -> Function:
        normalize = source.get(f"{FUNCTIONALS}:reward_norm")

        def advantages_of(
            rewards: Tensor, mask: Tensor, lengths: Tensor, group_size: int, values: Tensor, gamma: float, lam: float
        ) -> Any:
            shaped = normalize(rewards, n_sample=group_size, norm_mean_type=mean, norm_std_type=std)
            tokens = torch.zeros(mask.shape)
            tokens[torch.arange(len(mask)), (lengths - 1).clamp(min=0)] = shaped
            data = _Data(batch={"token_level_rewards": tokens, "values": critic(values, lengths)}, meta_info={})
            found(data, gamma, lam, estimator, whiten_advantages=whiten, response_mask=mask.long())
            return data.batch["advantages"]

        return with_critic(advantages_of) if estimator == "gae" else without_critic(advantages_of)


_advantages("reinforce, raw rewards", None, None)
_advantages("grpo: mean and std of the group", "group", "group", "grpo")
_advantages("mean of the group, std of the batch", "group", "batch")
_advantages("mean and std of the batch", "batch", "batch")
_advantages("mean of the batch, std of the group", "batch", "group")
_advantages("reinforce, whiten_advantages", None, None, whiten=True)
_advantages("gae", None, None, "gae")
_AGENTIC = "roll.pipeline.agentic.utils:agentic_compute_advantage"
_advantages("agentic_reinforce, raw rewards", None, None, "agentic_reinforce", place=_AGENTIC)
_advantages("gae", None, None, "gae", place=_AGENTIC)


def _worker(**options: Any) -> Any:
    settings = Config(
        pg_clip=0.2, pg_clip_low=0.2, pg_clip_high=0.28, use_pg_clip_range=True, dual_clip_loss=False, use_kl_loss=False,
        kl_loss_coef=0.0, rl_loss_coef=1.0, entropy_loss_coef=0.0, enable_old_logprobs_recompute=True,
        loss_agg_mode="seq-mean-token-mean", difficulty_loss_weight=False, length_loss_weight=False,
        train_infer_correction=Config(is_weight=Config(enabled=False)), actor_train=SimpleNamespace(**options),
    )  # fmt: skip
    settings.update({k: v for k, v in options.items() if k in settings})
    return settings


def _loss(variant: str, label: str = "", clip: bool = False, **options: Any) -> None:
    names = {"pg_clip_low": 0.2, "pg_clip_high": 0.28} if clip else {}

    @table.add(f"{WORKER}.loss_func", loss=True, label=label or variant, **names)
    def make(found: Function, source: Source) -> Function:
        cls = source.get(WORKER)

        def loss_of(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **bounds: float) -> Any:
            self = object.__new__(cls)
            settings = {"pg_variant": variant, **options, **bounds}
            self.__dict__ |= {
                "pipeline_config": _worker(**settings),
                "_pg_config_cache": {},
                "_cached_metrics": {},
                "logger": logging.getLogger("field"),
                "strategy": SimpleNamespace(
                    op_compute_log_probs=lambda **_: logprobs,
                    op_compute_entropy=lambda **_: torch.zeros_like(logprobs),
                ),
                "compute_sample_weights": lambda *_: torch.ones(len(mask)),
                "_pg_variant_logged": True,
                "_topr_sample_logged": True,
                "_cispo_config_logged": True,
                "_kimi15_config_logged": True,
            }
            whole = torch.nn.functional.pad(mask.long(), (1, 0))  # the first token is of the prompt
            batch = {
                "response_mask": whole,
                "ref_log_probs": old,
                "old_log_probs": old,
                "advantages": advantages,
                "input_ids": whole,
                "scores": advantages[:, 0],
                "train_infer_is_weight": torch.ones_like(old),
            }
            tokens, rows = mask.sum(), torch.tensor(float(len(mask)))
            info = {"batch_num_tokens": {"response_mask": tokens}, "global_valid_samples": {"response_mask": rows}}
            return found(self, _Data(batch=batch, meta_info=info, non_tensor_batch={}), logprobs)[0]

        def plain(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Any:
            return loss_of(logprobs, old_logprobs, advantages, mask)

        def call(
            logprobs: Tensor,
            old_logprobs: Tensor,
            advantages: Tensor,
            mask: Tensor,
            pg_clip_low: float,
            pg_clip_high: float,
        ) -> Any:
            bounds = {"pg_clip_low": pg_clip_low, "pg_clip_high": pg_clip_high}
            return loss_of(logprobs, old_logprobs, advantages, mask, **bounds)

        return call if clip else plain


_loss("ppo", clip=True)
_loss("ppo", "ppo, dual clip", clip=True, dual_clip_loss=True)
_loss("ppo", "ppo, token-mean", clip=True, loss_agg_mode="token-mean")
_loss("ppo", "ppo, seq-mean-token-sum", clip=True, loss_agg_mode="seq-mean-token-sum")
_loss("ppo", "ppo, token-mean, KL loss", clip=True, loss_agg_mode="token-mean", use_kl_loss=True, kl_loss_coef=0.1)
_loss("vanilla")
_loss("tis")
_loss("topr")
_loss("cispo")
_loss("kimi15")
_loss("kimi15", "kimi15, token-mean", loss_agg_mode="token-mean")
