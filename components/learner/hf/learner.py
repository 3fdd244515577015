"""`learner.hf`: trains any transformers causal LM on one device per replica, all parameters or LoRA. The reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from components.learner.head import plan_head
from components.learner.hf.model import LearnerModel
from components.learner.hf.settings import HFSettings
from components.learner.learner import PolicyLearner
from components.learner.optimizer import Optimizer, Update
from components.learner.packing.pack import PackedBatch
from components.learner.step import Backend, LossOf
from pipeline.core.component import Context, identity_sum
from pipeline.core.errors import RunError
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Weights


class HFLearner(PolicyLearner):
    """Policy-gradient steps on packed micro-batches with global denominators.

    One `run` makes epochs × minibatches optimiser steps. A mini-batch holds all trajectories of some prompts; its loss
    denominators are counted over the whole mini-batch, so the gradient does not depend on `micro_batch_tokens`. Steps
    without any credit, and steps with a non-finite loss or gradient, change no weight and are counted.

    With several replicas each has the whole batch, computes its part of every mini-batch (prompts spread by token
    count), and gradients are summed; all make the same steps.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HFSettings):
        """Settings of `learner.hf`."""

    config: Config

    def setup(self, context: Context) -> None:
        """Loads the model and makes the optimiser."""
        super().setup(context)
        from components.models.load import check_context, load_causal_lm

        model = load_causal_lm(context.model, context.device)
        max_context = check_context(context.model, model.config)
        self.model = LearnerModel(
            model,
            self.config.lora,
            self.config.recompute,
            self.config.keeps_reference,
            seed=context.seed,
            slow_attention=self.config.compute.slow_attention,
        )
        rows, width = model.get_output_embeddings().weight.shape
        self.model.head_plan = plan_head(
            self.config.compute, (rows, width), model.dtype, torch.device(context.device), context.all_sum
        )
        self.optimizer = Optimizer(
            self.model.trainable(),
            self.config.optimizer,
            total_steps=context.iterations * self.config.steps_per_batch,
            no_decay=self.model.embedding_names(),
        )
        self.backend = HFBackend(context, self.model, self.optimizer, max_context)

    def weights(self) -> Weights:
        """The whole model, or its adapters with `lora.publish=adapter`."""
        if self.config.lora.publish == "adapter":
            tensors, adapter = self.model.published_adapter()
            return Weights(version=self.version, tensors=tensors, adapter=adapter)
        return Weights(version=self.version, tensors=self.model.published())

    def state_dict(self) -> dict[str, Any]:
        """Optimiser state with the trained parameters, version and counter."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "version": self.version,
            "trained_tokens": self.trained_tokens,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`, bit for bit; RunError for the state of another learner."""
        if "optimizer" not in state:
            raise RunError(
                f"learner.hf: expected the optimiser state of learner.hf in the checkpoint, got "
                f"{', '.join(sorted(state))}. Resume with the learner that wrote the run, or start a new run."
            )
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = int(state["version"])
        self.trained_tokens = int(state["trained_tokens"])


class HFBackend(Backend):
    """A transformers model on one device, and AdamW.

    Args:
        context: context of the learner's node.
        model: the model.
        optimizer: optimizer of its trained parameters.
        max_context: longest sequence the model supports, in tokens.
    """

    def __init__(self, context: Context, model: LearnerModel, optimizer: Optimizer, max_context: int) -> None:
        super().__init__(context)
        self.model = model
        self.optimizer = optimizer
        self.max_context = max_context
        self.packs = model.packs

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors, adapters merged."""
        return self.model.export()

    @property
    def exports_alone(self) -> bool:
        """Of parameters that ranks hold together, each needs the others."""
        return not any(hasattr(p, "full_tensor") for p in self.model.causal_lm.parameters())

    def offloadable(self) -> tuple[list[Tensor], list[Tensor]]:
        """AdamW's moments, the float32 masters and all gradients."""
        return self.optimizer.offloadable()

    def score(self, batches: Iterable[PackedBatch], temperature: float, reference: bool) -> list[Jagged]:
        """Scores one micro-batch after the other."""
        if reference:
            return [self.model.reference_logprobs(batch, temperature) for batch in batches]
        return [self.model.logprobs(batch, temperature)[0] for batch in batches]

    def forward_backward(self, batches: Iterable[PackedBatch], temperature: float, loss: LossOf) -> Tensor:
        """Accumulates gradients in the parameters, or in their float32 copies."""
        total = torch.zeros((), dtype=torch.float64, device=self.context.device)
        for number, batch in enumerate(batches):
            share = loss(number, *self.model.logprobs(batch, temperature))
            share.backward()  # type: ignore[no-untyped-call]
            self.optimizer.collect()
            total += share.detach()
        return total

    def update(self) -> Update:
        """Sums gradients over replicas, then updates."""
        return self.optimizer.step(None if self.context.all_sum is identity_sum else self.context.all_sum)

    def skip_update(self) -> Update:
        """Advances the schedule and drops gradients."""
        return self.optimizer.skip()
