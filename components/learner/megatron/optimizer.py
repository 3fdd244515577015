"""AdamW of megatron-core with the settings, the schedule and the skipped steps of `learner/optimizer.py`.

megatron-core keeps float32 main weights for narrower parameters, sums gradients over data-parallel replicas in float32
and, as the distributed optimizer, shards main weights and moments over them. By default it would decay norms and biases
(its multipliers act only through its own scheduler) and take a step on a NaN; this class prevents both.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from torch import Tensor, nn

from creditgraph.components.learner.optimizer import OptimizerSettings, Schedule, Update


def data_parallel(
    config: Any, chunks: Sequence[nn.Module], distributed: bool, ddp: Mapping[str, Any]
) -> list[nn.Module]:
    """Wraps model chunks so that their gradients are summed over replicas, in float32.

    Args:
        config: the TransformerConfig of the chunks.
        chunks: GPTModels of this rank, in virtual pipeline order.
        distributed: prepare for the distributed optimizer.
        ddp: further fields of DistributedDataParallelConfig.
    """
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, **ddp)
    wrapped = [
        DistributedDataParallel(config, settings, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if settings.overlap_grad_reduce:
        # Only gradients of the last micro-batch are complete.
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def finalize_gradients(chunks: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Sums gradients over replicas, tied embeddings and sequence-parallel norms; the loss has its denominators."""
    finalize_model_grads(chunks, None, **kwargs)


class MegatronOptimizer:
    """AdamW over the chunks of this rank.

    Args:
        chunks: wrapped by `data_parallel`.
        settings: settings of AdamW and the schedule.
        total_steps: planned optimiser steps, for the schedule.
        dtype: dtype of the parameters.
        distributed: whether to shard main weights and moments over replicas.
    """

    def __init__(
        self,
        chunks: list[nn.Module],
        settings: OptimizerSettings,
        total_steps: int,
        dtype: torch.dtype,
        distributed: bool,
    ) -> None:
        self.settings = settings
        self.schedule = Schedule(settings, total_steps)
        self.chunks = chunks
        wrapped: Any = chunks[0]
        self._gathers_later: bool = distributed and wrapped.ddp_config.overlap_param_gather
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.grad_clip,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            overlap_param_gather=self._gathers_later,
        )
        rule = ParamKey(
            with_name_predicate=ParamWithNamePredicate(name="no_decay", fn=lambda p, name: not self._decays(p, name))
        )
        overrides: Any = {rule: {"wd_mult": 0.0}}
        # Groups of gloo would gather the state of checkpoints, which shards.py does without.
        self.inner: Any = get_megatron_optimizer(config, chunks, overrides, use_gloo_process_groups=False)
        self.set_weight_decay()

    def set_weight_decay(self) -> None:
        """Sets the weight decay of each parameter group from the settings; loading a checkpoint overwrites it."""
        for group in self.inner.param_groups:
            group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]

    def _decays(self, parameter: Tensor, name: str) -> bool:
        # The same parameters as learner.hf: weight matrices without embedding and output head.
        return parameter.dim() > 1 and not any(n in name for n in ("word_embeddings", "output_layer"))

    def offloadable(self) -> tuple[list[Tensor], list[Tensor]]:
        """Main weights, moments and gradient buffers; and the parameters, which stay."""
        tensors: list[Tensor] = []
        for part in self.inner.chained_optimizers:
            if not part.is_stub_optimizer:
                tensors += [p for group in part.optimizer.param_groups for p in group["params"]]
                moments = part.optimizer.state.values()
                tensors += [v for state in moments for v in state.values() if isinstance(v, Tensor)]
        chunks: list[Any] = self.chunks
        for chunk in chunks:
            tensors += [buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return tensors, [p for chunk in chunks for p in chunk.parameters()]

    def clear(self) -> None:
        """Drops all gradients; call before the passes of a step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self) -> Update:
        """Clips and updates, the same on all ranks; a non-finite gradient changes nothing but the schedule."""
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        rate = self.schedule.advance()
        if not math.isfinite(norm):
            return Update(norm, rate, applied=False)
        for part in self.inner.chained_optimizers:
            parameters = [] if part.is_stub_optimizer else part.get_parameters()
            if parameters and self.settings.grad_clip:
                clip_grad_by_total_norm_fp32(parameters, self.settings.grad_clip, norm)
        for group in self.inner.param_groups:
            group["lr"] = rate
        self.inner.step_with_ready_grads()
        return Update(norm, rate, applied=True)

    def gather_weights(self) -> None:
        """Makes this rank's weights whole where the gather after a step was left for the next pass."""
        if self._gathers_later:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)  # type: ignore[operator]

    def skip(self) -> Update:
        """Counts a step without an update; gradients are dropped before the next passes."""
        return Update(0.0, self.schedule.advance(), applied=False)
