"""How a model is sharded over ranks: the sizes, whether a model fits them, and megatron-core's process groups.

Importing this file imports no megatron.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from components.learner.megatron.cpu import megatron_on_cpu
from pipeline.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """How many ranks share one model."""

    tensor_parallel: int = 1
    """ranks that each matrix is sharded over; must divide the attention heads"""
    pipeline_parallel: int = 1
    """ranks that the stack of layers is cut over; where they do not divide evenly the first ranks have one more"""
    virtual_pipeline: int = 1
    """chunks of layers per pipeline rank: smaller bubbles, more communication"""
    context_parallel: int = 1
    """ranks that the tokens of a micro-batch are cut over, for sequences too long for one device"""
    sequence_parallel: bool = False
    """shard activations between matrix products over the tensor-parallel ranks too: less memory"""

    def __post_init__(self) -> None:
        sizes = ("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel")
        small = [f"{name} {getattr(self, name)}" for name in sizes if getattr(self, name) < 1]
        if small:
            raise ValueError(f"expected at least 1 (1: not sharded), got {', '.join(small)}.")
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"virtual_pipeline {self.virtual_pipeline} interleaves pipeline stages, but pipeline_parallel is 1; "
                "set pipeline_parallel, or virtual_pipeline: 1."
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "sequence_parallel shards activations over tensor-parallel ranks, but tensor_parallel is 1; set "
                "tensor_parallel, or sequence_parallel: false."
            )

    @property
    def model_size(self) -> int:
        """Ranks of one replica."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    def stages(self, layers: int) -> list[int]:
        """Layers of each stage in order; where they do not divide evenly, the first have one more.

        The last stage has the output head to compute besides.

        >>> ParallelLayout(pipeline_parallel=2).stages(3)
        [2, 1]
        """
        count = self.pipeline_parallel * self.virtual_pipeline
        return [layers // count + (i < layers % count) for i in range(count)]

    def check(self, config: Any, world: int, path: str = "") -> None:
        """Raises ConfigError with every reason why a model cannot be sharded so over `world` ranks.

        The vocabulary is never a reason: it is padded.

        Args:
            config: transformers' configuration of the model.
            world: ranks of the run.
            path: of the model, for the error.
        """
        with quiet_import():
            from components.learner.megatron.bridge import check_architecture

        problems = self._misfit_of_ranks(world) + (check_architecture(config) or self._misfits_of_model(config))
        if problems:
            name = path or getattr(config, "_name_or_path", "") or getattr(config, "model_type", "?")
            raise ConfigError(f"learner.megatron, model '{name}': " + "; ".join(problems) + ".")

    def _misfit_of_ranks(self, world: int) -> list[str]:
        if world % self.model_size == 0:
            return []
        return [
            f"{world} ranks cannot be cut into replicas of tensor_parallel {self.tensor_parallel} × pipeline_parallel "
            f"{self.pipeline_parallel} × context_parallel {self.context_parallel} = {self.model_size}; expected a "
            f"multiple. Start {self.model_size} ranks or {2 * self.model_size}, or lower one of the three"
        ]

    def _misfits_of_model(self, config: Any) -> list[str]:
        from components.learner.megatron.families import FAMILIES

        out = []
        heads = config.num_attention_heads
        groups = config.num_key_value_heads
        fitting = [
            n
            for n in range(1, heads + 1)
            if heads % n == 0 and config.intermediate_size % n == 0 and (groups % n == 0 or n % groups == 0)
        ]
        if FAMILIES[config.model_type].whole_key_heads:
            fitting = [n for n in fitting if groups % n == 0]
        if self.tensor_parallel not in fitting:
            out.append(
                f"tensor_parallel {self.tensor_parallel} does not fit {heads} attention heads, {groups} key-value "
                f"heads and MLPs of {config.intermediate_size}; it must divide the first and the last, and divide or "
                f"be a multiple of the second. These work: {', '.join(map(str, fitting))}"
            )
        stages = self.pipeline_parallel * self.virtual_pipeline
        layers = config.num_hidden_layers
        if layers < stages:
            what = f"pipeline_parallel {self.pipeline_parallel}"
            what += f" × virtual_pipeline {self.virtual_pipeline} = {stages}" if self.virtual_pipeline > 1 else ""
            out.append(
                f"{what} stages, but the model has {layers} layers; expected at most {layers} stages, at least one "
                "layer in each"
            )
        return out


def init_parallel(layout: ParallelLayout, seed: int = 0) -> None:
    """megatron-core's process groups over the present torch.distributed world, in place of those of another layout.

    The ranks of a replica are neighbours: replica = rank // layout.model_size.
    """
    with quiet_import():
        from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        # A run of one process starts no group, and megatron-core wants one.
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    virtual = layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
    if _sizes() == (layout.tensor_parallel, layout.pipeline_parallel, virtual, layout.context_parallel):
        return
    destroy()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=layout.context_parallel,
        # The supported models have no experts, but replicas of experts must number those of the rest of the model
        # when replicas are outermost.
        expert_tensor_parallel_size=layout.tensor_parallel * layout.context_parallel,
        order="tp-cp-ep-pp-dp",
        # A second set of groups for CPU tensors, which the first already carries without CUDA.
        create_gloo_process_groups=torch.cuda.is_available(),
    )
    # Nothing here draws from these streams (no dropout, weights are loaded), but megatron-core wants them to exist. On
    # a CPU its "CUDA" generator is the default one, which is left as it was.
    keep = contextlib.nullcontext() if torch.cuda.is_available() else torch.random.fork_rng(devices=[])
    with megatron_on_cpu(), keep:
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _sizes() -> tuple[int, int, int | None, int] | None:
    """Tensor, pipeline, virtual pipeline and context size of the present groups; None without groups of this world."""
    from megatron.core import parallel_state

    if not parallel_state.is_initialized() or not _is_alive(parallel_state.get_model_parallel_group()):
        return None
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
    )


def _is_alive(group: Any) -> bool:
    """Whether a group belongs to the present world: torch.distributed may have been started anew."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True


def destroy() -> None:
    """Ends the groups of `init_parallel`, if any."""
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        return
    groups = [g for g in parallel_state._global_process_group_list or [] if g is not None and _is_alive(g)]
    parallel_state.destroy_model_parallel()
    # megatron-core only forgets them; each gloo group keeps threads and sockets.
    for group in groups:
        dist.destroy_process_group(group)


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """For the first import of megatron-core, which warns a dozen times of two optional packages."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
        yield
