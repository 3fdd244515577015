"""Engines and learner of a large run on paper: `pipeline.app.cluster.simulate` fed with a model's shape and a device's rates.

What a run on any machine measured gives the structure (which nodes ask the engine for how many rows, the spread of
their lengths, the host's seconds per row); `layout_plan` gives the learner's step; a roofline gives the servers' speed.
None of the rates here was measured by us; they are set by hand in one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from pipeline.app.cluster.layout_plan import Device, Estimate, Shape, Work, suggest
from pipeline.app.cluster.measured import Measured, scaled
from pipeline.app.cluster.simulate import Curve, Draws, Plan, Simulated, simulate
from pipeline.core.errors import ConfigError

MEMORY_RATE = {
    "h100": 3.35e12,
    "h200": 4.8e12,
    "a100": 2.04e12,
    "b200": 8.0e12,
}  # bytes per second, as vendors state them
MEMORY_FRACTION = 0.7  # of it, reached by decoding
STEP_SECONDS = 1e-3  # of a decoding step besides memory and products: scheduling, kernel launches
SERVER_MEMORY = 0.9  # of the GPU, for weights and keys and values
HOST_RATE = 25e9  # bytes per second and GPU between host and GPU: weights of a sleeping engine
MOST_SLOTS = 256
ITERATIONS = 5  # simulated with a full pipeline


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What is simulated.

    Attributes:
        shape, device: model and GPU.
        node: GPUs per node.
        tensor: GPUs of one engine server.
        rollouts: of an iteration, rows of the largest generating stage; per GPU when `per_gpu`.
        length: mean tokens of a rollout, further stages in proportion.
        prompt: tokens of a prompt.
        seed: of the draws.
    """

    shape: Shape
    device: Device
    node: int = 8
    tensor: int = 1
    rollouts: int = 4096
    per_gpu: bool = False
    length: float = 2048
    prompt: float = 512
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best split of a number of GPUs: mode is "colocated" or "weights@k" (disaggregated)."""

    gpus: int
    mode: str
    engine_gpus: int
    learner_gpus: int
    layout: str
    simulated: Simulated


def decode_curve(shape: Shape, device: Device, tensor: int, context: float) -> Curve:
    """Speed of a server of `tensor` GPUs: weights are read once per step, keys and values and the matrix products once per sequence.

    Raises:
        ConfigError: the model does not fit.
    """
    weights = 2.0 * shape.parameters / tensor
    cache_bytes = (
        4.0 * shape.layers * shape.kv_heads * shape.head_dim * context / tensor
    )  # bf16 keys and values of one sequence
    free = device.memory * SERVER_MEMORY - weights
    if free < cache_bytes:
        raise ConfigError(
            f"simulate: {shape.name} takes {weights / 1e9:.0f} GB on each of {tensor} × {device.name}, which leaves no "
            "room for a "
            f"sequence of {context:g} tokens; wanted weights below {device.memory * SERVER_MEMORY / 1e9:.0f} GB. "
            "Set cluster.gpus_per_server higher."
        )
    rate = MEMORY_RATE[device.name] * MEMORY_FRACTION
    products = 2.0 * shape.active_parameters / tensor / (device.matmul * device.matmul_fraction)
    return Curve(
        floor=weights / rate + STEP_SECONDS,
        each=cache_bytes / rate + products,
        slots=int(min(MOST_SLOTS, free // cache_bytes)),
    )


def scale(measured: Measured, fleet: Fleet, sizes: Sequence[int], delays: Sequence[int] = (1, 2)) -> Iterator[Found]:
    """For each number of GPUs: colocated, then engines apart at each `learner.weights@k`, at the split with the shortest iteration.

    A combination that does not fit the memory is left out.
    """
    if not measured.rows:
        raise ConfigError(
            "simulate: the measured run has no node that asks an engine and records its rows; wanted "
            "run.record.every=1."
        )
    for gpus in sizes:
        sized = replace(fleet, rollouts=fleet.rollouts * gpus, per_gpu=False) if fleet.per_gpu else fleet
        for delay in (0, *delays):
            found = [f for f in _candidates(measured, sized, gpus, delay) if f is not None]
            if found:
                yield min(found, key=lambda f: f.simulated.iteration)


def _candidates(measured: Measured, fleet: Fleet, gpus: int, delay: int) -> Iterator[Found | None]:
    if delay == 0:
        yield _simulated(measured, fleet, gpus, gpus, gpus, delay)
        return
    unit = fleet.node if gpus > fleet.node else fleet.tensor
    count = gpus // unit
    guesses = [
        (g, e) for e in range(1, count) if (g := _guess(measured, fleet, e * unit, gpus - e * unit, delay)) is not None
    ]
    if not guesses:
        return
    best = min(guesses)[1]
    step = max(1, count // 32)
    for engines in sorted({e for e in (best - step, best, best + step) if 1 <= e < count}):
        yield _simulated(measured, fleet, gpus, engines * unit, gpus - engines * unit, delay)


def _guess(measured: Measured, fleet: Fleet, engine_gpus: int, learner_gpus: int, delay: int) -> float | None:
    """Seconds of an iteration without events: to choose which splits to simulate."""
    plan = _plan(measured, fleet, engine_gpus, learner_gpus, delay)
    if plan is None:
        return None
    generation = 0.0
    for stage in plan.stages:
        if stage.tokens is not None:
            share = stage.rows * stage.tokens.mean / plan.servers
            generation += (
                plan.curve.floor * max(max(stage.tokens.values), share / plan.curve.slots) + plan.curve.each * share
            )
    generation += plan.update.mean
    return max(generation, plan.learn.mean) if plan.overlaps else generation + plan.learn.mean


def _simulated(
    measured: Measured, fleet: Fleet, gpus: int, engine_gpus: int, learner_gpus: int, delay: int
) -> Found | None:
    plan = _plan(measured, fleet, engine_gpus, learner_gpus, delay)
    if plan is None:
        return None
    return Found(
        gpus=gpus,
        mode=f"weights@{delay}" if delay else "colocated",
        engine_gpus=engine_gpus,
        learner_gpus=learner_gpus,
        layout=str(_learner(fleet, learner_gpus, _trained_tokens(measured, fleet)).layout),  # type: ignore[union-attr]
        simulated=simulate(plan, plan.delay + 1 + ITERATIONS, fleet.seed),
    )


def _plan(measured: Measured, fleet: Fleet, engine_gpus: int, learner_gpus: int, delay: int) -> Plan | None:
    """`delay` 0 is colocated. None when the learner does not fit."""
    learner = _learner(fleet, learner_gpus, _trained_tokens(measured, fleet))
    if learner is None or engine_gpus < fleet.tensor:
        return None
    grown = _grown(measured, fleet)
    context = fleet.prompt + fleet.length
    weights = 2.0 * fleet.shape.parameters / fleet.tensor
    link = fleet.device.slow if delay else fleet.device.fast
    update = weights / (link * fleet.device.link_fraction) + (0 if delay else 2 * weights / HOST_RATE)
    return replace(
        grown,
        curve=decode_curve(fleet.shape, fleet.device, fleet.tensor, context),
        servers=engine_gpus // fleet.tensor,
        own_servers=False,
        replicas=min(learner.layout.data, fleet.rollouts),
        update=Draws((update,)),
        learn=Draws((learner.seconds,)),
        delay=max(1, delay),
        engine_gpus=engine_gpus,
        learner_gpus=learner_gpus,
        shared=delay == 0,
    )


@cache
def _learner(fleet: Fleet, gpus: int, tokens: float) -> Estimate | None:
    try:
        return suggest(fleet.shape, gpus, Work(tokens=tokens, length=fleet.prompt + fleet.length), fleet.device)[0]
    except ConfigError:
        return None


def _grown(measured: Measured, fleet: Fleet) -> Plan:
    """The measured stages with this fleet's rows and lengths; all rollouts' mean length becomes `fleet.length`."""
    plan = scaled(measured.plan, fleet.rollouts, measured.rows)
    largest = max((s for s in measured.plan.stages if s.tokens is not None), key=lambda s: s.rows)
    factor = fleet.length / largest.tokens.mean  # type: ignore[union-attr]
    return replace(
        plan, stages=tuple(replace(s, tokens=s.tokens.scaled(factor)) if s.tokens else s for s in plan.stages)
    )


def _trained_tokens(measured: Measured, fleet: Fleet) -> float:
    grown = [s for s in _grown(measured, fleet).stages if s.tokens is not None]
    sampled = sum(s.rows * s.tokens.mean for s in grown if s.tokens)
    return measured.trained * sampled + fleet.rollouts * fleet.prompt
