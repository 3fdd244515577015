"""Estimates memory and step time of a learner on paper, and ranks the layouts that fit.

For choosing a layout before a GPU is allocated. It counts bytes and floating-point operations from the model's shape
(components/models/shape.py) and divides them by the rates of the device (components/models/gpus.py). What it leaves out
(stragglers, kernel launches, uneven packs) is in the device's fractions. `creditgraph plan --check` compares its
throughput with published figures: docs/scaling.md says how far they agree.

Sources: activation bytes after 2205.05198 (attention scores are never stored), adapted to grouped queries and gated
MLPs; bubble of the interleaved schedule from 2104.04473.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from creditgraph.components.models.gpus import Device
from creditgraph.components.models.shape import Shape
from creditgraph.pipeline.core.errors import ConfigError

Recompute = Literal["none", "full"]
Kind = Literal["hf", "megatron"]
HEAD_COPIES = 4  # float32 copies of a chunk of logits at the peak of a backward pass
BATCH_BYTES = 90  # of a token that a rank passes: its packed micro-batch with shared prefixes (73) and log-probs


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Arrangement of the ranks; `world` is a multiple of tensor × pipeline × context.

    Attributes:
        world: ranks in all.
        tensor, pipeline, virtual, context, expert: ranks (or chunks) that `learner.megatron` shards over.
        shard: ranks that `learner.hf` shards weights, gradients and optimiser over; 1: none.
        recompute: activations computed again in the backward pass.
    """

    world: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    shard: int = 1
    recompute: Recompute = "none"

    @property
    def ranks(self) -> int:
        """GPUs of one replica, in the sense of shares of the batch."""
        return self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """Replicas."""
        return self.world // self.ranks

    def __str__(self) -> str:
        """Such as "TP 4, PP 2, VPP 4, DP 16"."""
        sizes = (("TP", self.tensor), ("PP", self.pipeline), ("VPP", self.virtual), ("CP", self.context))
        parts = [f"{name} {size}" for name, size in (*sizes, ("EP", self.expert), ("FSDP", self.shard)) if size > 1]
        return ", ".join([*parts, f"DP {self.data}"]) + (", recompute" if self.recompute == "full" else "")


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a learner holds and trains a model.

    Attributes:
        kind: which learner.
        lora: rank of adapters; 0: all parameters are trained.
        bytes: bytes of a weight that computes.
        reference: whether a frozen copy stays in memory.
        published: whether a copy of the weights for engines is on the GPU.
        distributed_optimizer: whether `learner.megatron` shards the optimiser over replicas.
    """

    kind: Kind = "megatron"
    lora: int = 0
    bytes: int = 2
    reference: bool = False
    published: bool = False
    distributed_optimizer: bool = True


@dataclass(frozen=True, kw_only=True)
class Work:
    """One learner iteration.

    Attributes:
        tokens: trained tokens of the whole batch, prompts included, shared prefixes counted once.
        length: tokens of a sequence, for attention.
        pack: tokens of a micro-batch.
        steps: optimiser steps the batch is split into.
        forward_passes: further forward-only passes (recomputed old log-probs, a reference policy).
        paths: tokens of the rows' whole paths over those computed; attention copies keys and values of that many.
        head_elements: logits computed at once.
        reserved: fraction of the memory for other uses: fragmentation, NCCL.
    """

    tokens: float
    length: float = 4096
    pack: float = 8192
    steps: int = 1
    forward_passes: int = 0
    paths: float = 1.0
    head_elements: float = 2**27
    reserved: float = 0.15


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The cost of a layout, per GPU and iteration.

    Attributes:
        bytes: what takes memory → bytes.
        times: what takes time → seconds.
        utilisation: share of the vendor's rate that useful operations reach.
    """

    layout: Layout
    bytes: dict[str, float]
    times: dict[str, float]
    utilisation: float

    @property
    def memory(self) -> float:
        """Bytes in all."""
        return sum(self.bytes.values())

    @property
    def seconds(self) -> float:
        """Seconds of the iteration."""
        return sum(self.times.values())


MEGATRON = Training()


def estimate(shape: Shape, layout: Layout, work: Work, device: Device, training: Training = MEGATRON) -> Estimate:
    """Memory and time of one iteration."""
    replica_tokens = work.tokens / layout.data
    micro_batches = max(1, math.ceil(replica_tokens / work.steps / work.pack))
    # A backward pass costs two forward passes, and without gradients of the weights one.
    backward = 1 if training.lora else 2
    useful = 1 + backward + work.forward_passes
    passes = useful + (1 if layout.recompute == "full" else 0)
    flops = shape.forward_flops(replica_tokens, replica_tokens * work.length / 2, replica_tokens) / layout.ranks
    compute = passes * flops / device.rate(shape.experts)
    token_layers = replica_tokens * passes / 3 * shape.layers / layout.pipeline / layout.context
    times = {
        "compute": compute,
        "bubble": compute * (layout.pipeline - 1) / (micro_batches * layout.virtual),
        "TP": _tensor_seconds(shape, layout, token_layers, device),
        "CP": _context_seconds(shape, layout, token_layers, device),
        "EP": _expert_seconds(shape, layout, token_layers, device),
        "DP": work.steps * _data_seconds(shape, layout, micro_batches, device, training),
    }
    seconds = sum(times.values())
    return Estimate(
        layout=layout,
        bytes=_state_bytes(shape, layout, training) | _work_bytes(shape, layout, work, training),
        times=times,
        utilisation=useful * flops / seconds / device.matmul if seconds else 0.0,
    )


def plan(
    shape: Shape, world: int, work: Work, device: Device, training: Training = MEGATRON, shared: float = 0.0
) -> list[Estimate]:
    """Estimates of the layouts that fit the memory, best first; raises ConfigError when none does.

    Layouts within 3 % of the fastest, a difference below the accuracy of the formulas, are ordered by fewest ranks per
    replica; all others by time. `shared`: bytes that an engine takes on each of these GPUs.
    """
    budget = device.memory * (1 - work.reserved) - shared
    estimates = [estimate(shape, layout, work, device, training) for layout in layouts(shape, world, device, training)]
    fitting = [e for e in estimates if e.memory <= budget and work.tokens / e.layout.data / work.steps >= 1]
    if not fitting:
        least = min(estimates, key=lambda e: e.memory)
        raise ConfigError(
            f"plan: {shape.name} on {world} × {device.name}: the smallest layout ({least.layout}) needs "
            f"{least.memory / 1e9:.0f} GB per GPU; expected at most {budget / 1e9:.0f} GB. Use more GPUs, or smaller "
            "packs."
        )
    # Fewer ranks per replica are easier to run, and leave more replicas to spread the optimiser over.
    near = 1.03 * min(e.seconds for e in fitting)
    return sorted(
        fitting,
        key=lambda e: (False, e.layout.ranks, e.seconds) if e.seconds <= near else (True, e.seconds, e.layout.ranks),
    )


def layouts(shape: Shape, world: int, device: Device, training: Training = MEGATRON) -> Iterator[Layout]:
    """Layouts with equal stages: heads divisible by TP, TP inside a node, layers divisible by PP × VPP.

    `learner.megatron` supports uneven stages and context parallelism too; `learner.hf` is sharded over no ranks,
    those of a node, or all.
    """
    recomputes: tuple[Recompute, ...] = ("none", "full")
    if training.kind == "hf":
        for shard in dict.fromkeys(n for n in (1, device.node, world) if world % n == 0):
            for recompute in recomputes:
                yield Layout(world=world, shard=shard, recompute=recompute)
        return
    # Tensor parallel ranks exchange activations in every layer, which only the fast link inside a node carries.
    for tensor in _divisors(math.gcd(shape.heads, world), device.node):
        if shape.kv_heads % tensor and tensor % shape.kv_heads:
            continue
        for pipeline in _divisors(world // tensor, shape.layers):
            if shape.layers % pipeline:
                continue
            virtuals = [v for v in (1, 2, 4) if shape.layers % (pipeline * v) == 0] if pipeline > 1 else [1]
            experts = _divisors(math.gcd(shape.experts, world // pipeline), device.node) if shape.experts else [1]
            for virtual in virtuals:
                for expert in (e for e in experts if e % tensor == 0 or tensor % e == 0):
                    for recompute in recomputes:
                        yield Layout(
                            world=world,
                            tensor=tensor,
                            pipeline=pipeline,
                            virtual=virtual,
                            expert=expert,
                            recompute=recompute,
                        )


def _divisors(number: int, most: int) -> list[int]:
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


def _stage_parameters(shape: Shape, layout: Layout) -> tuple[float, float]:
    """Weights of the fullest stage on one GPU: those beside experts, and experts.

    With several stages, each end has one of the embeddings.
    """
    ends = shape.embedding_parameters * (1 if layout.pipeline > 1 or shape.tied else 2)
    layers = shape.layers / layout.pipeline
    if not shape.experts:
        return (layers * shape.layer_parameters + ends) / layout.tensor, 0.0
    # Experts are not divided over tensor parallel ranks.
    beside = (layers * shape.attention_parameters + ends) / layout.tensor
    return beside, layers * shape.mlp_parameters / layout.expert


def _state_bytes(shape: Shape, layout: Layout, training: Training) -> dict[str, float]:
    """Weights, gradients and optimiser on one GPU; gradients, master weights and moments are fp32."""
    beside, experts = _stage_parameters(shape, layout)
    held = beside + experts
    if training.lora:
        share = held / shape.parameters
        adapters = shape.lora_parameters(training.lora) * share
        out = {"weights": training.bytes * held, "gradients": 4 * adapters, "optimiser": 12 * adapters}
        # Reference log-probs come from the model without its adapters.
    elif training.kind == "megatron":
        replicas = layout.data * layout.context if training.distributed_optimizer else 1
        expert_replicas = layout.world / layout.pipeline / layout.expert if training.distributed_optimizer else 1
        out = {
            "weights": training.bytes * held,
            "gradients": 4 * held,
            "optimiser": 12 * (beside / replicas + experts / expert_replicas),
        }
    elif layout.shard > 1:
        # The sharded weights are the fp32 ones; what computes is gathered layer by layer.
        out = {"weights": 4 * held, "gradients": 4 * held, "optimiser": 8 * held}
    else:
        # A bf16 gradient of each weight exists beside the fp32 sum at the end of a micro-batch.
        narrow = training.bytes < 4
        out = {
            "weights": training.bytes * held,
            "gradients": (6 if narrow else 4) * held,
            "optimiser": (12 if narrow else 8) * held,
        }
    if training.reference and not training.lora:
        out["reference"] = training.bytes * held
    if layout.shard > 1:
        out = {name: size / layout.shard for name, size in out.items()}
        # The head stays gathered; of the layers one computes while the next one arrives.
        whole = 2 * shape.layer_parameters + shape.embedding_parameters * (1 if shape.tied else 2)
        out["gathered"] = training.bytes * whole
    if training.published:
        out["published"] = training.bytes * shape.parameters
    return out


def _work_bytes(shape: Shape, layout: Layout, work: Work, training: Training) -> dict[str, float]:
    """What the passes take: activations, copied keys and values, the head's chunk, the tensors of the batch."""
    pack = work.pack / layout.context
    # Micro-batches that wait: as many as stages, and with the interleaved schedule a part of one more.
    waiting = 1.0
    if layout.pipeline > 1:
        waiting = layout.pipeline * (1 + (layout.pipeline - 1) / (layout.pipeline * layout.virtual))
    layers = waiting * shape.layers / layout.pipeline
    layer = _layer_bytes(shape, training) * pack / layout.tensor
    copies = 4.0 * shape.kv_heads * shape.head_dim * work.paths * work.pack / layout.tensor if work.paths > 1 else 0.0
    # Recomputed: the input of every layer is kept, and one layer's tensors at a time.
    full = layout.recompute == "full"
    predicted = min(work.head_elements, pack * shape.vocab / layout.tensor)
    return {
        "activations": layers * 2.0 * shape.hidden * pack / layout.tensor + layer if full else layers * layer,
        "prefix K/V": copies * (1 if full else layers),
        "head": 4 * HEAD_COPIES * predicted,
        # Log-probs are recomputed for the whole batch at once.
        "batch": BATCH_BYTES * work.tokens / layout.data / (1 if work.forward_passes else work.steps),
    }


def _layer_bytes(shape: Shape, training: Training) -> float:
    """Bytes that one layer keeps for the backward pass of one token; bf16."""
    projections = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)  # queries, keys, values, attention output
    # Two norm inputs, two block inputs, two residuals; projections; the MLP's inner tensors.
    mlp = 3 * shape.mlp * max(shape.active, 1)
    routed = 2 * shape.hidden * shape.active  # copies of a token for its experts, and their outputs
    # The norms of transformers compute in float32 and keep both that input and its normalised copy.
    norms = 8 * shape.hidden if training.kind == "hf" else 0
    return 2.0 * (6 * shape.hidden + projections + mlp + routed + norms)


def _tensor_seconds(shape: Shape, layout: Layout, token_layers: float, device: Device) -> float:
    """All-gathers and reduce-scatters around attention and MLP: four each in forward and backward pass, bf16."""
    if layout.tensor == 1:
        return 0.0
    sent = 8 * 2 * shape.hidden * token_layers * (layout.tensor - 1) / layout.tensor
    return sent / (device.fast * device.link_fraction)


def _context_seconds(shape: Shape, layout: Layout, token_layers: float, device: Device) -> float:
    """Keys and values are gathered over context parallel ranks in each pass, and their gradients summed, bf16."""
    sent = 3 * 4 * shape.kv_heads * shape.head_dim / layout.tensor * token_layers * (layout.context - 1)
    inside = layout.tensor * layout.context <= device.node
    return sent / ((device.fast if inside else device.slow) * device.link_fraction)


def _expert_seconds(shape: Shape, layout: Layout, token_layers: float, device: Device) -> float:
    """Every token travels to its experts and back, in forward and backward pass, bf16."""
    if layout.expert == 1:
        return 0.0
    elsewhere = (layout.expert - 1) / layout.expert
    sent = 3 * 2 * 2 * shape.hidden * shape.active * token_layers / layout.tensor * elsewhere
    inside = layout.expert <= device.node
    return sent / ((device.fast if inside else device.slow) * device.link_fraction)


def _data_seconds(shape: Shape, layout: Layout, micro_batches: int, device: Device, training: Training) -> float:
    """Seconds per optimiser step of what replicas exchange, the part not hidden under the passes."""
    held = sum(_stage_parameters(shape, layout))
    trained = shape.lora_parameters(training.lora) * held / shape.parameters if training.lora else held
    inside = layout.world <= device.node
    rate = (device.fast if inside else device.slow) * device.link_fraction
    # A ring moves (n − 1) / n of the bytes over each link.
    ring = (layout.data - 1) / layout.data
    if training.kind == "megatron":
        # Reduce-scatter of fp32 gradients and all-gather of bf16 weights.
        return (1 - device.hidden) * 6 * trained * ring / rate
    if layout.shard > 1:
        # Weights are gathered in both passes of each micro-batch, gradients scattered once.
        return (1 - device.hidden) * micro_batches * (4 * held + 4 * trained) * ring / rate
    # All-reduce of fp32 gradients, after the last micro-batch.
    return 8 * trained * ring / rate
