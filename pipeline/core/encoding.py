"""Nested states as a JSON tree and numbered tensors, for checkpoints and for values sent between ranks."""

import base64
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.handles import Handle
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Payload

KINDS = "tensors, numbers, strings, lists, tuples, dicts, None, arrays and payloads"


@dataclass
class Encoded:
    """A nested state as JSON-able `tree` and numbered CPU `tensors`."""

    tree: Any
    tensors: dict[str, Tensor] = field(default_factory=dict)


def encode(state: Any, place: str, copy: bool = True) -> Encoded:
    """Splits a nested state into a JSON tree and tensors.

    A tensor that occurs twice is stored once and restored as one tensor. `copy` snapshots tensors, for states that
    change before they are written.

    Raises:
        RunError: a value cannot be stored; the error names its place.
    """
    encoded = Encoded(None)
    seen: dict[tuple[Any, ...], str] = {}
    alive: list[Tensor] = []  # so that no address in `seen` is reused

    def tensor(value: Tensor, where: str) -> str:
        if value.layout != torch.strided or value.is_complex():
            raise RunError(
                f"{where}: a {value.layout} tensor of {value.dtype} cannot be checkpointed; expected a dense real "
                "tensor."
            )
        value = value.detach()
        key = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
        if value.numel() and key in seen:
            return seen[key]
        # Numbers instead of paths, which may contain any character.
        name = str(len(encoded.tensors))
        stored = value.cpu().contiguous()
        shares = stored.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
        # safetensors refuses views that share storage, so a part of a larger tensor is copied in any case.
        if shares and (copy or stored.untyped_storage().nbytes() != stored.numel() * stored.element_size()):
            stored = stored.clone()
        encoded.tensors[name] = stored
        seen[key] = name
        alive.append(value)
        return name

    def walk(value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Tensor):
            return {"!": "tensor", "v": tensor(value, where)}
        if isinstance(value, Mapping):
            return {"!": "dict", "v": [[walk(k, where), walk(v, f"{where}[{k!r}]")] for k, v in value.items()]}
        if isinstance(value, list):
            return [walk(v, f"{where}[{i}]") for i, v in enumerate(value)]
        if type(value) in (tuple, torch.Size):
            return {"!": "tuple", "v": [walk(v, f"{where}[{i}]") for i, v in enumerate(value)]}
        if isinstance(value, Jagged):
            return {"!": "jagged", "v": [walk(value.values, where), walk(value.offsets, where)]}
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
            raw = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
            return {
                "!": "array" if isinstance(value, np.ndarray) else "number",
                "v": raw,
                "dtype": value.dtype.str,
                "shape": value.shape,
            }
        if isinstance(value, bytes):
            return {"!": "bytes", "v": base64.b64encode(value).decode()}
        if isinstance(value, Payload) and not isinstance(value, Handle):
            value = value.storable()
            fields = {f.name: walk(getattr(value, f.name), f"{where}.{f.name}") for f in dataclasses.fields(value)}
            return {"!": "payload", "class": class_name(type(value)), "origin": value.origin, "v": fields}
        raise RunError(
            f"{where}: a {type(value).__module__}.{type(value).__qualname__} cannot be checkpointed; expected {KINDS}."
        )

    encoded.tree = walk(state, place)
    return encoded


def decode(encoded: Encoded) -> Any:
    """Restores a state from its tree and tensors; tensors are on the CPU."""

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(v) for v in node]
        if not isinstance(node, dict):
            return node
        # "!" marks types that JSON lacks; plain dicts are lists of pairs, because keys may be numbers.
        kind = node["!"]
        value = node["v"]
        if kind == "tensor":
            return encoded.tensors[value]
        if kind == "dict":
            return {walk(k): walk(v) for k, v in value}
        if kind == "tuple":
            return tuple(walk(v) for v in value)
        if kind == "jagged":
            return Jagged(*map(walk, value))
        if kind in ("array", "number"):
            array = np.frombuffer(base64.b64decode(value), dtype=node["dtype"]).reshape(node["shape"]).copy()
            return array if kind == "array" else array[()]
        if kind == "bytes":
            return base64.b64decode(value)
        payload = payload_class(node["class"])(**{k: walk(v) for k, v in value.items()})
        if node["origin"]:
            object.__setattr__(payload, "origin", node["origin"])
        return payload

    return walk(encoded.tree)


def class_name(cls: type) -> str:
    """ "module:Name" of a payload class, as written in files."""
    return f"{cls.__module__}:{cls.__qualname__}"


def payload_class(name: str) -> type:
    """The payload class that a file names. It must be imported already: a file must not make us import code."""
    open_classes: list[type] = [Payload]
    while open_classes:
        cls = open_classes.pop()
        if class_name(cls) == name:
            return cls
        open_classes += cls.__subclasses__()
    raise RunError(
        f"payload class '{name}' is not known here; import the module that defines it, or use the graph that made the "
        "file."
    )
