"""Keyed random streams: every draw is a function of (seed, node, iteration, uid, draw), never of order or batch cut.

A counter-based generator (the SplitMix64 finaliser over a keyed counter) needs no state, so nothing has to be saved,
and the same trajectory gets the same numbers whether its batch was cut in two, overlapped with learning, or replayed
alone.
"""

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Constants of SplitMix64: the golden ratio as an odd 64-bit step, and the two multipliers of its finaliser.
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
    # The upper 53 bits are the mantissa of a double.
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def counter_seed(seed: int, counter: int) -> int:
    """Number `counter` of the stream of a 64-bit seed as a seed itself, 0 to 2**63 - 1.

    Engines with their own generator receive ``counter_seed(request_seed, t)`` for a request that continues after t
    sampled tokens.
    """
    with np.errstate(over="ignore"):
        step = np.uint64(counter % 2**64) + np.uint64(1)
        bits = mix64(np.array([np.uint64(seed % 2**64) + step * _GOLDEN]))
    return int(bits[0] >> np.uint64(1))


def key_of(*parts: int | str) -> int:
    """A stable 64-bit key of numbers and names (the same in every process and Python version)."""
    # Types are part of the key, so that 1 and "1" differ; the separator cannot occur in a name.
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
            # Mixed twice, with the key in between: uids are nearly consecutive, and so may keys be.
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


def keys_within(owner: Tensor) -> Tensor:
    """int64 [N]: a key per row, of its owner (its prompt's uid) and its place among the rows of that owner.

    Streams are addressed by it where rows have no id that stays the same when a batch is spread over other replicas:
    which prompt a row answers, and the order of a prompt's rows, do.

    >>> a, b = keys_within(torch.tensor([7, 9, 7])), keys_within(torch.tensor([7, 7]))
    >>> bool(a[0] == b[0]), bool(a[2] == b[1]), len(set(a.tolist()))
    (True, True, 3)
    """
    order = torch.argsort(owner, stable=True)
    place = torch.arange(len(owner))
    at = owner[order]
    first = torch.searchsorted(at, at)
    places = torch.empty_like(place)
    places[order] = place - first
    with np.errstate(over="ignore"):
        mixed = mix64(owner.numpy().astype(np.int64).view(np.uint64) * _GOLDEN + places.numpy().view(np.uint64))
        return torch.from_numpy(mix64(mixed + _GOLDEN).view(np.int64))
