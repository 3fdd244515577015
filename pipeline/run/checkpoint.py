"""Checkpoints: nested states as safetensors plus JSON, never pickle; written to a temporary folder, then renamed.

    checkpoints/000011/
        tensors.safetensors   every tensor, "<group>/<number>"
        state.json            the nesting around them
        shards/<node>/        shards that collective nodes write from every rank
        manifest.json         iteration, size and SHA-256 of both files, sizes of the shards

A directory without a sound manifest does not count as a checkpoint.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.core.errors import RunError
from pipeline.core.handles import Handle
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Payload
from pipeline.run.run_directory import sync_directory, writing

logger = logging.getLogger("creditgraph")

FORMAT = 2
SHARDS = "shards"
KINDS = "tensors, numbers, strings, lists, tuples, dicts, None, arrays and payloads"


class DamagedError(RunError):
    """A checkpoint whose files are not those that were written."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When the state of a run is saved."""

    every: int = 10
    """iterations between checkpoints; 0 saves only at the end and when interrupted"""
    keep: int = 2
    """newest checkpoints kept; 2 leaves one to fall back to when the last is damaged"""

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 1:
            raise ValueError(f"every {self.every} and keep {self.keep}: expected every ≥ 0 and keep ≥ 1.")


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


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint: group name → state."""

    path: Path
    iteration: int
    groups: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run, in one directory."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path
        self.keep = keep
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)

    def clean(self) -> None:
        """Removes the remains of an interrupted write; the caller holds the run's lock."""
        for entry in [*self.path.glob(".tmp-*"), *self.path.glob(".old-*")]:
            shutil.rmtree(entry, ignore_errors=True)

    def aside(self, iteration: int) -> Path:
        """The temporary folder for the state after `iteration`."""
        return self.path / f".tmp-{iteration:06d}"

    def save(self, iteration: int, groups: Mapping[str, Encoded], shards: Callable[[Path], None] | None = None) -> Path:
        """Writes the state after `iteration`; the directory appears complete or not at all.

        `shards` is called with the folder `SHARDS` in it.
        """
        final = self.path / f"{iteration:06d}"
        aside = self.aside(iteration)
        with writing(final):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            try:
                if shards is not None:
                    (aside / SHARDS).mkdir()
                    shards(aside / SHARDS)
                self._write(aside, iteration, groups)
            except (OSError, SafetensorError) as error:
                shutil.rmtree(aside, ignore_errors=True)
                raise _as_os_error(error) from error
            # A run that was resumed from an earlier checkpoint may write the same iteration again.
            if final.exists():
                self._discard(final)
            os.replace(aside, final)
            sync_directory(self.path)
        for old in numbered(self.path)[: -self.keep]:
            self._discard(old)
        return final

    def latest(self) -> Checkpoint | None:
        """The newest valid checkpoint, or None; a damaged one is skipped with a warning.

        Raises:
            RunError: it was written by another version, or holds payloads of a class that is not imported. Starting
                again would overwrite the run.
        """
        for path in reversed(numbered(self.path)):
            try:
                return load(path)
            except DamagedError as error:
                logger.warning("%s Skipping it and using the previous one.", error)
        return None

    def _write(self, aside: Path, iteration: int, groups: Mapping[str, Encoded]) -> None:
        tensors = {f"{group}/{name}": t for group, state in groups.items() for name, t in state.tensors.items()}
        owners: set[int] = set()
        for name, tensor in tensors.items():
            pointer = tensor.untyped_storage().data_ptr()
            if pointer in owners and tensor.numel():
                tensors[name] = tensor.clone()  # safetensors refuses two tensors over one storage
            owners.add(pointer)
        save_file(tensors, aside / "tensors.safetensors")
        trees = {group: state.tree for group, state in groups.items()}
        (aside / "state.json").write_text(json.dumps(trees), encoding="utf-8")
        files: dict[str, dict[str, Any]] = {}
        for name in ("tensors.safetensors", "state.json"):
            files[name] = {"bytes": (aside / name).stat().st_size, "sha256": _checksum(aside / name)}
            _sync_file(aside / name)
        for path in sorted(p for p in (aside / SHARDS).rglob("*") if p.is_file()):
            files[str(path.relative_to(aside))] = {"bytes": path.stat().st_size}  # too large to read all of them again
            _sync_file(path)
        manifest = {"format": FORMAT, "iteration": iteration, "files": files}
        (aside / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _sync_file(aside / "manifest.json")
        sync_directory(aside)

    def _discard(self, path: Path) -> None:
        # Renamed first: a half-removed checkpoint must not look like a damaged one.
        aside = path.with_name(f".old-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        with writing(path):
            os.replace(path, aside)
        shutil.rmtree(aside, ignore_errors=True)


def numbered(folder: Path) -> list[Path]:
    """The checkpoint directories in a run's checkpoints/ folder, oldest first, damaged ones included."""
    folders = (p for p in folder.iterdir() if p.name.isdigit() and p.is_dir()) if folder.is_dir() else ()
    return sorted(folders, key=lambda p: int(p.name))


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads the manifest of a checkpoint directory: iteration, size of each file, and SHA-256 except for shards.

    Raises:
        DamagedError: there is none that can be read.
        RunError: it has another format.
    """
    try:
        manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        written = int(manifest["format"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path}: not a readable checkpoint ({type(error).__name__}: {error}).") from error
    if written != FORMAT:
        raise RunError(
            f"{path}: expected checkpoint format {FORMAT}, got {written}; continue the run with the version of "
            "creditgraph that wrote it, or start a new one with another run.name."
        )
    return manifest


def load(path: Path, reads: Callable[[str], bool] | None = None, verify: bool = True) -> Checkpoint:
    """Reads one checkpoint directory.

    Args:
        path: the directory.
        reads: whether to read a group of this name; by default all groups are read.
        verify: whether to compare checksums; sizes are always compared.

    Raises:
        DamagedError: a file is missing, cut off or changed.
        RunError: it has another format, or holds payloads of a class that is not imported.
    """
    try:
        manifest = read_manifest(path)
        for name, entry in manifest["files"].items():
            size = (path / name).stat().st_size
            if size != entry["bytes"]:
                raise DamagedError(
                    f"{path / name}: {size} bytes, the manifest says {entry['bytes']}; the checkpoint is damaged."
                )
            if verify and "sha256" in entry and _checksum(path / name) != entry["sha256"]:
                raise DamagedError(f"{path / name}: its checksum differs from the manifest; the checkpoint is damaged.")
        trees = json.loads((path / "state.json").read_text(encoding="utf-8"))
        trees = {group: tree for group, tree in trees.items() if reads is None or reads(group)}
        with safe_open(path / "tensors.safetensors", framework="pt") as file:
            names = [name for name in file.keys() if name.rsplit("/", 1)[0] in trees]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, RunError):
            raise
        raise DamagedError(f"{path}: not a readable checkpoint ({type(error).__name__}: {error}).") from error
    by_group: dict[str, dict[str, Tensor]] = {group: {} for group in trees}
    for name, tensor in tensors.items():
        group, number = name.rsplit("/", 1)
        by_group[group][number] = tensor
    return Checkpoint(
        path, int(manifest["iteration"]), {g: decode(Encoded(tree, by_group[g])) for g, tree in trees.items()}
    )


def _as_os_error(error: Exception) -> OSError:
    """Restores the errno of a failed write, which safetensors reports as text only."""
    if isinstance(error, OSError):
        return error
    for number in (28, 122, 30, 13):  # ENOSPC, EDQUOT, EROFS, EACCES
        if f"os error {number})" in str(error):
            return OSError(number, os.strerror(number))
    return OSError(0, str(error))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
