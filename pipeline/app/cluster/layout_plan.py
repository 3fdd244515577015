"""Estimates memory and step time of a tensor × pipeline × data parallel learner, and ranks the layouts that fit.

For choosing a layout before a GPU is allocated; dense models only. It counts bytes and floating-point operations from
the model's shape and divides them by the rates of the device. What it leaves out (stragglers, kernel launches, uneven
packs) is in `Device`'s fractions. `creditgraph plan --check` compares its throughput with published figures:
docs/scaling.md says how far they agree. Mixtures of experts are not supported.

Sources: activation bytes after 2205.05198 (attention scores are never stored), adapted to grouped queries and gated
MLPs; bubble of the interleaved schedule from 2104.04473.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.core.errors import ConfigError

Recompute = Literal["none", "full"]


@dataclass(frozen=True)
class Shape:
    """A dense decoder-only transformer with grouped-query attention and gated MLPs.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, mlp, vocab: as in the model's configuration.
        tied: input and output embedding are one matrix.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: attention, and gate, up and down projections; norms and biases left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.mlp

    @property
    def embedding_parameters(self) -> int:
        """Weights of one embedding matrix."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.layers * self.layer_parameters + self.embedding_parameters * (1 if self.tied else 2)

    def forward_flops(self, tokens: float, length: float) -> float:
        """Operations of a forward pass over `tokens` tokens in sequences of `length`, with causal attention."""
        # Every weight but those of the input embedding, which is a lookup, is multiplied once per token.
        products = 2.0 * (self.layers * self.layer_parameters + self.embedding_parameters)
        # Scores and values, half of the square each.
        attention = 2.0 * self.layers * length * self.heads * self.head_dim
        return tokens * (products + attention)

    @staticmethod
    def of_numbers(text: str) -> Shape:
        """A shape from "layers,hidden,heads,kv_heads,head_dim,mlp,vocab"."""
        try:
            layers, hidden, heads, kv_heads, head_dim, mlp, vocab = (int(n) for n in text.split(","))
            return Shape(text, layers, hidden, heads, kv_heads, head_dim, mlp, vocab)
        except ValueError as error:
            raise ConfigError(
                f"model shape '{text}': expected the seven numbers layers,hidden,heads,kv_heads,head_dim,mlp,vocab, "
                f"or one of {', '.join(SHAPES)}."
            ) from error

    @staticmethod
    def read(path: str) -> Shape:
        """The shape in a Hugging Face config.json (the file, or its folder)."""
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        try:
            c: dict[str, Any] = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model shape: {file} cannot be read ({error}); expected a config.json or one of {', '.join(SHAPES)}."
            ) from error
        if c.get("num_experts") or c.get("n_routed_experts") or c.get("num_local_experts"):
            raise ConfigError(
                f"model shape: {file} is a mixture of experts; expected a dense model. The formulas were checked for "
                "dense models only (docs/scaling.md)."
            )
        try:
            return Shape(
                name=file.resolve().parent.name,
                layers=c["num_hidden_layers"],
                hidden=c["hidden_size"],
                heads=c["num_attention_heads"],
                kv_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
                head_dim=c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
                mlp=c["intermediate_size"],
                vocab=c["vocab_size"],
                tied=bool(c.get("tie_word_embeddings", False)),
            )
        except KeyError as error:
            raise ConfigError(
                f"model shape: {file} has no {error}; expected a Qwen, Llama or OLMo style configuration."
            ) from error


SHAPES = {
    s.name: s
    for s in (
        Shape("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151936, tied=True),
        Shape("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064),
        Shape("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        Shape("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064),
        Shape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936),
        Shape("llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        Shape("llama3.1-405b", 126, 16384, 128, 8, 128, 53248, 128256),
    )
}


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU and its links: rates as stated by vendors, and the fractions of them that training achieves.

    Attributes:
        memory: bytes.
        matmul: dense bf16 operations per second.
        matmul_fraction: achieved fraction of `matmul` in a training step, including the time between matrix products.
        node: GPUs that share the fast link.
        fast, slow: bytes per second and GPU, one direction, inside a node and between nodes.
        link_fraction: fraction of both that collectives achieve.
        hidden: part of the data-parallel traffic that runs under the backward pass.
    """

    name: str = "h100"
    memory: float = 80e9
    matmul: float = 989e12
    matmul_fraction: float = 0.60
    node: int = 8
    fast: float = 450e9
    slow: float = 50e9
    link_fraction: float = 0.75
    hidden: float = 0.8


DEVICES = {
    d.name: d
    for d in (
        Device(),
        Device(name="h200", memory=141e9),
        Device(name="a100", matmul=312e12, fast=300e9, slow=25e9),
    )
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Arrangement of the ranks; `world` is a multiple of tensor × pipeline."""

    world: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    recompute: Recompute = "none"

    @property
    def data(self) -> int:
        """Replicas."""
        return self.world // (self.tensor * self.pipeline)

    def __str__(self) -> str:
        """Such as "TP 4, PP 2, VPP 4, DP 16"."""
        parts = [f"TP {self.tensor}", f"PP {self.pipeline}"]
        parts += [f"VPP {self.virtual}"] if self.virtual > 1 else []
        return ", ".join([*parts, f"DP {self.data}"]) + (", recompute" if self.recompute == "full" else "")


@dataclass(frozen=True, kw_only=True)
class Work:
    """One learner iteration.

    Attributes:
        tokens: trained tokens of the whole batch, prompts included, shared prefixes counted once.
        length: tokens of a sequence, for attention.
        pack: tokens of a micro-batch.
        steps: optimiser steps the batch is split into.
        forward_passes: further forward-only passes (recomputed old log-probs, a reference policy).
        reference: a frozen reference policy stays in memory.
        reserved: fraction of the memory for other uses: a colocated engine, fragmentation, NCCL.
    """

    tokens: float
    length: float = 4096
    pack: int = 8192
    steps: int = 1
    forward_passes: int = 0
    reference: bool = False
    reserved: float = 0.15


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The cost of a layout, per GPU and iteration: bytes, seconds, and FLOP/s utilisation of the vendor's rate."""

    layout: Layout
    weights: float
    optimizer: float
    activations: float
    compute: float
    bubble: float
    tensor_traffic: float
    data_traffic: float
    utilisation: float

    @property
    def ranks(self) -> int:
        """GPUs of one replica."""
        return self.layout.tensor * self.layout.pipeline

    @property
    def memory(self) -> float:
        """Bytes in all."""
        return self.weights + self.optimizer + self.activations

    @property
    def seconds(self) -> float:
        """Seconds of the iteration."""
        return self.compute + self.bubble + self.tensor_traffic + self.data_traffic


def estimate(shape: Shape, layout: Layout, work: Work, device: Device) -> Estimate:
    """Memory and time of one iteration; weights in bf16, gradients and optimiser state in fp32.

    The optimiser state is sharded over replicas.
    """
    per_gpu = _stage_parameters(shape, layout)
    replica_tokens = work.tokens / layout.data
    micro_batches = max(1, math.ceil(replica_tokens / work.steps / work.pack))
    # A backward pass costs two forward passes.
    passes = 3 + work.forward_passes + (1 if layout.recompute == "full" else 0)
    flops = shape.forward_flops(replica_tokens, work.length) / (layout.tensor * layout.pipeline)
    compute = passes * flops / (device.matmul * device.matmul_fraction)
    token_layers = replica_tokens * passes / 3 * shape.layers / layout.pipeline
    result = Estimate(
        layout=layout,
        weights=per_gpu * (2 + 4 + (2 if work.reference else 0)),
        optimizer=12 * per_gpu / layout.data,
        activations=_activation_bytes(shape, layout, work.pack),
        compute=compute,
        bubble=compute * (layout.pipeline - 1) / (micro_batches * layout.virtual),
        tensor_traffic=_tensor_seconds(shape, layout, token_layers, device),
        data_traffic=work.steps * _data_seconds(layout, 6 * per_gpu, device),
        utilisation=0.0,
    )
    useful = (3 + work.forward_passes) * flops
    return replace(result, utilisation=useful / result.seconds / device.matmul)


def plan(shape: Shape, world: int, work: Work, device: Device) -> list[Estimate]:
    """Estimates of the layouts that fit the memory, best first; raises ConfigError when none does.

    Layouts within 3 % of the fastest, a difference below the accuracy of the formulas, are ordered by fewest ranks per
    replica; all others by time.
    """
    budget = device.memory * (1 - work.reserved)
    estimates = [estimate(shape, layout, work, device) for layout in layouts(shape, world, device)]
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
        fitting, key=lambda e: (False, e.ranks, e.seconds) if e.seconds <= near else (True, e.seconds, e.ranks)
    )


def layouts(shape: Shape, world: int, device: Device) -> Iterator[Layout]:
    """Layouts with equal stages: heads divisible by TP, TP inside a node, layers divisible by PP × VPP.

    `learner.megatron` supports uneven stages too.
    """
    recomputes: tuple[Recompute, ...] = ("none", "full")
    # Tensor parallel ranks exchange activations in every layer, which only the fast link inside a node carries.
    for tensor in _divisors(math.gcd(shape.heads, world), device.node):
        for pipeline in _divisors(world // tensor, shape.layers):
            if shape.layers % pipeline:
                continue
            virtuals = [v for v in (1, 2, 4) if shape.layers % (pipeline * v) == 0] if pipeline > 1 else [1]
            for virtual in virtuals:
                for recompute in recomputes:
                    yield Layout(world=world, tensor=tensor, pipeline=pipeline, virtual=virtual, recompute=recompute)


def _divisors(number: int, most: int) -> list[int]:
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


def _stage_parameters(shape: Shape, layout: Layout) -> float:
    """Weights of the fullest stage on one GPU; with several stages, each end has one of the embeddings."""
    ends = shape.embedding_parameters * (1 if layout.pipeline > 1 or shape.tied else 2)
    return (shape.layers / layout.pipeline * shape.layer_parameters + ends) / layout.tensor


def _activation_bytes(shape: Shape, layout: Layout, pack: int) -> float:
    """Bytes kept for the backward passes of the first stage, where micro-batches wait longest; bf16."""
    projections = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)  # queries, keys, values, attention output
    # Two norm inputs, two block inputs, two residuals; projections; the MLP's inner tensors.
    layer = 2.0 * (6 * shape.hidden + projections + 3 * shape.mlp) * pack / layout.tensor
    # Micro-batches that wait: as many as stages, and with the interleaved schedule a part of one more.
    waiting = 1.0
    if layout.pipeline > 1:
        waiting = layout.pipeline * (1 + (layout.pipeline - 1) / (layout.pipeline * layout.virtual))
    layers = shape.layers / layout.pipeline
    # Recomputed: the input of every layer is kept, and one layer's tensors at a time.
    if layout.recompute == "full":
        return waiting * layers * 2.0 * shape.hidden * pack / layout.tensor + layer
    return waiting * layers * layer


def _tensor_seconds(shape: Shape, layout: Layout, token_layers: float, device: Device) -> float:
    """All-gathers and reduce-scatters around attention and MLP: four each in forward and backward pass, bf16."""
    if layout.tensor == 1:
        return 0.0
    sent = 8 * 2 * shape.hidden * token_layers * (layout.tensor - 1) / layout.tensor
    return sent / (device.fast * device.link_fraction)


def _data_seconds(layout: Layout, sent: float, device: Device) -> float:
    """Reduce-scatter of fp32 gradients and all-gather of bf16 weights, the part not hidden under the backward pass."""
    if layout.data == 1:
        return 0.0
    inside = layout.world <= device.node
    rate = (device.fast if inside else device.slow) * device.link_fraction
    # A ring moves (n − 1) / n of the bytes over each link.
    return (1 - device.hidden) * sent * (layout.data - 1) / layout.data / rate
