"""`learner.megatron`: trains causal LMs sharded over tensor, pipeline, context, expert and data parallel ranks."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from creditgraph.components.learner.learner import PolicyLearner
from creditgraph.components.learner.megatron.settings import MegatronSettings, ParallelLayout
from creditgraph.pipeline.core.component import Context, ModelSpec, ShardWrites
from creditgraph.pipeline.core.errors import RunError, not_installed
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Weights
from creditgraph.pipeline.core.versions import check_tested

SOCKETS_PER_RANK = 13  # to each other rank


class MegatronLearner(PolicyLearner):
    """The training step of `learner.hf` on a model sharded over ranks: the same losses, gradients and metrics.

    One replica of the model uses tensor_parallel × pipeline_parallel × context_parallel consecutive ranks; the other
    ranks of a run are further replicas. All ranks of a replica have its rows; it computes its part of every mini-batch,
    in micro-batches that pass through the pipeline together; the objective runs on the last stage, on log-probs of
    whole trajectories.
    """

    metrics = (
        *PolicyLearner.metrics,
        Metric("bubble", "share", "time of the passes in which a pipeline rank did not compute, mean over ranks"),
        Metric("bubble_max", "share", "the same of the most idle rank"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(MegatronSettings):
        """Settings of `learner.megatron`."""

    config: Config

    @classmethod
    def ranks_per_replica(cls, config: Any) -> int:
        """Ranks that hold one copy of the model."""
        return int(config.model_size)

    @classmethod
    def files(cls, config: Any, world: int) -> int:
        """Sockets of megatron-core's groups; counted on gloo, where `expert_parallel` has most."""
        return SOCKETS_PER_RANK * (world - 1)

    @classmethod
    def environment(cls, config: Any) -> dict[str, str]:
        """One queue to each GPU where ranks share matrices or tokens, so that their messages start before the products.

        megatron-core's layers rely on that order on GPUs up to Hopper.
        """
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if config.tensor_parallel * config.context_parallel > 1 else {}

    @classmethod
    def alone(cls, config: Any) -> Any:
        """One rank in every direction."""
        return dataclasses.replace(config, **{f.name: f.default for f in dataclasses.fields(ParallelLayout)})

    @classmethod
    def lacks(cls, node: Any, model: ModelSpec, data: Mapping[str, dict[str, Any]]) -> list[str]:
        """megatron-core."""
        return not_installed("megatron", "learner=megatron")

    def setup(self, context: Context) -> None:
        """Loads this rank's part of the model and makes the optimiser; all ranks call it."""
        super().setup(context)
        check_tested("learner.megatron", "megatron-core", "mbridge", "transformer-engine")
        with warnings.catch_warnings():
            # On import megatron-core warns a dozen times of two optional packages.
            warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
            from creditgraph.components.learner.megatron.backend import MegatronBackend

        logging.getLogger("megatron").setLevel(logging.WARNING)  # it lists every parameter of every bucket
        self.backend: MegatronBackend = MegatronBackend(context, self.config)

    def weights(self) -> Weights:
        """Exports weights or adapters; all ranks call it, and the leader of each replica keeps them for its engine."""
        leader = self.context.ranks.leader
        lora = self.config.lora
        if lora.publish == "adapter":
            pairs = self.backend.export_adapters()
            named = {
                f"base_model.model.{module}.lora_{letter}.weight": tensor
                for module, pair in pairs.items()
                for letter, tensor in zip("AB", pair, strict=True)
            }
            return Weights(version=self.version, tensors=named if leader else None, adapter=lora.published(pairs))
        tensors = {name: tensor.to("cpu") for name, tensor in self.backend.export() if leader}
        return Weights(version=self.version, tensors=tensors if leader else None)

    def state_dict(self) -> dict[str, Any]:
        """Returns the version; all other state is in the shards."""
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises RunError for the state of another learner; `load_shards` restores weights and version."""
        if set(state) != {"version"}:
            raise RunError(
                "learner.megatron: expected the shards of learner.megatron in the checkpoint, got "
                f"{', '.join(sorted(state))}. Resume with the learner that wrote the run, or start a new run."
            )

    def save_shards(self, folder: Path) -> ShardWrites:
        """Weights, optimiser, version and counter, as a distributed checkpoint that any layout reads."""
        return self.backend.save(folder, {"version": self.version, "trained_tokens": self.trained_tokens})

    def load_shards(self, folder: Path) -> None:
        """Continues from `save_shards` of this or another layout."""
        state = self.backend.load(folder)
        self.version = int(state["version"])
        self.trained_tokens = int(state["trained_tokens"])
