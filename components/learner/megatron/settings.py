"""Settings of `learner.megatron`. Importing this file imports no megatron."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from components.learner.settings import LearnerSettings

Recompute = Literal["none", "selective", "full"]
Kernel = Literal["auto", "torch", "flash", "cudnn"]


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Numbers of ranks that share one model."""

    tensor_parallel: int = 1
    """ranks that each matrix is sharded over; must divide the attention heads"""
    pipeline_parallel: int = 1
    """ranks that the stack of layers is sharded over; if layers do not divide evenly, the first ranks have one more"""
    virtual_pipeline: int = 1
    """chunks of layers per pipeline rank: smaller bubbles, more communication"""
    context_parallel: int = 1
    """ranks that the tokens of a micro-batch are sharded over, for sequences too long for one device"""
    expert_parallel: int = 1
    """ranks that the experts of a layer are sharded over; they are tensor and context parallel ranks and replicas"""
    sequence_parallel: bool = False
    """shard activations between matrix products over the tensor-parallel ranks too: less memory"""

    def __post_init__(self) -> None:
        sizes = ("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel", "expert_parallel")
        small = [f"{name} {getattr(self, name)}" for name in sizes if getattr(self, name) < 1]
        if small:
            raise ValueError(f"expected at least 1 (1: not sharded), got {', '.join(small)}.")
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"virtual_pipeline {self.virtual_pipeline} interleaves pipeline stages, but pipeline_parallel is 1; "
                "set pipeline_parallel, or virtual_pipeline: 1."
            )
        ranks = self.tensor_parallel * self.context_parallel
        if self.expert_parallel % ranks and ranks % self.expert_parallel:
            raise ValueError(
                f"expert_parallel {self.expert_parallel} does not fit tensor_parallel {self.tensor_parallel} × "
                f"context_parallel {self.context_parallel} = {ranks} ranks; expected a divisor of {ranks}, or a "
                "multiple to shard experts over several replicas."
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

        The last stage also computes the output head.

        >>> ParallelLayout(pipeline_parallel=2).stages(3)
        [2, 1]
        """
        count = self.pipeline_parallel * self.virtual_pipeline
        return [layers // count + (i < layers % count) for i in range(count)]


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """Matrix products in 8 bits, by TransformerEngine; parameters, attention and output head stay as they are."""

    recipe: Literal["off", "delayed", "tensorwise", "blockwise", "mxfp8"] = "off"
    """how tensors are scaled to 8 bits: delayed, one factor per tensor, from earlier steps; tensorwise, one per tensor,
    from itself; blockwise, one per 128 numbers or 128 × 128 weights (Hopper); mxfp8, one per 32 numbers (Blackwell)"""
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """hybrid: e4m3 forward, e5m2 with its larger range for gradients; e4m3: for both"""

    @property
    def token_multiple(self) -> int:
        """Tokens, and widths of matrices, come in multiples of this: one block, or the tile of an 8-bit product."""
        return {"off": 1, "blockwise": 128, "mxfp8": 32}.get(self.recipe, 16)


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """The library that computes the layers of the model, and its precision."""

    library: Literal["auto", "local", "transformer_engine"] = "auto"
    """matrices and norms: local, megatron-core's own; transformer_engine, its fused norms and matrices, on GPUs; auto,
    TransformerEngine on a GPU where it is installed"""
    attention: Kernel = "auto"
    """kernel of plain packed rows on a GPU: torch, its flash attention; flash and cudnn, TransformerEngine's
    FlashAttention (version 3 where installed) and cuDNN; auto, the fastest of those that are installed, measured at the
    start. Rows with shared prefixes or windows, and context parallel, have torch's"""
    fp8: Fp8 = field(default_factory=Fp8)
    """matrix products in 8 bits, with TransformerEngine's layers on GPUs of compute capability 8.9 and newer"""


@dataclass(frozen=True, kw_only=True)
class MegatronSettings(LearnerSettings, ParallelLayout):
    """Settings of `learner.megatron`: those of every learner, how the model is sharded, and what its layers are."""

    layers: LayerSettings = field(default_factory=LayerSettings)
    """library, attention kernel and 8-bit products of the layers"""

    recompute: Recompute = "none"
    """activations computed again in the backward pass: none; selective, attention scores; full, all but the layers'
    inputs: least memory, about a third more time"""
    distributed_optimizer: Literal["auto", "on", "off"] = "auto"
    """shard float32 weights and moments over replicas; auto: on GPUs when there are several replicas"""

    def __post_init__(self) -> None:
        LearnerSettings.__post_init__(self)
        ParallelLayout.__post_init__(self)
