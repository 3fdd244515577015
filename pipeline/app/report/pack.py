"""Columns as one compressed blob that a page opens with the browser's own DecompressionStream.

Bytes: a little-endian uint32 with the length of a JSON header, the header, then every array at the 8-byte-aligned place
it names. The blob is zlib-compressed and base64-encoded, so that the HTML itself never contains recorded text.
"""

import base64
import json
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditgraph.pipeline.app.report.rollouts import Rollouts
from creditgraph.pipeline.run.metrics import plain


def pack(header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> str:
    """The blob as base64 text; `header` gets "arrays": name → [dtype, offset from the end of the header, count]."""
    places: dict[str, list[Any]] = {}
    parts: list[bytes] = []
    size = 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
        places[name] = [array.dtype.name, size, len(array)]
        # Browsers refuse a typed array at an offset that its element size does not divide.
        parts += [data, b"\0" * (-len(data) % 8)]
        size += len(data) + -len(data) % 8
    text = json.dumps(plain({**header, "arrays": places}), ensure_ascii=True, allow_nan=False).encode()
    text += b" " * (-(len(text) + 4) % 8)
    blob = struct.pack("<I", len(text)) + text + b"".join(parts)
    return base64.b64encode(zlib.compress(blob, 6)).decode()


def unpack(text: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The inverse of `pack`.

    >>> unpack(pack({"a": 1}, {"b": np.array([1, 2], np.int16)}))[1]["b"].tolist()
    [1, 2]
    """
    blob = zlib.decompress(base64.b64decode(text))
    (length,) = struct.unpack("<I", blob[:4])
    header = json.loads(blob[4 : 4 + length])
    base = 4 + length
    return header, {n: np.frombuffer(blob, np.dtype(d), c, base + at) for n, (d, at, c) in header["arrays"].items()}


def pack_rollouts(rollouts: Rollouts) -> str:
    """All columns of `rollouts`; credit and log-ratio in 16 bits, entropy and log-prob as square roots in 8."""
    rows = rollouts.rows
    arrays: dict[str, NDArray[Any]] = {}
    scales: dict[str, float] = {}
    for name, dtype in _ROW_TYPES.items():
        arrays[name] = np.array(rows[name], dtype)
    # Only equality counts.
    arrays["problem"] = np.unique(np.array(rows["problem"], np.int64), return_inverse=True)[1].astype(np.uint32)
    arrays["offset"] = np.concatenate([[0], np.cumsum(np.array(rows["length"], np.int64))]).astype(np.uint32)
    arrays["value_offset"] = np.concatenate([[0], np.cumsum(np.array(rows["values"], np.int64))]).astype(np.uint32)
    arrays["piece"] = rollouts.joined("piece", np.uint16 if len(rollouts.pieces.items) < 65536 else np.uint32)
    arrays["flags"] = rollouts.joined("flags", np.uint8)
    arrays["value"] = rollouts.joined("value", np.float32)
    # Colours need no more precision, and integers compress far better than floats.
    for name in ("credit", "ratio"):
        column = rollouts.joined(name, np.float64)
        scales[name] = float(np.abs(column).max()) if len(column) else 0.0
        if scales[name]:
            arrays[name] = np.round(column / scales[name] * 32767).astype(np.int16)
    for name, sign in (("entropy", 1.0), ("logprob", -1.0)):
        column = np.clip(sign * rollouts.joined(name, np.float64), 0, None)
        scales[name] = float(column.max()) if len(column) else 0.0
        if scales[name]:
            arrays[name] = np.round(np.sqrt(column / scales[name]) * 255).astype(np.uint8)
    # As text: a browser's numbers hold 53 bits.
    header = {
        "pieces": rollouts.pieces.items,
        "texts": rollouts.texts.items,
        "scales": scales,
        "uid": [str(u) for u in rows["uid"]],
    }
    return pack(header, arrays)


_ROW_TYPES = {
    "run": np.uint8,
    "iteration": np.uint32,
    "parent": np.int32,
    "inherited": np.uint32,
    "version": np.int32,
    "node": np.uint32,
    "finish": np.uint32,
    "prompt": np.uint32,
    "text": np.int32,
    "reward": np.float32,
    "correct": np.uint8,
    "detail": np.uint32,
    "why": np.uint32,
    "step": np.int32,
    "step_source": np.uint32,
    "answer": np.uint32,
    "mean_credit": np.float32,
    "episode": np.int32,
    "turn": np.int32,
    "turn_reward": np.float32,
    "turn_done": np.uint8,
    "turn_state": np.uint32,
    "turn_fault": np.uint32,
}
