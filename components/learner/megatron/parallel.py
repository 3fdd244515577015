"""Checks that a model fits a layout, and makes megatron-core's process groups for it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from components.learner.megatron.bridge import check_architecture
from components.learner.megatron.cpu import megatron_on_cpu
from components.learner.megatron.families import FAMILIES
from components.learner.megatron.settings import ParallelLayout
from pipeline.core.errors import ConfigError


def check_layout(layout: ParallelLayout, config: Any, path: str) -> None:
    """Raises ConfigError with every reason why a model is not supported or cannot be sharded in this layout.

    The vocabulary is never a reason: it is padded.

    Args:
        layout: the sizes.
        config: transformers' configuration of the model.
        path: path of the model, for the error.
    """
    problems = check_architecture(config) or _misfits(layout, config)
    if problems:
        raise ConfigError(f"learner.megatron, model '{path}': " + "; ".join(problems) + ".")


def _misfits(layout: ParallelLayout, config: Any) -> list[str]:
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
    if layout.tensor_parallel not in fitting:
        out.append(
            f"tensor_parallel {layout.tensor_parallel} does not fit {heads} attention heads, {groups} key-value "
            f"heads and MLPs of {config.intermediate_size}; it must divide the first and the last, and divide or "
            f"be a multiple of the second. These work: {', '.join(map(str, fitting))}"
        )
    stages = layout.pipeline_parallel * layout.virtual_pipeline
    layers = config.num_hidden_layers
    if layers < stages:
        what = f"pipeline_parallel {layout.pipeline_parallel}"
        what += f" × virtual_pipeline {layout.virtual_pipeline} = {stages}" if layout.virtual_pipeline > 1 else ""
        out.append(
            f"{what} stages, but the model has {layers} layers; expected at most {layers} stages, at least one "
            "layer in each"
        )
    return out


def init_parallel(layout: ParallelLayout, seed: int = 0) -> None:
    """Makes megatron-core's process groups in the present torch.distributed world, replacing those of another layout.

    The ranks of a replica are neighbours: replica = rank // layout.model_size.
    """
    if not dist.is_initialized():
        # A run of one process has no process group, and megatron-core requires one.
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
    # These streams are not used (no dropout, weights are loaded), but megatron-core requires them. On a CPU its "CUDA"
    # generator is the default one, whose state is restored.
    keep = contextlib.nullcontext() if torch.cuda.is_available() else torch.random.fork_rng(devices=[])
    with megatron_on_cpu(), keep:
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _sizes() -> tuple[int, int, int | None, int] | None:
    """Tensor, pipeline, virtual pipeline and context size of the present groups; None when there are none."""
    if not parallel_state.is_initialized():
        return None
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
    )


def destroy() -> None:
    """Ends the groups of `init_parallel`, if any."""
    if not parallel_state.is_initialized():
        return
    groups = [g for g in parallel_state._global_process_group_list or [] if g is not None]
    parallel_state.destroy_model_parallel()
    # megatron-core only forgets them; each gloo group keeps threads and sockets.
    for group in groups:
        dist.destroy_process_group(group)
