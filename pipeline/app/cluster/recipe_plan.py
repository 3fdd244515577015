"""The plan of a composed configuration: what its learner and engine take of each GPU, and the nearest layout that fits.

`train` and `submit` refuse with it what cannot fit, before anything loads; `tools/update_docs` makes the table of
docs/scaling.md with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from creditgraph.components.engine.base import Engine
from creditgraph.components.engine.served.settings import ServerSettings
from creditgraph.components.learner.hf.settings import choose_fsdp_size
from creditgraph.components.learner.learner import PolicyLearner
from creditgraph.components.learner.logprobs import CHUNK_ELEMENTS
from creditgraph.components.learner.packing.prefix import PATH_BUDGETS
from creditgraph.components.models.gpus import DEVICES, Device
from creditgraph.components.models.shape import Shape, known_shape
from creditgraph.pipeline.app.cluster.engine_plan import Decoding, EngineEstimate, Serving, estimate_engine
from creditgraph.pipeline.app.cluster.layout_plan import Estimate, Layout, Training, Work, estimate, layouts
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.sockets import Node
from creditgraph.pipeline.run.compose.experiment import Experiment

PROMPT_TOKENS = 512  # of a prompt; data sets are not read for a plan
RESERVED = 0.1  # of a GPU: fragmentation, NCCL, CUDA itself
MOST_GPUS = 512
APART = Serving(rows=256, share=0.9)  # servers with GPUs of their own


@dataclass(frozen=True, kw_only=True)
class RecipePlan:
    """Cost of a configuration on given GPUs.

    Attributes:
        learner: estimate of the learner, per GPU.
        engine: estimate of the engine, per GPU.
        engine_gpus: GPUs of the engine alone; 0: it shares those of the learner.
        overrides: settings that differ from the configuration's.
    """

    shape: Shape
    device: Device
    training: Training
    serving: Serving
    learner: Estimate
    engine: EngineEstimate
    decoding: Decoding
    engine_gpus: int
    overrides: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.learner.layout.world + self.engine_gpus

    @property
    def memory(self) -> float:
        """Bytes of a learner GPU at the peak."""
        if self.engine_gpus:
            return self.learner.memory
        if self.serving.sleeps:
            # Optimiser and gradients are on the CPU while a sleeping engine's GPU samples.
            kept = sum(self.learner.bytes.get(name, 0.0) for name in ("weights", "reference", "published"))
            return max(self.learner.memory, self.engine.memory + kept)
        return self.learner.memory + self.engine.memory

    @property
    def budget(self) -> float:
        """Bytes of a GPU that may be used."""
        return self.device.memory * (1 - RESERVED)

    @property
    def fits(self) -> bool:
        """Whether learner and engine have the memory they need."""
        most = self.device.memory if self.engine_gpus else self.budget
        return self.memory <= self.budget and max(self.engine.least, self.engine.memory) <= most

    @property
    def seconds(self) -> float:
        """Seconds of one iteration, one after the other; with responses of full length."""
        return self.learner.seconds + self.engine.seconds

    def __str__(self) -> str:
        """One line: layout, GPUs, memory by what takes it, and seconds."""
        parts = dict(self.learner.bytes)
        if not self.engine_gpus:
            parts |= {"engine weights": self.engine.weights, "engine cache": self.engine.cache}
        where = ", ".join(f"{n} {b / 1e9:.0f}" for n, b in sorted(parts.items(), key=lambda p: -p[1]) if b / 1e9 >= 0.5)
        engine = f" + {self.engine_gpus} of the engine" if self.engine_gpus else ""
        known = self.device.name in DEVICES
        seconds = f", {self.seconds:.0f} s per iteration on paper" if known else ""
        asleep = ", the engine asleep while the learner trains" if self.serving.sleeps and not self.engine_gpus else ""
        return (
            f"{self.shape.name}, learner.{self.training.kind} ({self.learner.layout}) on {self.learner.layout.world} × "
            f"{self.device.name}{engine}: {self.memory / 1e9:.0f} of {self.budget / 1e9:.0f} GB per GPU "
            f"({where}{asleep}){seconds}"
        )


def recipe_plan(
    experiment: Experiment, device: Device, world: int, engine_gpus: int = 0, gpus_per_server: int = 0
) -> RecipePlan | None:
    """The plan of a configuration as it is.

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
    elsewhere = isinstance(engine.config, ServerSettings) and engine.config.elsewhere
    serving = serving_of(engine)
    serving = replace(serving, tensor=gpus_per_server or serving.tensor)
    training = training_of(learner.config, experiment.model.dtype)
    layout = layout_of(learner.config, world, shape, device, training)
    return _planned(
        experiment, shape, device, training, layout, serving, engine_gpus or (serving.tensor if elsewhere else 0)
    )


def check_memory(
    experiment: Experiment, device: Device, world: int, engine_gpus: int = 0, gpus_per_server: int = 0
) -> RecipePlan | None:
    """The plan of a configuration; ConfigError, with the nearest plan that fits, where the GPUs are too small."""
    planned = recipe_plan(experiment, device, world, engine_gpus, gpus_per_server)
    if planned is None or planned.fits:
        return planned
    near = nearest(experiment, device, planned.gpus)
    if near is None:
        step = f"None of up to {MOST_GPUS} such GPUs fits; choose a smaller model, shorter rows or larger GPUs."
    else:
        step = f"The nearest that fits: {near}; set {' '.join(near.overrides)}."
        step += " GPUs of the engine are those of cluster=disaggregated." if near.engine_gpus else ""
    raise ConfigError(f"GPU memory: {planned}. {step} run.check_memory=false starts nevertheless.")


def nearest(experiment: Experiment, device: Device, gpus: int) -> RecipePlan | None:
    """The fastest plan that fits on the fewest GPUs, from `gpus` on in doublings; None up to `MOST_GPUS`."""
    nodes = _nodes(experiment.graph)
    shape = known_shape(experiment.model.path)
    while nodes and shape and gpus <= MOST_GPUS:
        fitting = [p for p in _candidates(experiment, shape, device, gpus, *nodes) if p.fits]
        if fitting:
            return min(fitting, key=lambda p: (round(p.seconds, 1), p.learner.layout.ranks, len(p.overrides)))
        gpus *= 2
    return None


def _candidates(
    experiment: Experiment, shape: Shape, device: Device, gpus: int, learner: Node, engine: Node
) -> Iterator[RecipePlan]:
    served = isinstance(engine.config, ServerSettings)
    places: list[tuple[Serving, int, list[str]]] = []
    if not (served and engine.config.elsewhere):
        places.append((serving_of(engine), 0, []))
    if gpus > 1 and engine.use.startswith("engine."):
        # Half of the GPUs for vLLM servers.
        for tensor in (t for t in (1, 2, 4, 8) if t <= gpus // 2 and shape.heads % t == 0):
            own = ["engine=vllm", f"engine.tensor_parallel={tensor}", "engine.gpu_memory=0.9", "engine.kv_cache_gb=0"]
            places.append((replace(APART, tensor=tensor), gpus // 2, own))
    for serving, engine_gpus, engine_settings in places:
        for training, own in _trainings(learner, experiment.model.dtype, shape, engine_gpus > 0):
            for layout in layouts(shape, gpus - engine_gpus, device, training):
                settings = (*own, *_layout_settings(layout, training), *engine_settings)
                made = _planned(experiment, shape, device, training, layout, serving, engine_gpus)
                yield _with_less_cache(replace(made, overrides=settings))


def _with_less_cache(made: RecipePlan) -> RecipePlan:
    """The plan with a cache of `engine.local` that takes what the learner leaves, where that is enough to decode."""
    tokens = _tokens_left(made.shape, made.budget - made.learner.memory - made.engine.weights, made.serving)
    enough = tokens * made.shape.kv_bytes >= made.engine.least - made.engine.weights
    if made.fits or not made.serving.in_process or not enough or not made.serving.cache_tokens:
        return made
    serving = replace(made.serving, cache_tokens=tokens)
    engine = estimate_engine(made.shape, serving, made.decoding, made.learner.layout.data, made.device)
    own = (*made.overrides, f"engine.max_batch_tokens={tokens}")
    return replace(made, serving=serving, engine=engine, overrides=own)


def _tokens_left(shape: Shape, left: float, serving: Serving) -> int:
    """Tokens whose cache fits that many bytes, in thousands of 1,024."""
    return max(0, int(left / shape.kv_bytes) // 1024 * 1024)


def _trainings(learner: Node, dtype: str, shape: Shape, servers: bool) -> Iterator[tuple[Training, list[str]]]:
    """The learners that can train the configuration, the configured one first."""
    own = training_of(learner.config, dtype)
    yield own, []
    if own.lora and own.published and servers:
        yield replace(own, published=False), ["learner.lora.publish=adapter"]
    # learner.megatron has adapters for dense models only.
    if own.kind == "hf" and not (own.lora and shape.experts):
        yield replace(own, kind="megatron", published=False), ["learner=megatron"]


def _layout_settings(layout: Layout, training: Training) -> list[str]:
    out = [f"learner.recompute={layout.recompute}"]
    if training.kind == "hf":
        return [*out, f"learner.fsdp_size={layout.shard}"]
    sizes = (
        ("tensor_parallel", layout.tensor),
        ("pipeline_parallel", layout.pipeline),
        ("virtual_pipeline", layout.virtual),
        ("context_parallel", layout.context),
        ("expert_parallel", layout.expert),
    )
    out += [f"learner.{name}={size}" for name, size in sizes if size > 1]
    return [*out, "learner.sequence_parallel=true"] if layout.tensor > 1 else out


def _planned(
    experiment: Experiment,
    shape: Shape,
    device: Device,
    training: Training,
    layout: Layout,
    serving: Serving,
    engine_gpus: int,
) -> RecipePlan:
    nodes = _nodes(experiment.graph)
    assert nodes is not None
    work, decoding = work_of(experiment.graph, nodes[0])
    learner = estimate(shape, layout, work, device, training)
    # An engine on the learner's GPUs is one per replica, on its first rank.
    gpus = engine_gpus or layout.data * serving.tensor
    engine = estimate_engine(shape, serving, decoding, gpus, device)
    if serving.in_process and not serving.cache_tokens:
        left = min(engine.cache, device.memory * (1 - RESERVED) - learner.memory - engine.weights)
        tokens = _tokens_left(shape, max(left, engine.least - engine.weights + 1024 * shape.kv_bytes), serving)
        engine = estimate_engine(shape, replace(serving, cache_tokens=tokens), decoding, gpus, device)
    return RecipePlan(
        shape=shape,
        device=device,
        training=training,
        serving=serving,
        learner=learner,
        engine=engine,
        decoding=decoding,
        engine_gpus=engine_gpus,
    )


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


def serving_of(engine: Node) -> Serving:
    """How an engine with these settings holds the model."""
    config: Any = engine.config
    if isinstance(config, ServerSettings):
        cache = getattr(config, "kv_cache_gb", 0.0) * 1e9
        share = 0.0 if cache else getattr(config, "gpu_memory", 0.5)
        sleeps = getattr(config, "sleep", "never") != "never"
        return Serving(
            tensor=config.tensor_parallel, rows=config.max_rows, share=share, cache_bytes=cache, sleeps=sleeps
        )
    tokens = getattr(config, "max_batch_tokens", 0)
    return Serving(rows=getattr(config, "max_rows", 512), cache_tokens=tokens, in_process=True)


def work_of(graph: Graph, learner: Node) -> tuple[Work, Decoding]:
    """What an iteration trains and samples if every response is as long as its settings allow."""
    config = learner.config
    sampler = next((n for n in graph.nodes if rows_per_prompt(n.config) and hasattr(n.config, "max_tokens")), None)
    prompts = next((n.config.batch for n in graph.nodes if isinstance(getattr(n.config, "batch", None), int)), 1)
    response = float(sampler.config.max_tokens) if sampler else 512.0
    per_prompt = rows_per_prompt(sampler.config) if sampler else 1
    rows = getattr(sampler.config, "groups", prompts) * per_prompt if sampler else prompts
    length = PROMPT_TOKENS + response
    pack = max(float(config.micro_batch_tokens), length)
    # Groups share their prompt; rows of trees and of resets share up to their whole prefix.
    branches = any(hasattr(n.config, "suffixes") or hasattr(n.config, "uncertain") for n in graph.nodes)
    shares = config.share_prefixes
    paths = (PATH_BUDGETS if branches else min(PATH_BUDGETS, length / response)) if shares else 1.0
    work = Work(
        tokens=rows * response + PROMPT_TOKENS * (rows / per_prompt if shares else rows),
        length=length,
        pack=pack if config.micro_batch_tokens else rows * length,
        steps=config.steps_per_batch,
        forward_passes=(config.old_logprobs == "recompute") + config.keeps_reference,
        paths=paths,
        head_elements=CHUNK_ELEMENTS["cuda"],
        reserved=RESERVED,
    )
    return replace(work, tokens=work.tokens * config.epochs), Decoding(
        rows=rows, prompt=PROMPT_TOKENS, response=response
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
