"""Losses and advantages of installed trainers by short names: `trl:grpo`, `verl:gspo`, `openrlhf:ppo`.

TRL computes its loss in a method of its trainer and verl reads a configuration of its own class; both are made here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from creditgraph.pipeline.app.audit.targets import AuditError
from creditgraph.pipeline.core.errors import did_you_mean

_PPO = {"epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.04}
_VESPO = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
# TRL's loss types → their settings; None: the default of its configuration.
TRL: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("grpo", "bnpo", "dr_grpo", "dapo", "luspo"), _PPO),
    "cispo": {"epsilon_high": 5.0, "beta": 0.04},
    "sapo": {"sapo_temperature_pos": None, "sapo_temperature_neg": None, "beta": 0.04},
    "vespo": {**dict.fromkeys(_VESPO), "beta": 0.04},
}
_BOUNDS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
_DUAL = {**_BOUNDS, "clip_ratio_c": 3.0}
# verl's policy losses → the settings that they read; of one that is not here, none.
VERL: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("vanilla", "dppo_tv", "dppo_kl"), _DUAL),
    **dict.fromkeys(("gspo", "geo_mean", "cispo"), _BOUNDS),
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "clip_cov": {**_BOUNDS, "clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0},
    "kl_cov": {"kl_cov_ratio": 0.0002, "ppo_kl_coef": 1.0},
    "dro": {"dro_beta": 0.1},
}
_WEIGHT = "the clip bounds a token's weight and stops no token"
_COVARIANCE = "the tokens of the highest covariance are chosen among those of a micro-batch"
_DIVERGENCE = {"loss_clip": "the bounds are of a divergence, not of the ratio"}
# Loss → check → why it is part of the method.
DECLARED: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("dppo_tv", "dppo_kl"), _DIVERGENCE),
    "cispo": {"loss_clip": _WEIGHT},
    "geo_mean": {
        "loss_token_credit": "one ratio of the whole response moves all of its tokens alike",
        "loss_clip": "the bounds are of the log ratio",
    },
    "clip_cov": {"loss_settings": "a share of tokens, which is less than one token in a small batch"},
    "kl_cov": {"loss_cut": _COVARIANCE, "loss_steps": "they are pulled to the old policy"},
}
OPENRLHF = ("ppo", "gspo")
TOKENS = 64.0  # of the whole batch, where a trainer divides by their number


def installed(name: str, kind: str | None = None) -> Callable[..., Any] | None:
    """The function of a short name; None if `name` is not one.

    Args:
        name: "trl:…", "verl:…" or "openrlhf:…".
        kind: "advantage" or "loss", where a trainer has both under one name; a loss by default.

    Raises:
        AuditError: the trainer is not installed, or has nothing of this name.
    """
    library, _, what = name.partition(":")
    makers = {"trl": _trl, "verl": _verl, "openrlhf": _openrlhf}
    if library not in makers:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return makers[library](what, kind)
    except ImportError as error:
        raise AuditError(f"{name}: importing {library} failed with {type(error).__name__}: {error}") from error


def _none(library: str, what: str, known: Sequence[str]) -> AuditError:
    return AuditError(f"{library}:{what}: expected one of {', '.join(known)}.{did_you_mean(what, known)}")


def _function(
    call: Callable[..., Any], columns: Sequence[str], settings: Mapping[str, Any], **attributes: Any
) -> Callable[..., Any]:
    """A function of these columns and settings."""

    def function(**given: Any) -> Any:
        return call(**given)

    only = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(column, only) for column in columns]
    parameters += [inspect.Parameter(setting, only, default=value) for setting, value in settings.items()]
    vars(function).update(__signature__=inspect.Signature(parameters), **attributes)
    return function


def _trl(what: str, _: str | None) -> Callable[..., Any]:
    from trl import GRPOConfig, GRPOTrainer

    if what not in TRL:
        raise _none("trl", what, list(TRL))
    own = {f.name: f.default for f in dataclasses.fields(GRPOConfig) if f.default is not dataclasses.MISSING}
    settings = {k: own.get(k) if v is None else v for k, v in TRL[what].items()}

    def call(
        logprobs: torch.Tensor,
        old_logprobs: torch.Tensor,
        ref_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        **given: Any,
    ) -> Any:
        trainer: Any = object.__new__(GRPOTrainer)
        values = {**own, **given, "loss_type": what, "steps_per_generation": 1, "max_completion_length": TOKENS}
        vars(trainer).update(values)
        same = lambda x, *_, **__: x  # noqa: E731
        vars(trainer).update(
            args=SimpleNamespace(**values),
            epsilon_low=given.get("epsilon", own["epsilon"]),
            epsilon_high=given.get("epsilon_high", own["epsilon"]),
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(num_processes=1, gather=same, reduce=same, gather_for_metrics=same),
            current_gradient_accumulation_steps=1,
            aux_loss_enabled=False,
            use_vllm=False,
            use_adaptive_entropy=False,
            _entropy_bonus_enabled=False,
            _metrics=defaultdict(lambda: defaultdict(list)),
            _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        )
        ids = torch.zeros(logprobs.shape, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones_like(ids[:, :1]),
            "completion_ids": ids,
            "completion_mask": mask.long(),
            "advantages": advantages,
            "old_per_token_logps": old_logprobs,
            "ref_per_token_logps": ref_logprobs,
            "num_items_in_batch": torch.tensor(TOKENS),
        }
        return trainer._compute_loss(trainer.model, inputs)

    columns = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "mask")
    # These divide by the tokens of the whole batch, so that micro-batches are added up; the others are averaged.
    how = "sum" if what in ("cispo", "dapo", "vespo") else "mean"
    return _function(call, columns, settings, audit_accumulate=how, audit_declares=DECLARED.get(what, {}))


def _verl(what: str, kind: str | None) -> Callable[..., Any]:
    from verl.trainer.ppo import core_algos

    losses, estimators = core_algos.POLICY_LOSS_REGISTRY, core_algos.ADV_ESTIMATOR_REGISTRY
    if what in losses and kind != "advantage":
        return _verl_loss(what, losses[what])
    if what not in estimators or kind == "loss":
        known = [*losses, *map(str, estimators)] if kind is None else [*(losses if kind == "loss" else estimators)]
        raise _none("verl", what, [str(name) for name in known])
    return _verl_advantage(estimators[what])


def _verl_loss(what: str, loss: Callable[..., Any]) -> Callable[..., Any]:
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    names = {f.name for f in dataclasses.fields(PolicyLossConfig)}
    mode = inspect.signature(loss).parameters["loss_agg_mode"].default

    def call(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str,
        **given: Any,
    ) -> Any:
        of_loss = PolicyLossConfig(loss_mode=what, **{k: v for k, v in given.items() if k in names})
        of_actor = {k: v for k, v in given.items() if k not in names}
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=of_loss, **of_actor
        )
        return loss(old_log_prob, log_prob, advantages, response_mask.long(), loss_agg_mode, config)

    columns = ("old_log_prob", "log_prob", "advantages", "response_mask")
    settings = {**VERL.get(what, {}), "loss_agg_mode": mode}
    return _function(call, columns, settings, audit_declares=DECLARED.get(what, {}))


def _verl_advantage(estimator: Callable[..., Any]) -> Callable[..., Any]:
    from verl.trainer.config import AlgoConfig

    @functools.wraps(estimator)
    def call(*given: Any, **named: Any) -> Any:
        return estimator(*given, **{**named, **({"config": AlgoConfig()} if "config" in parameters else {})})

    parameters = inspect.signature(estimator).parameters
    kept = [p for name, p in parameters.items() if name != "config"]
    vars(call)["__signature__"] = inspect.Signature(kept)
    return call


def _openrlhf(what: str, _: str | None) -> Callable[..., Any]:
    from openrlhf.models.loss import PolicyLoss

    if what not in OPENRLHF:
        raise _none("openrlhf", what, OPENRLHF)

    def call(
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        action_mask: torch.Tensor,
        **given: Any,
    ) -> Any:
        loss = PolicyLoss(policy_loss_type=what, token_level_loss=what == "ppo", **given)
        return loss(log_probs, old_log_probs, advantages, action_mask=action_mask.long())

    columns = ("log_probs", "old_log_probs", "advantages", "action_mask")
    return _function(call, columns, {"clip_eps_low": 0.2, "clip_eps_high": 0.28})
