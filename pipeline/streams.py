"""Keyed random streams: every draw is a function of (seed, node, iteration, uid, draw), never of order or batch cut.

A counter-based generator (the SplitMix64 finaliser over a keyed counter) needs no state, so nothing has to be saved, and the
same trajectory gets the same numbers whether its batch was cut in two, overlapped with learning, or replayed alone.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The SplitMix64 finaliser: uint64 [N] → well-mixed uint64 [N] (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def counter_uniform(seed: NDArray[np.uint64], counter: NDArray[np.uint64] | int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), one per row, from per-row seeds [N] and a counter (a number, or one per row).

    Engines draw token t of a request with ``counter_uniform(request_seed, t)``.
    """
    with np.errstate(over="ignore"):
        step = np.asarray(counter, dtype=np.uint64) + np.uint64(1)
        bits = mix64(seed + step * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def key_of(*parts: int | str) -> int:
    """A stable 64-bit key of numbers and names (the same in every process and Python version)."""
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Stream:
    """Random numbers for one (seed, node, iteration), addressed by uid and draw.

    >>> s = Stream(0, "sampler", 3)
    >>> bool(s.uniform(torch.tensor([7]))[0] == s.uniform(torch.tensor([5, 7]))[1])
    True
    """

    def __init__(self, *key: int | str) -> None:
        self._key = np.uint64(key_of(*key))

    def bits(self, uid: Tensor, draw: int | str = 0) -> NDArray[np.uint64]:
        """uint64 [N], one per uid; `draw` names an independent stream for the same uid."""
        rows = uid.cpu().numpy().astype(np.int64).view(np.uint64)
        with np.errstate(over="ignore"):
            keyed = mix64(np.array(np.uint64(key_of(draw)) + self._key * _GOLDEN))
            return mix64(mix64(rows * _GOLDEN + keyed) + keyed)

    def seeds(self, uid: Tensor, draw: int | str = 0) -> Tensor:
        """Non-negative int64 [N]: request seeds for an engine."""
        return torch.from_numpy((self.bits(uid, draw) >> np.uint64(1)).astype(np.int64))

    def uniform(self, uid: Tensor, draw: int | str = 0) -> Tensor:
        """float64 [N] in [0, 1)."""
        return torch.from_numpy((self.bits(uid, draw) >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def integers(self, uid: Tensor, low: Tensor | int, high: Tensor | int, draw: int | str = 0) -> Tensor:
        """int64 [N], uniform on [low, high); bounds may differ per row."""
        span = torch.as_tensor(high) - torch.as_tensor(low)
        return torch.as_tensor(low) + (self.uniform(uid, draw) * span).floor().to(torch.int64)

    def generator(self, uid: int = 0, draw: int | str = 0) -> np.random.Generator:
        """A NumPy generator (Philox) for draws with no natural row, such as a shuffle."""
        bits: Any = self.bits(torch.tensor([uid]), draw)[0]
        return np.random.Generator(np.random.Philox(key=int(bits)))
