"""NeMo-RL: the advantage estimators of its algorithms and its clipped policy gradient loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .entry import Config, Function, Table, critic
from .source import Source

ADV = "nemo_rl.algorithms.advantage_estimator"
table = Table(
    "nemo_rl",
    "NVIDIA-NeMo/RL",
    left_out={
        "OPDAdvantageEstimator": "distillation: the difference of two models' log-probs, without a reward",
    },
)
_KL = SimpleNamespace(use_kl_in_reward=False, reference_policy_kl_penalty=0.0, reference_policy_kl_type="k3")


def _outcome(cls: str, label: str, **options: Any) -> None:
    @table.add(f"{ADV}:{cls}", label=label)
    def make(found: Function) -> Function:
        estimator = found(Config(options), _KL)

        def call(rewards: Tensor, groups: Tensor, mask: Tensor) -> Any:
            result = estimator.compute_advantage(groups[:, None], rewards, mask.float())
            return (result[0] if isinstance(result, tuple) else result) * mask

        return call


_GRPO = "GRPOAdvantageEstimator"
_outcome(_GRPO, "leave one out, divided by std", use_leave_one_out_baseline=True, normalize_rewards=True)
_outcome(_GRPO, "leave one out", use_leave_one_out_baseline=True, normalize_rewards=False)
_outcome(_GRPO, "group mean, divided by std", use_leave_one_out_baseline=False, normalize_rewards=True)
_outcome("ReinforcePlusPlusAdvantageEstimator", "group mean", minus_baseline=True)
_outcome("ReinforcePlusPlusAdvantageEstimator", "no baseline", minus_baseline=False)
_outcome("RawRewardAdvantageEstimator", "not normalized", normalize_advantages=False)
_outcome("RawRewardAdvantageEstimator", "normalized", normalize_advantages=True)


@table.add(f"{ADV}:GDPOAdvantageEstimator", label="the reward in two equal parts")
def _gdpo(found: Function) -> Function:
    estimator = found(Config(use_leave_one_out_baseline=True, normalize_rewards=True, reward_weights=None), _KL)

    def call(rewards: Tensor, groups: Tensor, mask: Tensor) -> Any:
        parts = {"reward/a": rewards / 2, "reward/b": rewards / 2}
        return estimator.compute_advantage(groups[:, None], rewards, mask.float(), parts) * mask

    return call


def _gae(label: str, **more: Any) -> None:
    @table.add(f"{ADV}:GeneralizedAdvantageEstimator", label=label)
    def make(found: Function) -> Function:
        def call(
            rewards: Tensor, mask: Tensor, values: Tensor, lengths: Tensor, gamma: float, gae_lambda: float
        ) -> Any:
            options = {"gae_lambda": gae_lambda, "gae_gamma": gamma, "normalize_advantages": False}
            options |= {"gae_lambda_value": None, "gae_lambda_policy": None, "length_adaptive_alpha": 0.0} | more
            estimator = found(Config(options), _KL)
            return estimator.compute_advantage(None, rewards, mask.float(), critic(values, lengths))[0]

        return call


_gae("not normalized")
_gae("normalized", normalize_advantages=True)


def _loss(label: str, clip: bool = True, **options: Any) -> None:
    names = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28} if clip else {}

    @table.add("nemo_rl.algorithms.loss.loss_functions:ClippedPGLossFn", loss=True, label=label, **names)
    def make(found: Function, source: Source) -> Function:
        config_of = source.get("nemo_rl.algorithms.loss.loss_functions:ClippedPGLossConfig")

        def loss_of(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **bounds: float) -> Any:
            config = config_of(**{"reference_policy_kl_penalty": 0.0, **options, **bounds})
            data = {
                "token_mask": mask.to(logprobs),
                "sample_mask": torch.ones(len(mask), dtype=logprobs.dtype),
                "advantages": advantages,
                "prev_logprobs": old,
                "generation_logprobs": old,
            }
            # Its tensors start at the first token, which no log-prob belongs to.
            data = {k: v if v.ndim == 1 else torch.nn.functional.pad(v, (1, 0)) for k, v in data.items()}
            rows = torch.tensor(float(len(mask)))
            return found(config)(logprobs, Data(data | {"input_ids": mask.long()}), rows, mask.sum().to(logprobs))[0]

        if not clip:

            def plain(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Any:
                return loss_of(logprobs, old_logprobs, advantages, mask)

            return plain

        def call(
            logprobs: Tensor,
            old_logprobs: Tensor,
            advantages: Tensor,
            mask: Tensor,
            ratio_clip_min: float,
            ratio_clip_max: float,
        ) -> Any:
            bounds = {"ratio_clip_min": ratio_clip_min, "ratio_clip_max": ratio_clip_max}
            return loss_of(logprobs, old_logprobs, advantages, mask, **bounds)

        return call


class Data(dict):  # type: ignore[type-arg]
    """In place of its BatchedDataDict."""


_loss("token level")
_loss("sequence level", token_level_loss=False)
_loss("dual clip 3", ratio_clip_c=3.0)
_loss("gspo", token_level_loss=False, sequence_level_importance_ratios=True)
_loss("cispo", clip=False, use_cispo=True, ratio_clip_min=0.2, ratio_clip_max=0.28)
_loss("reinforce", clip=False, disable_ppo_ratio=True)
_loss("importance correction, icepop", use_importance_sampling_correction=True,
      truncated_importance_sampling_type="icepop", truncated_importance_sampling_ratio=5.0,
      truncated_importance_sampling_ratio_min=0.5)  # fmt: skip
