"""Checks that a model fits a layout, and makes megatron-core's process groups for it."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from creditgraph.components.learner.megatron.bridge import check_architecture
from creditgraph.components.learner.megatron.cpu import megatron_on_cpu
from creditgraph.components.learner.megatron.experts import expert_layers, has_experts, neighbouring_replicas
from creditgraph.components.learner.megatron.families import FAMILIES
from creditgraph.components.learner.megatron.settings import ParallelLayout
from creditgraph.pipeline.core.errors import ConfigError


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
    width = _dense_width(config)
    fitting = [n for n in range(1, heads + 1) if heads % n == width % n == 0 and (groups % n == 0 or n % groups == 0)]
    if FAMILIES[config.model_type].whole_key_heads:
        fitting = [n for n in fitting if groups % n == 0]
    if layout.tensor_parallel not in fitting:
        what = f"{heads} attention heads{',' if width else ' and'} {groups} key-value heads"
        whole = "the first"
        if width:
            what += f" and MLPs of {width}"
            whole = "the first and the last"
        out.append(
            f"tensor_parallel {layout.tensor_parallel} does not fit {what}; it must divide {whole}, and divide or be a "
            f"multiple of the second. These work: {', '.join(map(str, fitting))}"
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
    return out + _expert_misfits(layout, config)


def _dense_width(config: Any) -> int:
    """Width of MLPs sharded over tensor-parallel ranks; 0 where all layers have experts, which stay whole."""
    return 0 if has_experts(config) and all(expert_layers(config)) else int(config.intermediate_size)


def _expert_misfits(layout: ParallelLayout, config: Any) -> list[str]:
    size = layout.expert_parallel
    if not has_experts(config):
        text = f"expert_parallel {size} shards experts, but this {config.model_type} has none; set expert_parallel: 1"
        return [text] if size > 1 else []
    out = []
    if config.num_experts_per_tok == 1 and config.norm_topk_prob:
        out.append(
            "num_experts_per_tok 1 with norm_topk_prob, a router whose weight is always 1, is not supported. "
            "Use learner.hf"
        )
    if config.num_experts % size:
        fitting = [n for n in range(1, config.num_experts + 1) if config.num_experts % n == 0]
        out.append(
            f"expert_parallel {size} does not divide {config.num_experts} experts. These work: "
            f"{', '.join(map(str, fitting))}"
        )
    if layout.tensor_parallel > 1 and not layout.sequence_parallel:
        out.append(
            f"tensor_parallel {layout.tensor_parallel} of a model with experts needs sequence_parallel: true, so that "
            "no token is routed twice"
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
    wanted = (layout.tensor_parallel, layout.pipeline_parallel, virtual, layout.context_parallel)
    if _sizes() == (*wanted, layout.expert_parallel):
        return
    ranks = dist.get_world_size() // layout.pipeline_parallel
    if ranks % layout.expert_parallel:
        replicas = dist.get_world_size() // layout.model_size
        multiple = layout.expert_parallel // (layout.tensor_parallel * layout.context_parallel)
        raise ConfigError(
            f"learner.megatron: expert_parallel {layout.expert_parallel} shards experts over {multiple} replicas, but "
            f"the run has {replicas}; expected a multiple of {multiple}. Start another number of ranks, or set "
            "expert_parallel."
        )
    destroy()
    with neighbouring_replicas(layout.tensor_parallel * layout.context_parallel):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor_parallel,
            pipeline_model_parallel_size=layout.pipeline_parallel,
            virtual_pipeline_model_parallel_size=virtual,
            context_parallel_size=layout.context_parallel,
            expert_model_parallel_size=layout.expert_parallel,
            # Experts stay whole: the matrices of the supported models' experts are small.
            expert_tensor_parallel_size=1,
            order="tp-cp-ep-dp-pp",
            create_gloo_process_groups=False,  # no tensor on a CPU is sent in them
        )
    # These streams are not used (no dropout, weights are loaded), but megatron-core requires them. On a CPU its "CUDA"
    # generator is the default one, whose state is restored.
    keep = contextlib.nullcontext() if torch.cuda.is_available() else torch.random.fork_rng(devices=[])
    with megatron_on_cpu(), keep:
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _sizes() -> tuple[int, int, int | None, int, int] | None:
    """Tensor, pipeline, virtual pipeline, context and expert size of the present groups; None when there are none."""
    if not parallel_state.is_initialized():
        return None
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
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
