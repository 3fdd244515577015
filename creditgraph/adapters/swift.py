"""Credit graphs in ms-swift's GRPO, by a plugin:

    swift rlhf --rlhf_type grpo --external_plugins mine.py …

    # mine.py
    from creditgraph.adapters.swift import register
    register("gigpo", "advantage.omega=0.5")

ms-swift has no hook for advantages. `register` puts `CreditGRPOTrainer` in the place of its trainer, which overrides
`_postprocess_batch` (to replace the advantages, which ms-swift's losses take per token) and, with `objective=True`,
`_compute_loss_single`. These are private methods: `TESTED` are the versions that tests run.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import gather_object
from swift.rlhf_trainers import GRPOTrainer
from swift.trainers import TrainerFactory
from torch import Tensor
from torch.nn.functional import pad

from creditgraph.adapters.estimator import check_version
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.loss import (
    check_by_steps,
    check_off,
    loss_inputs,
    loss_weights,
    prepared,
    ratio_per_response,
    token_losses,
)
from creditgraph.adapters.rows import Rollouts, log_means
from creditgraph.adapters.trl_model import TrainerPolicy
from creditgraph.components.learner.objective import ObjectiveSettings
from creditgraph.pipeline.core.errors import ConfigError, DataError
from creditgraph.pipeline.core.jagged import Jagged

TESTED = ("4.6",)
IGNORED = -100  # label of a token that is not trained on
# Settings of ms-swift by which its advantages are none of tokens, or not those of rewards; and what they are when off.
OFF = {
    "use_liger_loss": False,
    "kl_in_reward": False,
    "off_policy_sequence_mask_delta": None,
    "advantage_reweight": None,
    "sdar_loss_coef": 0.0,
}
# Those of its losses that the loss of a graph has no part for.
LOSS_OFF = {
    "beta": 0.0,
    "overlong_filter": False,
    "top_entropy_quantile": 1.0,
    "rollout_importance_sampling_mode": None,
    "chord_sft_iterator": None,
}


class CreditGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """ms-swift's GRPOTrainer whose advantages come from a credit graph.

    A turn is a run of tokens that the model sampled and is trained on. Rewards are ms-swift's weighted sums; they
    belong to the last turn, unless the scheduler of an environment leaves the reward of each turn (`step_rewards`).

    Attributes:
        credit: the graph.
        credit_objective: settings of its loss; None for ms-swift's losses.
    """

    credit: CreditGraph
    credit_objective: ObjectiveSettings | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        off = OFF | (LOSS_OFF if self.credit_objective is not None else {})
        more = []
        if self.template.sequence_parallel_size > 1:
            more.append(f"sequence_parallel_size={self.template.sequence_parallel_size}")
        if self.credit_objective is None and self.loss_type == "real":
            more.append("loss_type='real'")
        check_off(self, off, f"graph '{self.credit.name}'", "ms-swift", more)
        self._policy = TrainerPolicy(self)
        if not self.credit.samples:  # else a server was named, which is asked
            self.credit.attach(self._policy, temperature=self.temperature, max_tokens=self.max_completion_length)

    def _postprocess_batch(self, samples: list[Any], batch_encoded_inputs: list[dict[str, Any]]) -> None:
        if self.dynamic_num_samples:
            raise ConfigError(
                f"graph '{self.credit.name}': the multi-turn scheduler splits a trajectory into several samples, which "
                "a graph cannot credit. Use one that keeps a trajectory in one sample."
            )
        super()._postprocess_batch(samples, batch_encoded_inputs)  # its metrics are those of the rewards
        mode = "train" if self.model.training else "eval"
        rollouts = self._rollouts(samples, self.num_generations if mode == "train" else self.num_generations_eval)
        by_response = ratio_per_response(self) if self.credit_objective is None else ""
        advantages = self.credit(rollouts, record=mode == "train", by_response=by_response)
        first = self.accelerator.process_index * len(samples)
        rows = {id(s): (rollouts.trained[first + i], advantages[first + i]) for i, s in enumerate(samples)}
        for chunk, encoded in zip(self.split_by_mini_batches(samples), batch_encoded_inputs, strict=True):
            batch = encoded["grpo_batch"]
            if batch.teacher_per_token_logps is not None:
                raise ConfigError(
                    f"graph '{self.credit.name}': its credit has no part for a teacher. Train without one."
                )
            batch.advantages = _in_frame([rows[id(s)] for s in chunk], batch.completion_mask)
        for name, value in self.credit.metrics.items():
            self._metrics[mode][f"credit/{name}"].append(value)
        log_means(self._logs["advantages"], advantages, rollouts.trained)
        if self.credit_objective is not None and mode == "train":
            self._prepare_loss(batch_encoded_inputs)

    def _rollouts(self, samples: list[Any], size: int) -> Rollouts:
        """The samples of all processes, as groups may lie in several."""
        lists: dict[str, list[Any]] = {"tokens": [], "mask": [], "prompts": []}
        for sample in samples:
            mask = [int(label != IGNORED) for label in sample.encoded["labels"]]
            tokens = list(sample.encoded["input_ids"])
            begin = mask.index(1) if any(mask) else len(mask)
            end = len(mask) - mask[::-1].index(1) if any(mask) else begin
            lists["tokens"].append(tokens[begin:end])
            lists["mask"].append(mask[begin:end])
            lists["prompts"].append(tokens[:begin])
        lists["texts"] = [self.template.tokenizer.decode(ids) for ids in lists["prompts"]]
        if all("step_rewards" in sample.rollout_infos for sample in samples):
            lists["turn_rewards"] = [sample.rollout_infos["step_rewards"] for sample in samples]
        if all("solution" in sample.extra for sample in samples):
            lists["answers"] = [str(sample.extra["solution"]) for sample in samples]
        rows = {name: gather_object(values) for name, values in lists.items()}
        scores: dict[str, Any] = {}
        asks = self.credit.reads_scores or (self.credit.scores and self.credit.policy is self._policy)
        if asks and any(gather_object([bool(s.images or s.videos or s.audios) for s in samples])):
            self.credit.refuse_images()
        if self.credit.reads_scores:
            context, scored = (Jagged.from_rows(rows[name], torch.int32) for name in ("prompts", "tokens"))
            found = self._policy.score(context, scored, self.temperature)
            scores = {"logprobs": found.logprobs.to_padded(), "entropies": found.entropies.to_padded()}
        rewards = (self._rewards_per_func * self.reward_weights.unsqueeze(0)).cpu()
        return Rollouts(
            mask=Jagged.from_rows(rows.pop("mask"), torch.int64).to_padded(),
            tokens=Jagged.from_rows(rows.pop("tokens"), torch.int64).to_padded(),
            rewards=rewards.nansum(1).masked_fill(torch.isnan(rewards).all(1), torch.nan),
            group=torch.arange(len(rewards)) // size,
            temperature=self.temperature,
            **scores,
            **rows,
        )

    def _score(self, model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Log-probs and entropies of the completions, both [N, T], and no router loss."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        shape = inputs["completion_ids"].shape
        model_inputs = {"input_ids": ids, "attention_mask": attention}
        logprobs, entropies = self._get_logps_via_local_forward(
            model, model_inputs, shape[1], ids, compute_entropy=True
        )
        return logprobs.reshape(shape), entropies.reshape(shape), logprobs.new_zeros(())

    @torch.no_grad()
    def _prepare_loss(self, batch_encoded_inputs: list[dict[str, Any]]) -> None:
        """Adds the objective's columns, which it computes from a whole batch, to the micro-batches, for all steps."""
        settings = self.credit_objective
        assert settings is not None
        batches = [encoded["grpo_batch"] for encoded in batch_encoded_inputs]
        width = max(batch.completion_mask.shape[1] for batch in batches)

        def joined(rows: Iterable[Tensor]) -> Tensor:
            return torch.cat([pad(row, (0, width - row.shape[1])) for row in rows])

        def all_sum(x: Tensor) -> Tensor:
            total: Tensor = self.accelerator.reduce(x.to(self.accelerator.device), reduction="sum").cpu()
            return total

        entropies = None
        if settings.entropy_mask.keep < 1:
            entropies = joined(
                self._get_per_token_logps_and_entropies(
                    self.model, encoded["model_inputs"], encoded["grpo_batch"], compute_entropy=True
                )[1]
                for encoded in batch_encoded_inputs
            )
        old = joined(batch.old_per_token_logps for batch in batches)
        mask = joined(batch.completion_mask for batch in batches)
        advantages = joined(batch.advantages for batch in batches)
        columns = prepared(loss_inputs(old, old, advantages, mask, old_entropies=entropies), settings, width, all_sum)
        first = 0
        for batch in batches:
            rows, places = batch.completion_mask.shape
            batch.creditgraph = {name: x[first : first + rows, :places] for name, x in columns.items()}
            first += rows

    def _compute_loss_single(self, model: Any, model_inputs: dict[str, Any], grpo_batch: Any) -> Tensor:
        settings = self.credit_objective
        if settings is None or not self.model.training:
            return super()._compute_loss_single(model, model_inputs, grpo_batch)  # type: ignore[no-any-return]
        mask = grpo_batch.completion_mask
        logprobs, _ = self._get_per_token_logps_and_entropies(model, model_inputs, grpo_batch)
        old, columns = grpo_batch.old_per_token_logps, grpo_batch.creditgraph
        losses, metrics = token_losses(
            loss_inputs(logprobs, old, grpo_batch.advantages, mask, columns=columns), settings, mask.shape[1]
        )
        # One optimiser step: its micro-batches on all processes, whose gradients DDP averages.
        parts, ranks = self.current_gradient_accumulation_steps, self.accelerator.num_processes
        tokens = float(grpo_batch.num_items_in_batch) * parts / self.args.steps_per_generation
        weight = loss_weights(mask, settings, len(mask) * parts * ranks, tokens)
        for name, value in metrics.items():
            self._metrics["train"][f"credit/{name}"].append(value)
        total: Tensor = ranks * (losses * weight).sum()
        # transformers' Trainer divides by the number of micro-batches, unless the model takes their loss arguments.
        return total if self.model_accepts_loss_kwargs or self.compute_loss_func else total * parts


def _in_frame(rows: list[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    """Advantages where a micro-batch has the tokens, float32 [B, T]; `mask` [B, T] are the trained ones."""
    out = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    for i, (trained, advantages) in enumerate(rows):
        places = mask[i].nonzero()[:, 0]
        if len(places) != int(trained.sum()):
            raise DataError(
                f"ms-swift: a micro-batch trains on {len(places)} tokens of a response of which its sample has "
                f"{int(trained.sum())}."
            )
        out[i, places] = advantages[trained].to(out)
    return out


def register(graph: str, *overrides: str, objective: bool = False) -> type[CreditGRPOTrainer]:
    """Has `swift rlhf --rlhf_type grpo` train with a graph; returns the trainer class.

    Args:
        graph, overrides: as of `CreditGraph`.
        objective: the loss is that of the graph, with its aggregation; `loss_type` and `epsilon` have no effect.
            Without it ms-swift's loss reads the graph's advantages.

    Raises:
        ConfigError: the graph cannot run here, or ms-swift's Megatron trainer runs, which has no part for it.
    """
    check_version("ms-swift", TESTED)
    if {"swift.megatron", "swift.ray.megatron"} & set(sys.modules):
        raise ConfigError(
            "creditgraph.adapters.swift: expected `swift rlhf`, got ms-swift's Megatron trainer, which computes "
            "advantages elsewhere. Train with `swift rlhf`, or with creditgraph's own learner.megatron."
        )
    CreditGRPOTrainer.credit = CreditGraph(graph, *overrides)
    CreditGRPOTrainer.credit.check_given(values=False, logprobs=True, entropies=True, policy=True)
    CreditGRPOTrainer.credit.check_loss(objective, "Pass objective=True.")
    CreditGRPOTrainer.credit_objective = CreditGRPOTrainer.credit.objective if objective else None
    if CreditGRPOTrainer.credit_objective is not None:
        check_by_steps(CreditGRPOTrainer.credit_objective, f"graph '{graph}'")
    TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.{CreditGRPOTrainer.__name__}"
    return CreditGRPOTrainer
