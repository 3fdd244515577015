"""`learner.hf`: trains any transformers causal LM, all parameters or LoRA, whole on each rank or sharded (FSDP2)."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.learner.backend import Backend, LossOf
from creditgraph.components.learner.head import plan_head
from creditgraph.components.learner.hf.model import LearnerModel
from creditgraph.components.learner.hf.node import HFNode
from creditgraph.components.learner.hf.settings import HFSettings
from creditgraph.components.learner.hf.sharding import Sharding
from creditgraph.components.learner.learner import PolicyLearner
from creditgraph.components.learner.optimizer import Optimizer, Update
from creditgraph.components.learner.packing.pack import PackedBatch, filler
from creditgraph.pipeline.core.component import Context, ModelSpec, identity_sum
from creditgraph.pipeline.core.errors import not_installed
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Weights


class HFLearner(HFNode, PolicyLearner):
    """Policy-gradient steps on packed micro-batches with global denominators.

    One `run` makes epochs × minibatches optimiser steps. A mini-batch holds all trajectories of some prompts; its loss
    denominators are counted over the whole mini-batch, so the gradient does not depend on `micro_batch_tokens`. Steps
    without any credit, and steps with a non-finite loss or gradient, change no weight and are counted.

    With several replicas each keeps the rows that it made, fetches and computes its part of every mini-batch (rows
    spread by token count), and gradients are summed; all make the same steps. They may share one model, of which each
    holds a shard (`fsdp_size`).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HFSettings):
        """Settings of `learner.hf`."""

    config: Config

    @classmethod
    def alone(cls, config: Any) -> Any:
        """Not sharded."""
        return dataclasses.replace(config, fsdp_size=1)

    @classmethod
    def lacks(cls, node: Any, model: ModelSpec, data: Mapping[str, dict[str, Any]]) -> list[str]:
        """peft, for adapters; a compiler, for torch.compile."""
        missing = not_installed("peft", "learner.lora.rank", "set learner.lora.rank=0") if node.config.lora.rank else []
        if node.config.compile and not any(map(shutil.which, ("g++", "c++", "clang++"))):
            missing.append(
                f"{node.name}.compile: needs a C++ compiler, such as g++. Install one, or set compile=false."
            )
        return missing

    def setup(self, context: Context) -> None:
        """Loads the model and makes the optimiser."""
        super().setup(context)
        from creditgraph.components.models.load import check_context

        model, shards = self.load(context, context.model, self.config)
        max_context = check_context(context.model, model.config)
        self.model = LearnerModel(
            model,
            self.config.lora,
            self.config.recompute,
            self.config.keeps_reference,
            seed=context.seed,
            slow_attention=self.config.compute.slow_attention,
            shards=shards,
            compiled=self.config.compile,
        )
        rows, width = model.get_output_embeddings().weight.shape
        self.model.head_plan = plan_head(
            self.config.compute, (rows, width), self.model.dtype, torch.device(context.device), context.all_sum
        )
        self.optimizer = Optimizer(
            self.model.trainable(),
            self.config.optimizer,
            total_steps=context.iterations * self.config.steps_per_batch,
            no_decay=self.model.embedding_names(),
        )
        self.backend = HFBackend(context, self.model, self.optimizer, max_context, shards[0] if shards else None)

    def weights(self) -> Weights:
        """The whole model, or its adapters with `lora.publish=adapter`."""
        if self.config.lora.publish == "adapter":
            tensors, adapter = self.model.published_adapter()
            return Weights(version=self.version, tensors=tensors, adapter=adapter)
        if self.sharded:
            # For the engine of this rank; not on the GPU, where no rank could hold all of them.
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.backend.export()}
            return Weights(version=self.version, tensors=tensors)
        return Weights(version=self.version, tensors=self.model.published())


class HFBackend(Backend):
    """A transformers model, whole or sharded, and AdamW.

    Args:
        context: context of the learner's node.
        model: the model.
        optimizer: optimizer of its trained parameters.
        max_context: longest sequence the model supports, in tokens.
        sharding: the ranks that hold the model together, or None.
    """

    def __init__(
        self, context: Context, model: LearnerModel, optimizer: Optimizer, max_context: int, sharding: Sharding | None
    ) -> None:
        super().__init__(context)
        self.model = model
        self.optimizer = optimizer
        self.max_context = max_context
        self.packs = model.packs
        self._sharding = sharding

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
            out = [self.model.reference_logprobs(batch, temperature) for _, batch in self._together(batches)]
        else:
            out = [self.model.logprobs(batch, temperature)[0] for _, batch in self._together(batches)]
        return out

    def forward_backward(self, batches: Iterable[PackedBatch], temperature: float, loss: LossOf) -> Tensor:
        """Accumulates gradients in the parameters, or in their float32 copies."""
        total = torch.zeros((), dtype=torch.float64, device=self.context.device)
        for number, batch in self._together(batches):
            logprobs, entropies = self.model.logprobs(batch, temperature)
            share = logprobs.values.sum() * 0.0 if number < 0 else loss(number, logprobs, entropies)
            share.backward()  # type: ignore[no-untyped-call]
            self.optimizer.collect()
            total += share.detach()
        return total

    def _together(self, batches: Iterable[PackedBatch]) -> Iterator[tuple[int, PackedBatch]]:
        """The micro-batches with their numbers; where ranks share a model, fillers (number −1) until all have as many.

        A pass gathers parameters from all ranks, so a rank with fewer micro-batches takes part in the others' passes.
        """
        if self._sharding is None:
            yield from enumerate(batches)
            return
        own = list(batches)
        missing = self._sharding.most(len(own)) - len(own)  # before the first pass, as on all ranks
        yield from enumerate(own)
        for _ in range(missing):
            yield -1, filler(self.context.device)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in Hugging Face names; see `LearnerModel.export`."""
        return self.model.export()

    def update(self) -> Update:
        """Sums gradients over replicas, which sharded ones already are, then updates."""
        summed = self._sharding is not None or self.context.all_sum is identity_sum
        return self.optimizer.step(None if summed else self.context.all_sum)

    def skip_update(self) -> Update:
        """Advances the schedule and drops gradients."""
        return self.optimizer.skip()
