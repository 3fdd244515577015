"""Names of settings that people bring from TRL and verl, and what they are called here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Last part of the foreign name → ours, as it is written on the command line. TRL 0.24 GRPOConfig, verl 0.6 PPO.
OURS: dict[str, str] = {
    # the model and the data
    "model_name_or_path": "model.path",
    "pretrain": "model.path",
    "bf16": "model.dtype",
    "torch_dtype": "model.dtype",
    "train_files": "data.train.path",
    "val_files": "data.eval.path",
    "dataset_name": "data.train.name",
    "prompt_key": "data.train.question",
    "reward_funcs": "verifier.function",
    "custom_reward_function": "verifier.function",
    "train_batch_size": "prompts.batch",
    "per_device_train_batch_size": "prompts.batch",
    "max_prompt_length": "prompts.max_tokens",
    "val_batch_size": "evaluator.num_problems",
    # sampling
    "num_generations": "sampler.group_size",
    "n": "sampler.group_size",
    "max_completion_length": "sampler.max_tokens",
    "max_response_length": "sampler.max_tokens",
    "max_new_tokens": "sampler.max_tokens",
    "use_vllm": "engine=vllm",
    "gpu_memory_utilization": "engine.gpu_memory",
    "vllm_gpu_memory_utilization": "engine.gpu_memory",
    "tensor_model_parallel_size": "engine.tensor_parallel",
    # credit
    "adv_estimator": "recipe=NAME, or advantage.use",
    "scale_rewards": "advantage.normalize",
    "norm_adv_by_std_in_grpo": "advantage.normalize",
    # the loss
    "learning_rate": "learner.optimizer.lr",
    "lr": "learner.optimizer.lr",
    "weight_decay": "learner.optimizer.weight_decay",
    "max_grad_norm": "learner.optimizer.grad_clip",
    "lr_scheduler_type": "learner.optimizer.schedule",
    "warmup_steps": "learner.optimizer.warmup",
    "lr_warmup_steps": "learner.optimizer.warmup",
    "loss_type": "learner.objective.use, or learner.objective.aggregate",
    "loss_mode": "learner.objective.use",
    "loss_agg_mode": "learner.objective.aggregate",
    "importance_sampling_level": "learner.objective.use=gspo",
    "clip": "learner.objective.config.clip_low",
    "epsilon": "learner.objective.config.clip_low",
    "epsilon_high": "learner.objective.config.clip_high",
    "clip_ratio": "learner.objective.config.clip_low",
    "clip_ratio_low": "learner.objective.config.clip_low",
    "clip_ratio_high": "learner.objective.config.clip_high",
    "clip_ratio_c": "learner.objective.config.dual_clip",
    "delta": "learner.objective.config.dual_clip",
    "beta": "learner.objective.kl.coefficient",
    "kl_coef": "learner.objective.kl.coefficient",
    "kl_loss_coef": "learner.objective.kl.coefficient",
    "use_kl_loss": "learner.objective.kl.coefficient",
    "kl_loss_type": "learner.objective.kl.estimator",
    "entropy_coeff": "learner.objective.entropy_bonus",
    "num_iterations": "learner.epochs",
    "ppo_epochs": "learner.epochs",
    "ppo_mini_batch_size": "learner.minibatches",
    "steps_per_generation": "learner.minibatches",
    "gradient_accumulation_steps": "learner.micro_batch_tokens",
    "ppo_micro_batch_size_per_gpu": "learner.micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "learner.micro_batch_tokens",
    "gradient_checkpointing": "learner.recompute",
    "enable_gradient_checkpointing": "learner.recompute",
    "lora_r": "learner.lora.rank",
    "lora_rank": "learner.lora.rank",
    "lora_alpha": "learner.lora.alpha",
    # the run
    "max_steps": "run.iterations",
    "num_train_epochs": "run.iterations",
    "total_epochs": "run.iterations",
    "total_training_steps": "run.iterations",
    "output_dir": "run.root",
    "default_local_dir": "run.root",
    "run_name": "run.name",
    "experiment_name": "run.name",
    "project_name": "run.wandb.project",
    "report_to": "run.wandb.mode",
    "save_steps": "run.checkpoint.every",
    "save_freq": "run.checkpoint.every",
    "save_total_limit": "run.checkpoint.keep",
    "eval_steps": "evaluator.every",
    "test_freq": "evaluator.every",
}


def ours(name: str) -> str:
    """ " Here it is called …" for a setting of TRL or verl, by the last part of its name; "" for any other name.

    >>> ours("actor_rollout_ref.rollout.n")
    ' Here it is called sampler.group_size.'
    """
    found = OURS.get(name.rpartition(".")[2])
    return f" Here it is called {found}." if found else ""


def all_ours(place: str, settings: Any) -> str:
    """The same for every setting within a section that is none of ours."""
    known = {name: OURS[key] for name, key in _leaves(place, settings) if key in OURS}
    if len(known) == 1:
        return f" Here it is called {next(iter(known.values()))}."
    return f" Here {', '.join(f'{name} is called {own}' for name, own in known.items())}." if known else ""


def _leaves(place: str, value: Any) -> Iterator[tuple[str, str]]:
    yield place, place.rpartition(".")[2]
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(f"{place}.{key}", below)
