"""Columns of numbers in JSON: base64 of little-endian 32-bit values, which takes nanoseconds per value to read."""

import base64
import io
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def pack_ids(values: Sequence[int]) -> str:
    """Token ids as text."""
    return base64.b64encode(np.asarray(values, "<i4").tobytes()).decode("ascii")


def pack_numbers(values: Sequence[float]) -> str:
    """Numbers as text, rounded to float32; NaN and infinities are kept."""
    return base64.b64encode(np.asarray(values, "<f4").tobytes()).decode("ascii")


def pack_array(values: np.ndarray) -> str:
    """An array as text, with its shape and dtype."""
    file = io.BytesIO()
    np.save(file, values)
    return base64.b64encode(file.getvalue()).decode("ascii")


def read_array(text: object) -> np.ndarray:
    """The array that `pack_array` wrote; TypeError or ValueError for anything else."""
    array: np.ndarray = np.load(io.BytesIO(_bytes(text)), allow_pickle=False)
    return array


def read_ids(text: object) -> list[int]:
    """The ids that `pack_ids` wrote; TypeError or ValueError for anything else.

    >>> read_ids(pack_ids([5, 151_000]))
    [5, 151000]
    """
    ids: list[int] = np.frombuffer(_bytes(text), "<i4").tolist()
    return ids


def read_numbers(text: object) -> list[float]:
    """The numbers that `pack_numbers` wrote; TypeError or ValueError for anything else."""
    numbers: list[float] = np.frombuffer(_bytes(text), "<f4").tolist()
    return numbers


def split_scores(numbers: Any) -> tuple[list[float], list[float], list[int], list[float]]:
    """Log-probs, entropies, and the most likely tokens with log-probs, of vLLM's `FlatLogprobs` of a scored prompt.

    Its rows are those of `creditgraph.components.engine.vllm.exact.exact_table`, after an empty one.
    """
    if not numbers or not numbers.logprobs:
        return [], [], [], []
    ids, values = (np.asarray(column).reshape(len(numbers) - 1, -1) for column in (numbers.token_ids, numbers.logprobs))
    return values[:, 0].tolist(), (-values[:, 1]).tolist(), ids[:, 2:].ravel().tolist(), values[:, 2:].ravel().tolist()


def crc_of(reply: Mapping[str, Any]) -> int:
    """CRC-32 of the three columns of a reply, which shows that they belong together; TypeError if one is no text."""
    return zlib.crc32("|".join((reply["tokens"], reply["logprobs"], reply["entropies"])).encode())


def _bytes(text: object) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"expected a column as text, got {str(text)[:80]!r}")
    return base64.b64decode(text, validate=True)
