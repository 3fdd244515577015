"""Estimates memory and time of an engine on paper: weights, key-value cache, and the decoding of one iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from creditgraph.components.models.gpus import Device
from creditgraph.components.models.shape import Shape

LEAST_ROWS = 8  # rows of full length that a cache must hold for decoding to be worth the reading of the weights


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How an engine holds a model.

    Attributes:
        tensor: GPUs that each copy of the model is sharded over.
        rows: rows that a copy decodes at once at most.
        share: share of a GPU's memory that weights and cache take together; 0: what `cache_bytes`, or else
            `cache_tokens`, say.
        cache_bytes, cache_tokens: most bytes or tokens of the cache of a copy; 0: unlimited.
        in_process: whether it is `engine.local`, whose cache of no given size takes what the learner leaves.
        sleeps: whether weights and cache leave the GPU while the learner trains.
    """

    tensor: int = 1
    rows: int = 256
    share: float = 0.0
    cache_bytes: float = 0.0
    cache_tokens: float = 0.0
    in_process: bool = False
    sleeps: bool = False


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """The sampling of one iteration, by all copies together.

    Attributes:
        rows: responses.
        prompt, response: tokens of each; for an upper bound, the most that settings allow.
    """

    rows: float
    prompt: float
    response: float


@dataclass(frozen=True, kw_only=True)
class EngineEstimate:
    """Cost of an engine per GPU: bytes of weights and cache, bytes without which it cannot work, seconds."""

    weights: float
    cache: float
    least: float
    seconds: float

    @property
    def memory(self) -> float:
        """Bytes in all."""
        return self.weights + self.cache


def estimate_engine(shape: Shape, serving: Serving, decoding: Decoding, gpus: int, device: Device) -> EngineEstimate:
    """Memory, and time if every response were as long as allowed, limited by memory bandwidth or matrix products."""
    length = decoding.prompt + decoding.response
    row = shape.kv_bytes * length
    weights = 2.0 * shape.parameters / serving.tensor
    copies = max(1, gpus // serving.tensor)
    rows = min(serving.rows, math.ceil(decoding.rows / copies))
    cache = rows * row
    if serving.cache_tokens:
        cache = min(cache, max(serving.cache_tokens * shape.kv_bytes, row))
    if serving.cache_bytes:
        cache = serving.cache_bytes * serving.tensor
    elif serving.share:
        cache = max(0.0, serving.share * device.memory - weights) * serving.tensor
    held = max(1, min(rows, cache // row))
    waves = math.ceil(decoding.rows / copies / held)
    # At each step all weights that any row needs are read, and every row's cache, half full on average.
    read = min(1.0, held * shape.active / shape.experts) if shape.experts else 1.0
    touched = weights * serving.tensor * read + held * shape.kv_bytes * (decoding.prompt + decoding.response / 2)
    reading = touched / (device.bandwidth * device.link_fraction)
    products = shape.forward_flops(held, held * length / 2, held) / device.rate(shape.experts)
    return EngineEstimate(
        weights=weights,
        cache=cache / serving.tensor,
        least=weights + min(LEAST_ROWS, rows) * row / serving.tensor,
        seconds=waves * decoding.response * max(reading, products) / serving.tensor,
    )
