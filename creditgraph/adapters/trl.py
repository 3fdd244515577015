"""Credit graphs in TRL's GRPOTrainer: advantages per token, and a graph's objective as the loss.

    trainer = CreditGRPOTrainer(
        model="Qwen/Qwen3-0.6B", reward_funcs=reward, train_dataset=dataset, args=GRPOConfig(...), credit="gigpo"
    )

TRL has no public hook for advantages. The class overrides `_calculate_rewards` (to keep the rewards), and
`_generate_and_score_completions` (to replace the advantages [N] by [N, T], which TRL's loss takes); with
`objective=True` also `_compute_loss`. These are private methods: `TESTED` are the versions with which the tests passed.

Unsloth puts a trainer of its own in the place of TRL's when it is imported, so import it first; the class is then a
subclass of that one, whose losses take advantages per token too.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import trl
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.functional import pad
from trl import GRPOTrainer

from creditgraph.adapters.estimator import check_version
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.loss import (
    COLUMN,
    check_by_steps,
    check_off,
    loss_inputs,
    loss_weights,
    prepared,
    ratio_per_response,
    token_losses,
)
from creditgraph.adapters.rows import Rollouts, log_means
from creditgraph.adapters.trl_model import TrainerPolicy, TrainerRewards, check_continues
from creditgraph.adapters.trl_rows import GraphRows, as_wide
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.jagged import Jagged

TESTED = ("1.16", "1.15", "1.13", "1.10", "1.5", "1.0", "0.29")  # 1.15 under Unsloth only; those below it by hand
UNSLOTH, TESTED_UNSLOTH = "UnslothGRPOTrainer", ("2026.10",)
# Terms of TRL's losses that the loss of a graph has no part for, and what they are when off.
LOSS_OFF = {
    "beta": 0.0,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
}
SCORES = ("logprobs", "entropies")
PerTurn = Callable[..., Sequence[Sequence[Any]]]
MODEL_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


class CreditGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer whose advantages come from a credit graph.

    Nodes that score texts do it with the model that is trained, as TRL's loss does; nodes that sample do it as TRL
    does, and its reward functions verify what they sample. TRL trains on rows that a graph makes itself.

    A turn is a run of tokens that the model sampled (TRL's `tool_mask`). Rewards are TRL's weighted sums; they belong
    to the last turn, unless `turn_rewards` says otherwise.

    Args:
        credit: a `CreditGraph`, or the name of a graph, whose `model.path` is then `model` if that is a name.
        objective: the loss is that of the graph, with its aggregation, times TRL's correction of vLLM's log-probs;
            `loss_type` and `epsilon` have no effect. Without it TRL's loss reads the graph's advantages.
        turn_rewards: called as a reward function of TRL; returns for each completion the reward of each turn. Their
            sum replaces the rewards of the reward functions in the credit.
        turn_states: called alike; returns for each completion a key of the state before each turn, by default the
            tokens that the model read since its last turn.

    Raises:
        ConfigError: the graph needs what TRL does not give, or a setting of TRL has no part in the graph's credit or
            loss.
    """

    def __init__(
        self,
        *args: Any,
        credit: CreditGraph | str,
        objective: bool = False,
        turn_rewards: PerTurn | None = None,
        turn_states: PerTurn | None = None,
        **kwargs: Any,
    ) -> None:
        check_version("trl", TESTED)
        if isinstance(credit, str):
            model = kwargs.get("model", args[0] if args else None)
            named = isinstance(model, str) and re.fullmatch(r"[\w./-]+", model)
            credit = CreditGraph(credit, *([f"model.path={model}"] if named else []))
        self.credit = credit
        self._unsloth = trl.GRPOTrainer.__name__ == UNSLOTH
        given = {"logprobs": True, "entropies": not self._unsloth, "policy": True, "continues": True, "rows": True}
        self.credit.check_given(values=False, **given)
        self.credit.check_loss(
            objective, f"Pass objective=True{', and train without Unsloth' if self._unsloth else ''}."
        )
        self.credit_objective = self.credit.objective if objective else None
        if self.credit_objective is not None:
            check_by_steps(self.credit_objective, f"graph '{self.credit.name}'")
        self._per_turn = {"turn_rewards": turn_rewards, "states": turn_states}
        if self.credit.makes_rows and any(self._per_turn.values()):
            raise ConfigError(
                f"graph '{self.credit.name}': it makes responses of its own, which have no turns; turn_rewards and "
                "turn_states have no effect. Leave them out."
            )
        self._given: dict[str, Any] = {}
        if self._unsloth:
            self._check_unsloth(objective)
        super().__init__(*args, **kwargs)
        off = {"multi_objective_aggregation": "sum_then_normalize"} | (LOSS_OFF if objective else {})
        if hasattr(self, "compute_liger_loss"):  # until TRL 1.13 a loss of its own, of one advantage per response
            off = {"use_liger_kernel": False} | off
        check_off(self, off, f"graph '{self.credit.name}'", "TRL")
        self._verifier = TrainerRewards(self)
        self._policy = TrainerPolicy(self, scores_sampled=self.credit.makes_rows and self.credit.reads_scores)
        self.credit.attach(
            self._policy, self._verifier, temperature=self.temperature, max_tokens=self.max_completion_length
        )
        if self.credit.samples:
            check_continues(self, f"graph '{self.credit.name}'")
        self._rows = GraphRows(self.credit) if self.credit.makes_rows else None

    def _check_unsloth(self, objective: bool) -> None:
        check_version("unsloth", TESTED_UNSLOTH)
        place = f"graph '{self.credit.name}'"
        if not isinstance(self, trl.GRPOTrainer):
            raise ConfigError(f"{place}: creditgraph.adapters.trl was imported before unsloth; import unsloth first.")
        if objective:
            raise ConfigError(
                f"{place}: Unsloth computes its losses in functions of its own, so the loss cannot be the graph's. "
                "Leave objective out (Unsloth's loss reads the graph's advantages), or train without Unsloth."
            )

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids: list[list[int]]
    ) -> Tensor:
        columns = {key: [row[key] for row in inputs] for key in inputs[0] if key not in ("prompt", "completion")}
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids} | columns
        self._given = {name: list(f(**given)) for name, f in self._per_turn.items() if f is not None}
        self._given |= {"texts": prompts, "answers": columns.get("answer")}
        rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids)
        self._given["rewards"] = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        mode = "train" if self.model.training else "eval"
        size = self.num_generations if mode == "train" else self.num_generations_eval
        if self.credit.samples or self._rows is not None:
            self._verifier.rows = gather_object(inputs)[::size]
        if self._rows is not None:
            self._rows.problems = self._verifier.rows
            self.rollout_func = self._rows if mode == "train" else None
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.credit.scores and mode == "eval":  # its advantages move nothing
            return output
        rollouts = self._rollouts(output, size)
        by_response = ratio_per_response(self) if self.credit_objective is None else ""
        if self.credit.scores and self.credit.policy is self._policy and output.get("pixel_values") is not None:
            self.credit.refuse_images()
        if self._rows is None:
            advantages = self.credit(rollouts, record=mode == "train", by_response=by_response)
        else:
            advantages = as_wide(self._rows.advantages, rollouts.mask.shape[1]).where(rollouts.trained, 0.0)
            self.credit.check_credit(advantages, rollouts.trained, by_response)
            self.credit.record(rollouts, advantages)
        output["advantages"] = self._mine(advantages, output)
        for name, value in self.credit.metrics.items():
            self._metrics[mode][f"credit/{name}"].append(value)
        log_means(self._logs["advantages"], advantages, rollouts.trained)
        if self.credit_objective is not None and mode == "train":
            columns = {} if self._rows is None else self._rows.columns
            self._prepare_loss(output, {name: self._mine(column, output) for name, column in columns.items()})
        return output

    def _mine(self, column: Tensor, output: dict[str, Any]) -> Tensor:
        """The rows of this process, as wide as the batch."""
        completions = output["completion_ids"]
        first = self.accelerator.process_index * len(completions)
        return as_wide(column[first : first + len(completions)], completions.shape[1]).to(completions.device)

    def _rollouts(self, output: dict[str, Any], size: int) -> Rollouts:
        """The completions of all processes, as groups may lie in several."""
        mask = _trained(output)
        lengths = output["completion_mask"].sum(1).tolist()
        lists = {
            "tokens": [row[:n] for row, n in zip(output["completion_ids"].tolist(), lengths, strict=True)],
            "mask": [row[:n] for row, n in zip(mask.tolist(), lengths, strict=True)],
            "prompts": [
                [t for t, real in zip(ids, kept, strict=True) if real]
                for ids, kept in zip(output["prompt_ids"].tolist(), output["prompt_mask"].tolist(), strict=True)
            ],
        }
        if self.credit.reads_scores and self._rows is None:
            with torch.no_grad():
                scored = self._score(self.model, output, self.args.per_device_train_batch_size)
            for name, numbers in zip(SCORES, scored, strict=False):
                if numbers is not None:  # Unsloth has no entropies
                    lists[name] = [row[:n] for row, n in zip(numbers.tolist(), lengths, strict=True)]
        per_row = ("turn_rewards", "states", "texts", "answers")
        lists |= {name: self._given[name] for name in per_row if self._given.get(name) is not None}
        rows = {name: gather_object(values) for name, values in lists.items()}
        total = self._weighted(self._given["rewards"])
        texts = rows.pop("texts")
        answers = rows.get("answers")
        scores: dict[str, Any] = {
            name: Jagged.from_rows(rows[name], torch.float32).to_padded() for name in SCORES if name in rows
        }
        return Rollouts(
            mask=Jagged.from_rows(rows.pop("mask"), torch.int64).to_padded(),
            tokens=Jagged.from_rows(rows.pop("tokens"), torch.int64).to_padded(),
            rewards=total,
            group=torch.arange(len(total)) // size,
            texts=[t if isinstance(t, str) else str(t) for t in texts],
            answers=None if answers is None else [str(a) for a in answers],
            temperature=self.temperature,
            **scores,
            **{name: rows[name] for name in ("prompts", "turn_rewards", "states") if name in rows},
        )

    def _weighted(self, rewards: Tensor) -> Tensor:
        """The weighted sum of what reward functions returned, [N, functions]; NaN where that was None from all."""
        weighted: Tensor = (rewards * self.reward_weights.to(rewards.device)).cpu()
        return weighted.nansum(1).masked_fill(torch.isnan(weighted).all(1), torch.nan)

    @torch.no_grad()
    def _prepare_loss(self, output: dict[str, Any], columns: dict[str, Tensor]) -> None:
        """Adds log-probs of the sampling weights, and the objective's columns, to the batch, for all its steps."""
        size = self.args.per_device_train_batch_size
        logprobs, entropies, _ = self._score(self.model, output, size)
        output["old_per_token_logps"] = logprobs
        assert self.credit_objective is not None
        given = (logprobs, logprobs, output["advantages"], _trained(output))
        inputs = loss_inputs(*given, old_entropies=entropies, columns=columns)
        width = logprobs.shape[1]

        def all_sum(x: Tensor) -> Tensor:
            total: Tensor = self.accelerator.reduce(x.to(logprobs.device), reduction="sum").cpu()
            return total

        for name, column in prepared(inputs, self.credit_objective, width, all_sum).items():
            output[COLUMN + name] = column

    def _score(self, model: Any, inputs: dict[str, Any], size: int | None = None) -> tuple[Tensor, ...]:
        """Log-probs and entropies of the completions, both [N, T], and the router loss, 0 without experts."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        further = {name: inputs[name] for name in MODEL_INPUTS if inputs.get(name) is not None}
        keep = inputs["completion_ids"].shape[1]
        if getattr(self, "aux_loss_enabled", False):  # a mixture of experts, from TRL 1.10 on
            further["compute_aux_loss"] = True
        logprobs, entropies, *aux = self._get_per_token_logps_and_entropies(
            model, ids, attention, keep, batch_size=size, compute_entropy=True, **further
        )
        return logprobs, entropies, (aux[0] if aux and aux[0] is not None else logprobs.new_zeros(()))

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """TRL's or Unsloth's, which moves the padding of texts from the left of a prompt to the end of its row."""
        plain = inputs.get("pixel_values") is None and inputs.get("pixel_values_videos") is None
        if self._unsloth and plain and inputs["advantages"].dim() == 2:
            inputs = inputs | {"advantages": _left_packed(inputs, self.processing_class.pad_token_id)}
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[no-any-return]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        settings = self.credit_objective
        if settings is None or not self.model.training:
            return super()._compute_loss(model, inputs)  # type: ignore[no-any-return]
        mask = _trained(inputs)
        logprobs, entropies, aux_loss = self._score(model, inputs)
        columns = {name.removeprefix(COLUMN): value for name, value in inputs.items() if name.startswith(COLUMN)}
        given = loss_inputs(logprobs, inputs["old_per_token_logps"], inputs["advantages"], mask, columns=columns)
        losses, metrics = token_losses(given, settings, mask.shape[1])
        if inputs.get("importance_sampling_ratio") is not None:  # vllm_importance_sampling_correction
            losses = losses * inputs["importance_sampling_ratio"]
        # One optimiser step: its micro-batches on all processes, whose gradients DDP averages.
        parts, ranks = self.current_gradient_accumulation_steps, self.accelerator.num_processes
        tokens = float(inputs["num_items_in_batch"]) * parts / self.args.steps_per_generation
        weight = loss_weights(mask, settings, len(mask) * parts * ranks, tokens)
        for name, value in metrics.items():
            self._metrics["train"][f"credit/{name}"].append(value)
        self._metrics["train"]["entropy"].append(float((entropies * mask).sum() / mask.sum().clamp(min=1)))
        total: Tensor = ranks * (losses * weight).sum() + getattr(self, "router_aux_loss_coef", 0.0) * aux_loss / parts
        return total


def _left_packed(inputs: dict[str, Any], padding: int) -> Tensor:
    """The advantages [N, T] in the columns [N, T + left] of Unsloth's log-probs: of the left-packed rows, the last ones
    that hold every completion."""
    ids, advantages = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1), inputs["advantages"]
    kept = ids != padding
    scored = [inputs[name] for name in ("old_per_token_logps", "ref_per_token_logps") if inputs.get(name) is not None]
    prompt = ids.shape[1] - advantages.shape[1]
    width = scored[0].shape[1] if scored else advantages.shape[1] + int((~kept[:, :prompt]).sum(1).max())
    order = kept.int().argsort(dim=1, descending=True, stable=True)
    return pad(advantages, (prompt, 0)).gather(1, order)[:, -width:]


def _trained(inputs: dict[str, Any]) -> Tensor:
    mask: Tensor = inputs["completion_mask"]
    return mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]
