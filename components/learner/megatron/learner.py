"""`learner.megatron`: trains causal LMs cut over tensor, pipeline, context and data parallel ranks, on
megatron-core."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from components.learner.megatron.clock import ComputeClock
from components.learner.megatron.cpu import megatron_on_cpu
from components.learner.metrics import LEARNER_METRICS, Mismatch, MismatchGuard
from components.learner.objective import Meters, Objective
from components.learner.optimizer import OptimizerSettings
from components.learner.packing.pack import PackedBatch
from components.learner.step import Outputs, RolloutPass, check_settings
from pipeline.core.component import Component, Context, same_rows
from pipeline.core.errors import RunError
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Credit, Trajectories, Weights, check_aligned


class MegatronLearner(Component):
    """Policy-gradient steps as of `learner.hf`, on models cut over many ranks; the same losses, gradients and metrics.

    One replica of the model takes tensor_parallel × pipeline_parallel × context_parallel ranks, neighbours in rank; the
    other ranks of a run are further replicas. Every rank has the whole batch; a replica computes its part of every
    mini-batch, in micro-batches that go through the pipeline together; the objective runs on the last stage, on
    log-probs of whole trajectories.
    Trains all parameters: megatron-core has no LoRA of its own, and `learner.hf` has.
    """

    placement = "collective"
    metrics = (
        *LEARNER_METRICS,
        Metric("bubble", "share", "time of the passes in which a pipeline rank did not compute, mean over ranks"),
        Metric("bubble_max", "share", "the same of the most idle rank"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings of `learner.megatron`."""

        objective: Objective = field(default_factory=Objective)
        """loss per token and aggregation"""
        optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
        """AdamW, clipping, schedule"""
        tensor_parallel: int = 1
        """ranks that cut each matrix; must divide the attention heads"""
        pipeline_parallel: int = 1
        """ranks that cut the stack of layers; where they do not divide evenly the first ranks have one more"""
        virtual_pipeline: int = 1
        """chunks of layers per pipeline rank: smaller bubbles, more communication"""
        context_parallel: int = 1
        """ranks that cut the tokens of a micro-batch, for sequences too long for one device"""
        sequence_parallel: bool = False
        """cut activations between matrix products over the tensor-parallel ranks too: less memory"""
        recompute: Literal["none", "selective", "full"] = "none"
        """activations computed again in the backward pass: those of attention, or all but the layers' inputs"""
        distributed_optimizer: Literal["auto", "on", "off"] = "auto"
        """split float32 weights and moments over replicas; auto: on GPUs when there are several replicas"""
        micro_batch_tokens: int = 16384
        """token budget of one micro-batch; lower it when memory runs out, the gradient stays the same. A pipeline of P
        stages wants several times P micro-batches per step"""
        minibatches: int = 1
        """optimiser steps per epoch; prompts are split evenly among them, all trajectories of a prompt together"""
        epochs: int = 1
        """passes over the rollout batch"""
        old_logprobs: Literal["engine", "recompute"] = "engine"
        """denominators of the ratios: what the engine reported, or this model's own before its first step"""
        skip_zero_rows: bool = True
        """leave rows without any credit out of the passes when neither KL nor entropy bonus acts on them; same
        gradient, but entropy, ratio and mismatch metrics then describe the other rows only"""
        share_prefixes: bool = True
        """compute a prompt, or an inherited prefix, once for all rows of a micro-batch that begin with it; same loss
        and gradient"""
        mismatch: Mismatch = field(default_factory=Mismatch)
        """how far the engine's log-probs may be from the learner's"""

        def __post_init__(self) -> None:
            check_settings(self)
            sizes = ("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel")
            small = {n: getattr(self, n) for n in sizes if getattr(self, n) < 1}
            if small:
                raise ValueError(f"{', '.join(f'{n} {v}' for n, v in small.items())}; wanted at least 1 (1: not cut).")
            if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
                raise ValueError(
                    f"virtual_pipeline {self.virtual_pipeline} with pipeline_parallel 1; wanted several pipeline ranks "
                    "to interleave. "
                    "Set pipeline_parallel, or virtual_pipeline: 1."
                )
            if self.sequence_parallel and self.tensor_parallel == 1:
                raise ValueError(
                    "sequence_parallel with tensor_parallel 1; wanted tensor-parallel ranks to cut activations over."
                )

    config: Config

    @classmethod
    def ranks_per_replica(cls, config: Any) -> int:
        """Ranks that hold one copy of the model."""
        return int(config.tensor_parallel * config.pipeline_parallel * config.context_parallel)

    def setup(self, context: Context) -> None:
        """Loads this rank's part of the model and makes the optimiser; all ranks together."""
        super().setup(context)
        from components.learner.megatron.model import Layout, init_parallel
        from components.learner.megatron.optimizer import MegatronOptimizer, data_parallel, finalize_gradients
        from components.models.load import check_context, load_config

        c = self.config
        logging.getLogger("megatron").setLevel(logging.WARNING)  # it lists every parameter of every bucket
        hf_config = load_config(context.model)
        self.max_context = check_context(context.model, hf_config)
        layout = Layout(
            tensor=c.tensor_parallel,
            pipeline=c.pipeline_parallel,
            virtual_pipeline=c.virtual_pipeline,
            context=c.context_parallel,
            sequence=c.sequence_parallel,
        )
        layout.check(hf_config, context.ranks.world)
        dtype = getattr(torch, context.model.dtype)
        distributed = c.distributed_optimizer == "on" or (
            c.distributed_optimizer == "auto" and context.device.startswith("cuda") and context.ranks.num_replicas > 1
        )
        with megatron_on_cpu():
            init_parallel(layout, context.seed)
            self.model = self._load(layout, dtype)
            self.reference = self._load(layout, dtype) if c.objective.kl.coefficient else None
            settings = self.model.transformer_config
            settings.finalize_model_grads_func = finalize_gradients
            self.compute = settings.timers = ComputeClock(context.device)
            settings.calculate_per_token_loss = True  # the loss arrives with its denominators
            self.chunks = data_parallel(settings, self.model.chunks, distributed)
            steps = context.iterations * c.epochs * c.minibatches
            self.optimizer = MegatronOptimizer(self.chunks, c.optimizer, steps, dtype, distributed)
        self.guard = MismatchGuard(c.mismatch)
        self.version = 0
        self.totals = {"tokens": 0, "steps": 0, "skipped_zero_credit": 0, "skipped_nonfinite": 0}

    def _load(self, layout: Any, dtype: torch.dtype) -> Any:
        from components.learner.megatron.model import MegatronModel
        from components.models.load import resolve_model_path

        path = resolve_model_path(self.context.model.path)
        model = MegatronModel.build(path, layout, dtype, self.config.recompute, self.context.device)
        model.load(path)
        return model

    def initial(self) -> dict[str, Any]:
        """The present weights: version 0, or the resumed version after `load_state_dict`."""
        return {"weights": self._weights()}

    def run(self, *, trajectories: Trajectories, credit: Annotated[Credit, same_rows("trajectories")]) -> Outputs:
        """Trains on one rollout batch; all ranks together, each with the batch of all replicas."""
        check_aligned(trajectories, credit)
        with megatron_on_cpu():
            return _Pass(self, trajectories, credit).run(self.guard, self._next_weights)

    def _next_weights(self) -> Weights:
        self.version += 1
        return self._weights()

    @torch.no_grad()
    def _weights(self) -> Weights:
        # All ranks take part in the export; the leader of each replica keeps a snapshot for its engine.
        keep = self.context.ranks.leader
        tensors: dict[str, Tensor] = {}
        with megatron_on_cpu():
            for name, tensor in self.model.export():
                if keep:
                    tensors[name] = tensor.to("cpu")
        return Weights(version=self.version, tensors=tensors if keep else None)

    def state_dict(self) -> dict[str, Any]:
        """The version; the rest is in the shards."""
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuses the state of another learner; `load_shards` brings the weights."""
        if set(state) != {"version"}:
            raise RunError(
                f"learner.megatron: the checkpoint holds {', '.join(sorted(state))}; wanted the shards of "
                "learner.megatron. Resume "
                "with the learner that wrote the run, or start a new run."
            )

    def save_shards(self, folder: Path) -> None:
        """Weights, optimiser, schedule position, version and counters, as a distributed checkpoint that any layout reads."""
        from components.learner.megatron.checkpoint import save_shards

        with megatron_on_cpu():
            save_shards(
                folder, self.model.chunks, self.optimizer, {"version": self.version, "totals": dict(self.totals)}
            )

    def load_shards(self, folder: Path) -> None:
        """Continues from `save_shards` of this or another layout."""
        from components.learner.megatron.checkpoint import load_shards

        with megatron_on_cpu():
            state = load_shards(folder, self.model.chunks, self.optimizer)
        self.version = int(state["version"])
        self.totals = {k: int(v) for k, v in state["totals"].items()}


class _Pass(RolloutPass):
    """One rollout batch on its way through the pipeline."""

    def __init__(self, learner: MegatronLearner, trajectories: Trajectories, credit: Credit) -> None:
        super().__init__(
            learner.config,
            learner.context,
            trajectories,
            credit,
            version=learner.version,
            totals=learner.totals,
            max_context=learner.max_context,
        )
        self.model, self.reference, self.chunks, self.optimizer = (
            learner.model,
            learner.reference,
            learner.chunks,
            learner.optimizer,
        )
        self.compute, self.busy, self.passed = learner.compute, 0.0, 0.0

    def score(self, pieces: list[Tensor], reference: bool) -> list[Jagged]:
        """On the last stage, the log-probs of all micro-batches; nothing on the others."""
        from components.learner.megatron.schedule import run_schedule

        model: Any = self.reference if reference else self.model

        def consume(index: int, batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Jagged]:
            logprobs, _ = model.logprobs(hidden, batch, self.temperature)
            return hidden.new_zeros(()), logprobs

        return run_schedule(
            model.chunks, model.forward, [self.pack(p) for p in pieces], consume, self.context.device, train=False
        )

    def accumulate(self, pieces: list[Tensor], denominators: Tensor, meters: Meters) -> Tensor:
        """Gradients are summed over replicas at the end."""
        from components.learner.megatron.schedule import run_schedule

        def consume(index: int, batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            logprobs, entropies = self.model.logprobs(hidden, batch, self.temperature)
            loss = self.loss(logprobs, entropies, pieces[index], denominators, meters)
            return loss, loss.detach().double()

        batches = [self.pack(p) for p in pieces]
        for batch in batches:
            self.count_work(batch)
        self.optimizer.clear()
        self.compute.take()  # forget the passes of `score`
        begin = time.perf_counter()
        losses = run_schedule(self.chunks, self.model.forward, batches, consume, self.context.device, train=True)
        self.busy += self.compute.take()
        self.passed += time.perf_counter() - begin
        return torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64, device=self.context.device)

    def train(self) -> dict[str, float]:
        """Logs, besides, which share of the passes' time the ranks did not compute in: their mean, and the most idle one's."""
        found = super().train()
        if self.settings.pipeline_parallel > 1:  # type: ignore[attr-defined]
            from components.learner.megatron.schedule import mean_and_most

            mean, most = mean_and_most(1 - self.busy / self.passed if self.passed else 0.0)
            self.context.log(bubble=mean, bubble_max=most)
        return found

    def update(self) -> tuple[float, float, bool]:
        """Decided by the gradient norm over all ranks."""
        return self.optimizer.step()

    def skip_update(self) -> float:
        """Gradients are cleared before the next passes."""
        return self.optimizer.skip()

    def shared(self, value: Tensor) -> Tensor:
        """Summed over replicas on the last stage, which knows it, then sent to the others."""
        from components.learner.megatron.schedule import from_last_stage, is_last_stage

        return from_last_stage(self.context.all_sum(value) if is_last_stage() else value)

    def metrics(self, meters: Meters) -> dict[str, float]:
        """Those of the last stage; the others have none."""
        from components.learner.megatron.schedule import is_last_stage, objects_from_last_stage

        found: dict[str, float] = objects_from_last_stage(super().metrics(meters) if is_last_stage() else {})
        return found
