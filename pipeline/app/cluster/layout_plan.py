"""Memory and step time of a tensor × pipeline × data parallel learner on paper, and the layout that is fastest where it fits.

A model for choosing a layout before a GPU is allocated, not a promise. It counts bytes and floating-point operations
from the model's shape and divides them by the rates of the device; what it leaves out (stragglers, kernel launches,
uneven packs) is in `Device`'s fractions. `tools/plan_layout --check` compares it with figures that other systems have
published.

Sources: activation bytes after 2205.05198 (attention scores never stored), adapted to grouped queries and gated MLPs;
bubble of the interleaved schedule from 2104.04473.
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


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder-only transformer with grouped-query attention and gated MLPs, dense or with routed experts.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, vocab: as in the model's configuration.
        mlp: width of the MLP, of one expert when `experts` is above 0.
        experts, active_experts: routed experts per layer, and how many each token visits; 0 for dense models.
        tied: input and output embedding are one matrix.
        gated: the MLP has gate, up and down projections; off: up and down only (GPT-3).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    experts: int = 0
    active_experts: int = 0
    tied: bool = False
    gated: bool = True

    @property
    def attention_parameters(self) -> int:
        """Weights of one attention block."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Weights of one MLP, or of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.mlp

    @property
    def embedding_parameters(self) -> int:
        """Weights of one embedding matrix."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights; norms and biases, a thousandth of them, left out."""
        per_layer = self.attention_parameters + self.mlp_parameters * max(1, self.experts) + self.hidden * self.experts
        return self.layers * per_layer + self.embedding_parameters * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with, output head included, input embedding (a lookup) left out."""
        experts = self.active_experts if self.experts else 1
        return (
            self.layers * (self.attention_parameters + self.mlp_parameters * experts + self.hidden * self.experts)
            + self.embedding_parameters
        )

    def forward_flops(self, tokens: float, length: float) -> float:
        """Floating-point operations of one forward pass over `tokens` tokens in sequences of `length` (causal attention)."""
        attention = (
            2.0 * self.layers * length * self.heads * self.head_dim
        )  # scores and values, half of the square each
        return tokens * (2.0 * self.active_parameters + attention)

    @staticmethod
    def of_numbers(text: str) -> Shape:
        """A dense shape from "layers,hidden,heads,kv_heads,head_dim,mlp,vocab"."""
        try:
            return _shape(text, *(int(n) for n in text.split(",")))
        except ValueError as error:
            raise ConfigError(
                f"model shape '{text}': wanted layers,hidden,heads,kv_heads,head_dim,mlp,vocab, seven numbers, or one "
                "of "
                f"{', '.join(SHAPES)}."
            ) from error

    @staticmethod
    def read(path: str) -> Shape:
        """The shape in a Hugging Face config.json (the file, or its folder)."""
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        try:
            c: dict[str, Any] = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model shape: {file} cannot be read ({error}); wanted a config.json or one of {', '.join(SHAPES)}."
            ) from error
        try:
            experts = int(c.get("num_experts") or c.get("n_routed_experts") or 0)
            return Shape(
                name=file.resolve().parent.name,
                layers=c["num_hidden_layers"],
                hidden=c["hidden_size"],
                heads=c["num_attention_heads"],
                kv_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
                head_dim=c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
                mlp=c["moe_intermediate_size"] if experts else c["intermediate_size"],
                vocab=c["vocab_size"],
                experts=experts,
                active_experts=int(c.get("num_experts_per_tok") or 0) if experts else 0,
                tied=bool(c.get("tie_word_embeddings", False)),
            )
        except KeyError as error:
            raise ConfigError(
                f"model shape: {file} has no {error}; wanted a Qwen, Llama or OLMo style configuration."
            ) from error


def _shape(name: str, *sizes: int, **more: Any) -> Shape:
    layers, hidden, heads, kv_heads, head_dim, mlp, vocab = sizes
    return Shape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=mlp,
        vocab=vocab,
        **more,
    )


SHAPES = {
    s.name: s
    for s in (
        _shape("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151936, tied=True),
        _shape("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064),
        _shape("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        _shape("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064),
        _shape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936),
        _shape("llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        _shape("gpt3-175b", 96, 12288, 96, 96, 128, 49152, 131072, tied=True, gated=False),
        _shape("llama3.1-405b", 126, 16384, 128, 8, 128, 53248, 128256),
        _shape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936, experts=128, active_experts=8),
        _shape("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 1536, 151936, experts=128, active_experts=8),
    )
}


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU and its links; rates as vendors state them, fractions as what training reaches of them.

    Attributes:
        memory: bytes.
        matmul: dense bf16 operations per second.
        matmul_fraction: of it, in a large matrix product inside a training step, with everything between the products.
        small_fraction: of it, in the matrix products of routed experts, each of which sees few tokens.
        node: GPUs that share the fast link.
        fast, slow: bytes per second and GPU, one direction, inside a node and between nodes.
        link_fraction: of both, reached by collectives.
        hidden: part of the data-parallel traffic that runs under the backward pass.
    """

    name: str = "h100"
    memory: float = 80e9
    matmul: float = 989e12
    matmul_fraction: float = 0.60
    small_fraction: float = 0.30
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
        Device(name="b200", memory=180e9, matmul=2250e12, fast=900e9),
    )
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks are arranged; `world` is a multiple of tensor × pipeline, and expert parallel ranks lie inside the replicas."""

    world: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    recompute: Recompute = "none"

    @property
    def data(self) -> int:
        """Replicas."""
        return self.world // (self.tensor * self.pipeline)

    def __str__(self) -> str:
        """A row's text."""
        parts = [f"TP {self.tensor}", f"PP {self.pipeline}"]
        parts += [f"VPP {self.virtual}"] if self.virtual > 1 else []
        parts += [f"EP {self.expert}"] if self.expert > 1 else []
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
        reserved: part of the memory that is left to others: a colocated engine, fragmentation, NCCL.
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
    """What a layout costs, per GPU and iteration: bytes, seconds, and model FLOP/s utilisation against the vendor's rate."""

    layout: Layout
    weights: float
    optimizer: float
    activations: float
    compute: float
    bubble: float
    tensor_traffic: float
    expert_traffic: float
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
        """Of the iteration."""
        return self.compute + self.bubble + self.tensor_traffic + self.expert_traffic + self.data_traffic


def estimate(shape: Shape, layout: Layout, work: Work, device: Device) -> Estimate:
    """Memory and time of one iteration; weights in bf16, gradients and optimiser state in fp32, the latter spread over replicas."""
    dense, routed = _stage_parameters(shape, layout)
    gpu = dense + routed
    spread = dense / layout.data + routed / max(1, layout.data // layout.expert)
    weights = gpu * (2 + 4 + (2 if work.reference else 0))
    activations = _activation_bytes(shape, layout, work.pack)

    replica_tokens = work.tokens / layout.data
    micro = max(1, math.ceil(replica_tokens / work.steps / work.pack))
    passes = 3 + work.forward_passes + (1 if layout.recompute == "full" else 0)
    flops = shape.forward_flops(replica_tokens, work.length)
    rate = device.matmul * _blend(shape, device)
    compute = passes * flops / (layout.tensor * layout.pipeline * rate)
    bubble = compute * (layout.pipeline - 1) / (micro * layout.virtual)

    layers = shape.layers / layout.pipeline
    tensor_traffic = _tensor_seconds(shape, layout, replica_tokens * passes / 3 * layers, device)
    expert_traffic = _expert_seconds(shape, layout, replica_tokens * passes / 3 * layers, device)
    data_traffic = work.steps * _data_seconds(layout, 6 * gpu, device)
    found = Estimate(
        layout=layout,
        weights=weights,
        optimizer=12 * spread,
        activations=activations,
        compute=compute,
        bubble=bubble,
        tensor_traffic=tensor_traffic,
        expert_traffic=expert_traffic,
        data_traffic=data_traffic,
        utilisation=0.0,
    )
    useful = (3 + work.forward_passes) * flops / (layout.tensor * layout.pipeline)
    return replace(found, utilisation=useful / found.seconds / device.matmul)


def suggest(shape: Shape, world: int, work: Work, device: Device) -> list[Estimate]:
    """Estimates of the layouts that fit the memory, best first; raises ConfigError when none does.

    Best is the fewest ranks per replica among those within 3 % of the fastest, a difference the model cannot see; then
    by time.
    """
    budget = device.memory * (1 - work.reserved)
    found = [estimate(shape, layout, work, device) for layout in layouts(shape, world, device)]
    fitting = [e for e in found if e.memory <= budget and work.tokens / e.layout.data / work.steps >= 1]
    if not fitting:
        least = min(found, key=lambda e: e.memory)
        raise ConfigError(
            f"plan_layout: {shape.name} on {world} × {device.name}: the smallest layout ({least.layout}) needs "
            f"{least.memory / 1e9:.0f} GB "
            f"per GPU; wanted at most {budget / 1e9:.0f} GB. Take more GPUs, or smaller packs."
        )
    fastest = min(e.seconds for e in fitting)
    near = 1.03 * fastest
    return sorted(
        fitting, key=lambda e: (False, e.ranks, e.seconds) if e.seconds <= near else (True, e.seconds, e.ranks)
    )


def layouts(shape: Shape, world: int, device: Device) -> Iterator[Layout]:
    """Layouts with equal stages: heads divisible by TP, TP inside a node, layers divisible by PP × VPP, EP inside the replicas.

    `learner.megatron` takes uneven stages too, and no experts yet.
    """
    for tensor in _divisors(math.gcd(shape.heads, world), device.node):
        for pipeline in _divisors(world // tensor, shape.layers):
            if shape.layers % pipeline:
                continue
            replicas = world // (tensor * pipeline)
            virtuals = [v for v in (1, 2, 4) if shape.layers % (pipeline * v) == 0] if pipeline > 1 else [1]
            experts = _divisors(math.gcd(shape.experts, replicas), replicas) if shape.experts else [1]
            for virtual in virtuals:
                for expert in experts:
                    for recompute in ("none", "full"):
                        yield Layout(
                            world=world, tensor=tensor, pipeline=pipeline, virtual=virtual, expert=expert,
                            recompute="full" if recompute == "full" else "none",
                        )  # fmt: skip


def _divisors(number: int, most: int) -> list[int]:
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


def _stage_parameters(shape: Shape, layout: Layout) -> tuple[float, float]:
    """Weights of the fullest stage on one GPU: those every replica has, and those of its experts."""
    layers = shape.layers / layout.pipeline
    ends = shape.embedding_parameters * (1 if layout.pipeline > 1 or shape.tied else 2)
    mlp = 0 if shape.experts else shape.mlp_parameters
    dense = (layers * (shape.attention_parameters + mlp + shape.hidden * shape.experts) + ends) / layout.tensor
    return dense, layers * shape.mlp_parameters * shape.experts / (layout.tensor * layout.expert)


def _activation_bytes(shape: Shape, layout: Layout, pack: int) -> float:
    """Bytes kept for the backward passes of the first stage, whose micro-batches wait longest; bf16, sequence parallel with TP."""
    width = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)  # queries, keys, values, attention output
    visits = shape.active_experts if shape.experts else 1
    inner = (3 if shape.gated else 2) * shape.mlp * visits + (shape.hidden * visits if shape.experts else 0)
    # Two norm inputs, two block inputs, two residuals; projections; the MLP's inner tensors.
    layer = 2.0 * (6 * shape.hidden + width + inner) * pack / layout.tensor
    kept = (
        layout.pipeline * (1 + (layout.pipeline - 1) / (layout.pipeline * layout.virtual)) if layout.pipeline > 1 else 1
    )
    layers = shape.layers / layout.pipeline
    if layout.recompute == "full":
        return kept * layers * 2.0 * shape.hidden * pack / layout.tensor + layer
    return kept * layers * layer


def _blend(shape: Shape, device: Device) -> float:
    """Reached fraction of the matmul rate: large products and those of experts, by their share of the operations."""
    if not shape.experts:
        return device.matmul_fraction
    routed = shape.layers * shape.mlp_parameters * shape.active_experts / shape.active_parameters
    return 1 / (routed / device.small_fraction + (1 - routed) / device.matmul_fraction)


def _tensor_seconds(shape: Shape, layout: Layout, token_layers: float, device: Device) -> float:
    """All-gathers and reduce-scatters around attention and MLP: four each in forward and backward pass, bf16."""
    if layout.tensor == 1:
        return 0.0
    sent = 8 * 2 * shape.hidden * token_layers * (layout.tensor - 1) / layout.tensor
    return sent / (device.fast * device.link_fraction)


def _expert_seconds(shape: Shape, layout: Layout, token_layers: float, device: Device) -> float:
    """All-to-all of dispatch and combine, forward and backward, bf16; a token goes once to each of its experts on other ranks."""
    if layout.expert == 1:
        return 0.0
    sent = (
        4 * 2 * shape.hidden * shape.active_experts * token_layers / layout.tensor * (layout.expert - 1) / layout.expert
    )
    inside = layout.expert * layout.tensor <= device.node
    return sent / ((device.fast if inside else device.slow) * device.link_fraction)


def _data_seconds(layout: Layout, sent: float, device: Device) -> float:
    """Reduce-scatter of fp32 gradients and all-gather of bf16 weights, the part not hidden under the backward pass."""
    if layout.data == 1:
        return 0.0
    inside = layout.world <= device.node
    rate = (device.fast if inside else device.slow) * device.link_fraction
    return (1 - device.hidden) * sent * (layout.data - 1) / layout.data / rate
