"""`learner.megatron`: trains causal LMs sharded over tensor, pipeline, context and data parallel ranks."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from components.learner.learner import PolicyLearner
from components.learner.megatron.clock import ComputeClock
from components.learner.megatron.cpu import megatron_on_cpu
from components.learner.megatron.parallel import ParallelLayout, init_parallel
from components.learner.objective import Meters
from components.learner.optimizer import Update
from components.learner.packing.pack import PackedBatch
from components.learner.settings import LearnerSettings
from components.learner.step import Backend, LossOf
from pipeline.core.component import Context
from pipeline.core.errors import RunError
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Weights


class MegatronLearner(PolicyLearner):
    """The training step of `learner.hf` on a model sharded over ranks: the same losses, gradients and metrics.

    One replica of the model takes tensor_parallel × pipeline_parallel × context_parallel ranks, neighbours in rank; the
    other ranks of a run are further replicas. Every rank has the whole batch; a replica computes its part of every
    mini-batch, in micro-batches that go through the pipeline together; the objective runs on the last stage, on
    log-probs of whole trajectories.
    Trains all parameters: megatron-core has no LoRA of its own, and `learner.hf` has.
    """

    metrics = (
        *PolicyLearner.metrics,
        Metric("bubble", "share", "time of the passes in which a pipeline rank did not compute, mean over ranks"),
        Metric("bubble_max", "share", "the same of the most idle rank"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(LearnerSettings, ParallelLayout):
        """Settings of `learner.megatron`: those of every learner, and how the model is sharded."""

        distributed_optimizer: Literal["auto", "on", "off"] = "auto"
        """shard float32 weights and moments over replicas; auto: on GPUs when there are several replicas"""

        def __post_init__(self) -> None:
            LearnerSettings.__post_init__(self)
            ParallelLayout.__post_init__(self)
            if self.lora.rank:
                raise ValueError(
                    f"lora.rank is {self.lora.rank}, but learner.megatron trains all parameters; set lora.rank: 0, or "
                    "use learner.hf."
                )

        @property
        def layout(self) -> ParallelLayout:
            """How the model is sharded."""
            return ParallelLayout(**{f.name: getattr(self, f.name) for f in dataclasses.fields(ParallelLayout)})

    config: Config

    @classmethod
    def ranks_per_replica(cls, config: Any) -> int:
        """Ranks that hold one copy of the model."""
        return int(config.model_size)

    def setup(self, context: Context) -> None:
        """Loads this rank's part of the model and makes the optimiser; all ranks together."""
        super().setup(context)
        from components.models.load import check_context, load_config

        logging.getLogger("megatron").setLevel(logging.WARNING)  # it lists every parameter of every bucket
        hf_config = load_config(context.model)
        max_context = check_context(context.model, hf_config)
        self.config.layout.check(hf_config, context.ranks.world)
        with megatron_on_cpu():
            init_parallel(self.config.layout, context.seed)
            self.backend: MegatronBackend = MegatronBackend(context, self.config, max_context)
        self.model = self.backend.model
        self.optimizer = self.backend.optimizer

    @torch.no_grad()
    def weights(self) -> Weights:
        """All ranks take part in the export; the leader of each replica keeps a snapshot for its engine."""
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
                "learner.megatron: expected the shards of learner.megatron in the checkpoint, got "
                f"{', '.join(sorted(state))}. Resume with the learner that wrote the run, or start a new run."
            )

    def save_shards(self, folder: Path) -> None:
        """Weights, optimiser, version and counter, as a distributed checkpoint that any layout reads."""
        from components.learner.megatron.checkpoint import save_shards

        state = {"version": self.version, "trained_tokens": self.trained_tokens}
        with megatron_on_cpu():
            save_shards(folder, self.model.chunks, self.optimizer, state)

    def load_shards(self, folder: Path) -> None:
        """Continues from `save_shards` of this or another layout."""
        from components.learner.megatron.checkpoint import load_shards

        with megatron_on_cpu():
            state = load_shards(folder, self.model.chunks, self.optimizer)
        self.version = int(state["version"])
        self.trained_tokens = int(state["trained_tokens"])


class MegatronBackend(Backend):
    """This rank's part of a model, and megatron-core's optimiser over it. The last stage knows losses and log-probs.

    Args:
        context: of the learner's node.
        config: settings of the learner.
        max_context: tokens the model takes.
    """

    def __init__(self, context: Context, config: MegatronLearner.Config, max_context: int) -> None:
        super().__init__(context)
        from components.learner.megatron.optimizer import MegatronOptimizer, data_parallel, finalize_gradients

        self.max_context = max_context
        self.model = self._load(config)
        self.reference = self._load(config) if config.keeps_reference else None
        self.pipelined = config.pipeline_parallel > 1
        settings = self.model.transformer_config
        settings.finalize_model_grads_func = finalize_gradients
        self.clock = settings.timers = ComputeClock(context.device)
        settings.calculate_per_token_loss = True  # the loss arrives with its denominators
        several = context.device.startswith("cuda") and context.ranks.num_replicas > 1
        distributed = config.distributed_optimizer == "on" or (config.distributed_optimizer == "auto" and several)
        self.chunks = data_parallel(settings, self.model.chunks, distributed)
        steps = context.iterations * config.steps_per_batch
        dtype = getattr(torch, context.model.dtype)
        self.optimizer = MegatronOptimizer(self.chunks, config.optimizer, steps, dtype, distributed)
        self._computed = 0.0
        self._passed = 0.0

    def _load(self, config: MegatronLearner.Config) -> Any:
        from components.learner.megatron.model import MegatronModel
        from components.models.load import resolve_model_path

        spec = self.context.model
        path = resolve_model_path(spec.path)
        dtype = getattr(torch, spec.dtype)
        model = MegatronModel.build(path, config.layout, dtype, config.recompute, self.context.device)
        model.load(path)
        return model

    def score(self, batches: Iterable[PackedBatch], temperature: float, reference: bool) -> list[Jagged]:
        """On the last stage, the log-probs of all micro-batches; nothing on the others."""
        from components.learner.megatron.schedule import run_schedule

        model: Any = self.reference if reference else self.model

        def consume(number: int, batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Jagged]:
            logprobs, _ = model.logprobs(hidden, batch, temperature)
            return hidden.new_zeros(()), logprobs

        with megatron_on_cpu():
            return run_schedule(model.chunks, model.forward, list(batches), consume, self.context.device, train=False)

    def forward_backward(self, batches: Iterable[PackedBatch], temperature: float, loss: LossOf) -> Tensor:
        """Gradients are summed over replicas at the end."""
        from components.learner.megatron.schedule import run_schedule

        def consume(number: int, batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            share = loss(number, *self.model.logprobs(hidden, batch, temperature))
            return share, share.detach().double()

        with megatron_on_cpu():
            packed = list(batches)
            self.optimizer.clear()
            self.clock.take()  # forget the passes of `score`
            start = time.perf_counter()
            losses = run_schedule(self.chunks, self.model.forward, packed, consume, self.context.device, train=True)
            self._computed += self.clock.take()
            self._passed += time.perf_counter() - start
        return torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64, device=self.context.device)

    def update(self) -> Update:
        """Decided by the gradient norm over all ranks."""
        with megatron_on_cpu():
            return self.optimizer.step()

    def skip_update(self) -> Update:
        """Gradients are cleared before the next passes."""
        return self.optimizer.skip()

    def sum(self, value: Tensor) -> Tensor:
        """Summed over replicas on the last stage, which knows it, then sent to the others."""
        from components.learner.megatron.schedule import from_last_stage, is_last_stage

        return from_last_stage(self.context.all_sum(value) if is_last_stage() else value)

    def values(self, meters: Meters) -> dict[str, float]:
        """Those of the last stage; the others have none."""
        from components.learner.megatron.schedule import is_last_stage, objects_from_last_stage

        values: dict[str, float] = objects_from_last_stage(super().values(meters) if is_last_stage() else {})
        return values

    def pass_metrics(self) -> dict[str, float]:
        """The share of the passes' time in which the ranks did not compute: their mean, and the most idle one's."""
        from components.learner.megatron.schedule import mean_and_maximum

        if not self.pipelined:
            return {}
        mean, largest = mean_and_maximum(1 - self._computed / self._passed if self._passed else 0.0)
        self._computed = 0.0
        self._passed = 0.0
        return {"bubble": mean, "bubble_max": largest}
