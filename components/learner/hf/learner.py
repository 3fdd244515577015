"""`learner.hf`: trains any transformers causal LM on one device per replica, all parameters or LoRA. The reference
learner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from components.learner.hf.model import LearnerModel, Lora
from components.learner.metrics import LEARNER_METRICS, Mismatch, MismatchGuard
from components.learner.objective import Meters, Objective
from components.learner.optimizer import Optimizer, OptimizerSettings
from components.learner.step import Outputs, RolloutPass, check_settings
from pipeline.core.component import Component, Context, identity_sum, same_rows
from pipeline.core.errors import RunError
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Credit, Trajectories, Weights, check_aligned


class HFLearner(Component):
    """Policy-gradient steps on packed micro-batches with global denominators.

    One `run` makes epochs × minibatches optimiser steps. A mini-batch holds all trajectories of some prompts; its loss
    denominators are counted over the whole mini-batch, so the gradient does not depend on `micro_batch_tokens`. Steps
    without any credit, and steps with a non-finite loss or gradient, change no weight and are counted.

    With several replicas each has the whole batch, computes its part of every mini-batch (prompts spread by token
    count), and gradients are summed; all make the same steps.
    """

    placement = "collective"
    metrics = LEARNER_METRICS

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings of `learner.hf`."""

        objective: Objective = field(default_factory=Objective)
        """loss per token and aggregation"""
        optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
        """AdamW, clipping, schedule"""
        lora: Lora = field(default_factory=Lora)
        """low-rank adapters; rank 0 trains all parameters"""
        micro_batch_tokens: int = 16384
        """token budget of one forward and backward pass; lower it when memory runs out, the gradient stays the same"""
        minibatches: int = 1
        """optimiser steps per epoch; prompts are split evenly among them, all trajectories of a prompt together"""
        epochs: int = 1
        """passes over the rollout batch"""
        old_logprobs: Literal["engine", "recompute"] = "engine"
        """denominators of the ratios: what the engine reported, or this model's own before its first step"""
        gradient_checkpointing: bool = False
        """recompute activations in the backward pass: less memory, about a third more time"""
        skip_zero_rows: bool = True
        """leave rows without any credit out of the passes when neither KL nor entropy bonus acts on them; same
        gradient, but entropy, ratio and mismatch metrics then describe the other rows only"""
        share_prefixes: bool = True
        """compute a prompt, or an inherited prefix, once for all rows of a micro-batch that begin with it; same loss
        and gradient. Without effect for a model that does not take packed sequences"""
        mismatch: Mismatch = field(default_factory=Mismatch)
        """how far the engine's log-probs may be from the learner's"""

        def __post_init__(self) -> None:
            check_settings(self)

    config: Config

    def setup(self, context: Context) -> None:
        """Loads the model and makes the optimiser."""
        super().setup(context)
        from components.models.load import check_context, load_causal_lm

        c = self.config
        model = load_causal_lm(context.model, context.device)
        self.max_context = check_context(context.model, model.config)
        self.model = LearnerModel(
            model,
            lora=c.lora,
            gradient_checkpointing=c.gradient_checkpointing,
            keep_reference=c.objective.kl.coefficient > 0,
            seed=context.seed,
        )
        self.optimizer = Optimizer(
            self.model.trainable(),
            c.optimizer,
            total_steps=context.iterations * c.epochs * c.minibatches,
            no_decay=self.model.embedding_names(),
        )
        self.guard = MismatchGuard(c.mismatch)
        self.version = 0
        self.totals = {"tokens": 0, "steps": 0, "skipped_zero_credit": 0, "skipped_nonfinite": 0}

    def initial(self) -> dict[str, Any]:
        """The present weights: version 0, or the resumed version after `load_state_dict`."""
        return {"weights": self._weights()}

    def run(self, *, trajectories: Trajectories, credit: Annotated[Credit, same_rows("trajectories")]) -> Outputs:
        """Trains on one rollout batch."""
        check_aligned(trajectories, credit)
        return _Pass(self, trajectories, credit).run(self.guard, self._next_weights)

    def _next_weights(self) -> Weights:
        self.version += 1
        return self._weights()

    def _weights(self) -> Weights:
        if self.config.lora.publish == "adapter":
            tensors, adapter = self.model.published_adapter()
            return Weights(version=self.version, tensors=tensors, adapter=adapter)
        return Weights(version=self.version, tensors=self.model.published())

    def state_dict(self) -> dict[str, Any]:
        """Trained parameters, optimiser, schedule position, version and counters."""
        return {"optimizer": self.optimizer.state_dict(), "version": self.version, "totals": dict(self.totals)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`, bit for bit; RunError for the state of another learner."""
        if "optimizer" not in state:
            raise RunError(
                f"learner.hf: the checkpoint holds {', '.join(sorted(state))}; wanted the optimiser state of "
                "learner.hf. Resume "
                "with the learner that wrote the run, or start a new run."
            )
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = int(state["version"])
        self.totals = {k: int(v) for k, v in state["totals"].items()}


class _Pass(RolloutPass):
    """One rollout batch on its way through the learner."""

    def __init__(self, learner: HFLearner, trajectories: Trajectories, credit: Credit) -> None:
        super().__init__(
            learner.config,
            learner.context,
            trajectories,
            credit,
            version=learner.version,
            totals=learner.totals,
            max_context=learner.max_context,
            padded=learner.model.padded,
        )
        self.model, self.optimizer = learner.model, learner.optimizer

    def score(self, pieces: list[Tensor], reference: bool) -> list[Jagged]:
        """One micro-batch after the other."""
        if reference:
            return [self.model.reference_logprobs(self.pack(p), self.temperature) for p in pieces]
        return [self.model.logprobs(self.pack(p), self.temperature)[0] for p in pieces]

    def accumulate(self, pieces: list[Tensor], denominators: Tensor, meters: Meters) -> Tensor:
        """Gradients stay in the parameters, or in their float32 copies."""
        loss = torch.zeros((), dtype=torch.float64, device=self.lengths.device)
        for index in pieces:
            batch = self.pack(index)
            logprobs, entropies = self.model.logprobs(batch, self.temperature)
            share = self.loss(logprobs, entropies, index, denominators, meters)
            share.backward()  # type: ignore[no-untyped-call]
            self.optimizer.collect()
            loss += share.detach()
            self.count_work(batch)
        return loss

    def update(self) -> tuple[float, float, bool]:
        """Sums gradients over replicas first."""
        return self.optimizer.step(None if self.context.all_sum is identity_sum else self.context.all_sum)

    def skip_update(self) -> float:
        """Forgets gradients."""
        return self.optimizer.skip()
