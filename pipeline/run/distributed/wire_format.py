"""Values as bytes for sending: a JSON header and raw tensor buffers, as in a checkpoint; never pickle."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from creditgraph.pipeline.core.encoding import Encoded, decode, encode
from creditgraph.pipeline.core.payloads import Batch


def pack(value: Any) -> Tensor:
    """A value (see `creditgraph.pipeline.core.encoding`) as uint8 [bytes]: its `pieces`, one after the other.

    The length of the header in 8 bytes, the header, then the tensors; every part begins at a multiple of 8.

    >>> unpack(pack({"a": [1, torch.tensor([2.5])]}))
    {'a': [1, tensor([2.5000])]}
    """
    return torch.cat(pieces(value))


def pieces(value: Any) -> list[Tensor]:
    """The parts of a packed value; tensors are not copied."""
    state = encode(value, "value", copy=False)
    about = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in state.tensors.items()]
    header = json.dumps({"tree": state.tree, "tensors": about}).encode()
    header += b" " * (-len(header) % 8)
    front = len(header).to_bytes(8, "little") + header
    parts = [torch.frombuffer(bytearray(front), dtype=torch.uint8)]
    for tensor in state.tensors.values():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        # Padded to 8 bytes, so that a view as any dtype is aligned.
        parts += [raw, raw.new_zeros(-len(raw) % 8)]
    return parts


def unpack(data: Tensor) -> Any:
    """The inverse of `pack`; tensors are on the CPU."""
    size = int.from_bytes(data[:8].numpy().tobytes(), "little")
    header = json.loads(data[8 : 8 + size].numpy().tobytes())
    tensors = {}
    at = 8 + size
    for name, kind, shape in header["tensors"]:
        dtype = getattr(torch, kind)
        count = torch.Size(shape).numel() * dtype.itemsize
        tensors[name] = data[at : at + count].clone().view(dtype).reshape(shape)
        at += count + -count % 8
    return decode(Encoded(header["tree"], tensors))


def join(values: Sequence[Any]) -> Any:
    """The values of all replicas as one: batches are concatenated in order, lists item by item.

    Parts without rows add nothing; for all other values the first replica's is used.
    """
    first = values[0]
    if isinstance(first, list):
        return [join([v[i] for v in values]) for i in range(len(first))]
    if not isinstance(first, Batch):
        return first
    filled = [v for v in values if len(v)]
    joined = first if not filled else filled[0] if len(filled) == 1 else type(first).concat(filled)
    if joined.origin != first.origin:
        object.__setattr__(joined, "origin", first.origin)
    return joined
