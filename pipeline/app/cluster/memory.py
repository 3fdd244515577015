"""Estimates what a learner and an engine take of each GPU: `train` and `submit` refuse what cannot fit.

It counts bytes from the model's shape (components/models/shape.py); nothing is measured. Activation bytes are those of
2205.05198 (attention scores are never stored), adapted to grouped queries and gated MLPs.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from creditgraph.components.engine.base import Engine, Serving
from creditgraph.components.learner.hf.settings import choose_fsdp_size
from creditgraph.components.learner.learner import PolicyLearner
from creditgraph.components.learner.logprobs import CHUNK_ELEMENTS
from creditgraph.components.learner.packing.prefix import PATH_BUDGETS
from creditgraph.components.models.gpus import Device
from creditgraph.components.models.shape import Shape, known_shape
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.sockets import Node
from creditgraph.pipeline.run.compose.experiment import Experiment

PROMPT_TOKENS = 512  # of a prompt; data sets are not read for an estimate
RESERVED = 0.1  # of a GPU: fragmentation, NCCL, CUDA itself
HEAD_COPIES = 4  # float32 copies of a chunk of logits at the peak of a backward pass
BATCH_BYTES = 90  # of a token that a rank passes: its packed micro-batch with shared prefixes (73) and log-probs
LEAST_ROWS = 8  # rows of full length that a cache must hold for decoding to be worth the reading of the weights


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
    recompute: Literal["none", "full"] = "none"

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

    kind: Literal["hf", "megatron"] = "megatron"
    lora: int = 0
    bytes: int = 2
    reference: bool = False
    published: bool = False
    distributed_optimizer: bool = True


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one iteration trains and samples, if every response is as long as the settings allow.

    Attributes:
        rows: responses.
        length: tokens of a sequence, its prompt included.
        tokens: trained tokens of the whole batch, prompts included, shared prefixes counted once.
        pack: tokens of a micro-batch.
        parts: parts of the batch that are in memory one after the other.
        paths: tokens of the rows' whole paths over those computed; attention copies keys and values of that many.
    """

    rows: float
    length: float
    tokens: float
    pack: float
    parts: int = 1
    paths: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a configuration takes of each GPU of the learner.

    Attributes:
        learner: what takes memory → bytes.
        engine_weights, engine_cache: bytes of the engine on one of its GPUs.
        engine_least: bytes without which the engine cannot work.
        engine_gpus: GPUs of the engine alone; 0: it shares those of the learner.
    """

    shape: Shape
    device: Device
    training: Training
    layout: Layout
    serving: Serving
    learner: dict[str, float]
    engine_weights: float
    engine_cache: float
    engine_least: float
    engine_gpus: int

    @property
    def memory(self) -> float:
        """Bytes of a learner GPU at the peak."""
        learner, engine = sum(self.learner.values()), self.engine_weights + self.engine_cache
        if self.engine_gpus:
            return learner
        if self.serving.sleeps:
            # Optimiser and gradients are on the CPU while a sleeping engine's GPU samples.
            kept = sum(self.learner.get(name, 0.0) for name in ("weights", "reference", "published"))
            return max(learner, engine + kept)
        return learner + engine

    @property
    def budget(self) -> float:
        """Bytes of a GPU that may be used."""
        return self.device.memory * (1 - RESERVED)

    @property
    def fits(self) -> bool:
        """Whether learner and engine have the memory they need."""
        most = self.device.memory if self.engine_gpus else self.budget
        return self.memory <= self.budget and max(self.engine_least, self.engine_weights + self.engine_cache) <= most

    def __str__(self) -> str:
        """One line: layout, GPUs, and memory by what takes it."""
        parts = dict(self.learner)
        if not self.engine_gpus:
            parts |= {"engine weights": self.engine_weights, "engine cache": self.engine_cache}
        where = ", ".join(f"{n} {b / 1e9:.0f}" for n, b in sorted(parts.items(), key=lambda p: -p[1]) if b / 1e9 >= 0.5)
        engine = f" + {self.engine_gpus} of the engine" if self.engine_gpus else ""
        asleep = ", the engine asleep while the learner trains" if self.serving.sleeps and not self.engine_gpus else ""
        return (
            f"{self.shape.name}, learner.{self.training.kind} ({self.layout}) on {self.layout.world} × "
            f"{self.device.name}{engine}: {self.memory / 1e9:.0f} of {self.budget / 1e9:.0f} GB per GPU "
            f"({where}{asleep})"
        )


def check_memory(
    experiment: Experiment, device: Device, world: int, engine_gpus: int = 0, gpus_per_server: int = 0
) -> Estimate | None:
    """The estimate of a configuration; ConfigError, with what makes it smaller, where the GPUs are too small.

    None where the graph has no learner or engine, trains a second model, or the model is not known.

    Args:
        experiment: the configuration.
        device: the GPUs.
        world: learner ranks.
        engine_gpus: GPUs of engine servers; 0: the engine shares the learner's GPUs, unless its servers are elsewhere.
        gpus_per_server: GPUs of one server; 0: as the engine's settings say.
    """
    nodes = _nodes(experiment.graph)
    shape = known_shape(experiment.model.path)
    if nodes is None or shape is None:
        return None
    learner, engine = nodes
    serving = cast(type[Engine], engine.cls).serving(engine.config)
    serving = replace(serving, tensor=gpus_per_server or serving.tensor)
    training = training_of(learner.config, experiment.model.dtype)
    layout = layout_of(learner.config, world, shape, device, training)
    work = work_of(experiment.graph, learner)
    estimate = estimate_memory(
        shape, layout, work, device, training, serving, engine_gpus or (serving.tensor if serving.elsewhere else 0)
    )
    if estimate.fits:
        return estimate
    smaller = "learner.recompute=full, " if layout.recompute == "none" else ""
    smaller += "more ranks in learner.fsdp_size" if training.kind == "hf" else "more learner.tensor_parallel ranks"
    apart = "" if estimate.engine_gpus else ", or GPUs of its own for the engine (cluster=disaggregated)"
    raise ConfigError(
        f"GPU memory: {estimate}. It takes less with {smaller}, a smaller learner.micro_batch_tokens, shorter "
        f"responses{apart}; or take more GPUs. run.check_memory=false starts nevertheless."
    )


def estimate_memory(
    shape: Shape, layout: Layout, work: Work, device: Device, training: Training, serving: Serving, engine_gpus: int = 0
) -> Estimate:
    """Bytes per GPU of a learner and its engine."""
    learner = _state_bytes(shape, layout, training) | _work_bytes(shape, layout, work, training)
    # An engine on the learner's GPUs is one per replica, on its first rank.
    copies = max(1, (engine_gpus or layout.data * serving.tensor) // serving.tensor)
    row = shape.kv_bytes * work.length
    layers = shape.layers * shape.layer_parameters
    weights = (serving.layer_bytes * layers + 2.0 * (shape.parameters - layers)) / serving.tensor
    rows = min(serving.rows, math.ceil(work.rows / copies))
    least = weights + min(LEAST_ROWS, rows) * row / serving.tensor
    cache = rows * row / serving.tensor
    if serving.cache_bytes:
        cache = serving.cache_bytes
    elif serving.share:
        cache = max(0.0, serving.share * device.memory - weights)
    elif serving.in_process:
        left = device.memory * (1 - RESERVED) - sum(learner.values()) - weights
        cache = max(min(cache, left), least - weights)
    return Estimate(
        shape=shape,
        device=device,
        training=training,
        layout=layout,
        serving=serving,
        learner=learner,
        engine_weights=weights,
        engine_cache=cache,
        engine_least=least,
        engine_gpus=engine_gpus,
    )


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
    # Recomputed: the input of every layer is kept, by learner.hf also its attention's output, and one layer's tensors.
    full = layout.recompute == "full"
    width = shape.hidden + (shape.heads * shape.head_dim if training.kind == "hf" else 0)
    predicted = min(CHUNK_ELEMENTS["cuda"], pack * shape.vocab / layout.tensor)
    return {
        "activations": layers * 2.0 * width * pack / layout.tensor + layer if full else layers * layer,
        "prefix K/V": copies * (1 if full else layers),
        "head": 4 * HEAD_COPIES * predicted,
        "batch": BATCH_BYTES * work.tokens / layout.data / work.parts,
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


def training_of(config: Any, dtype: str) -> Training:
    """How a learner with these settings holds the model."""
    lora = getattr(config, "lora", None)
    kind = "megatron" if hasattr(config, "tensor_parallel") else "hf"
    return Training(
        kind="megatron" if kind == "megatron" else "hf",
        lora=lora.rank if lora else 0,
        bytes=2 if dtype == "bfloat16" else 4,
        reference=config.keeps_reference,
        # learner.megatron publishes from the CPU, tensor by tensor.
        published=kind == "hf" and not (lora and lora.publish == "adapter"),
        distributed_optimizer=getattr(config, "distributed_optimizer", "auto") != "off",
    )


def fsdp_size(shape: Shape, training: Training, world: int, device: Device) -> int:
    """What `learner.fsdp_size: 0` chooses."""
    adapted = training.lora > 0
    weights = int(shape.parameters)
    return choose_fsdp_size(
        weights,
        trained=0 if adapted else weights,
        element_bytes=training.bytes,
        copies=1 if adapted or training.reference else 0,
        world=world,
        gpu_bytes=int(device.memory),
    )


def layout_of(config: Any, world: int, shape: Shape, device: Device, training: Training) -> Layout:
    """The layout that a learner's settings say, on `world` ranks."""
    shard = getattr(config, "fsdp_size", 1) or fsdp_size(shape, training, world, device)
    return Layout(
        world=world,
        tensor=getattr(config, "tensor_parallel", 1),
        pipeline=getattr(config, "pipeline_parallel", 1),
        virtual=getattr(config, "virtual_pipeline", 1),
        context=getattr(config, "context_parallel", 1),
        expert=getattr(config, "expert_parallel", 1),
        shard=shard,
        # Selective recomputation is of attention scores, which are never stored here.
        recompute="full" if config.recompute == "full" else "none",
    )


def work_of(graph: Graph, learner: Node) -> Work:
    """What an iteration trains and samples if every response is as long as its settings allow."""
    config = learner.config
    sampler = next((n for n in graph.nodes if rows_per_prompt(n.config) and hasattr(n.config, "max_tokens")), None)
    prompts = next((n.config.batch for n in graph.nodes if isinstance(getattr(n.config, "batch", None), int)), 1)
    response = float(sampler.config.max_tokens) if sampler else 512.0
    per_prompt = rows_per_prompt(sampler.config) if sampler else 1
    rows = getattr(sampler.config, "groups", prompts) * per_prompt if sampler else prompts
    length = PROMPT_TOKENS + response
    # Groups share their prompt; rows of trees and of resets share up to their whole prefix.
    branches = any(hasattr(n.config, "suffixes") or hasattr(n.config, "uncertain") for n in graph.nodes)
    shares = config.share_prefixes
    # Log-probs of another policy are computed for the whole batch at once.
    at_once = config.old_logprobs == "recompute" or config.keeps_reference
    return Work(
        rows=rows,
        length=length,
        tokens=rows * response + PROMPT_TOKENS * (rows / per_prompt if shares else rows),
        pack=max(float(config.micro_batch_tokens), length) if config.micro_batch_tokens else rows * length,
        parts=1 if at_once else config.steps_per_batch,
        paths=(PATH_BUDGETS if branches else min(PATH_BUDGETS, length / response)) if shares else 1.0,
    )


def rows_per_prompt(config: Any) -> int:
    """Rows that a sampler's settings give each prompt; 0 for settings of other components."""
    if hasattr(config, "uncertain"):
        if config.rule == "segments":
            out = 1
            for width in config.segments.branching:
                out *= width
            return out
        grown = config.uncertain
        return int(grown.chains * (1 + grown.points * grown.branches * grown.rounds))
    if hasattr(config, "originals"):
        return int(config.originals) + 1
    return int(getattr(config, "group_size", 0) or 2 * getattr(config, "pairs", 0))


def _nodes(graph: Graph) -> tuple[Node, Node] | None:
    """The learner and the engine of a graph, if it has one of each and trains nothing else, such as a critic."""
    learners = [n for n in graph.nodes if issubclass(n.cls, PolicyLearner) or n.placement == "collective"]
    engines = [n for n in graph.nodes if issubclass(n.cls, Engine)]
    return (learners[0], engines[0]) if len(learners) == 1 and len(engines) == 1 else None
