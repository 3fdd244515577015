"""Checkpoints: nested states as safetensors plus JSON, never pickle; written to a temporary folder, then renamed.

    checkpoints/000011/
        tensors.safetensors   every tensor, "<group>/<number>"
        state.json            the nesting around them
        shards/<node>/        shards that collective nodes write from every rank
        manifest.json         iteration, size and SHA-256 of each file, marks of the run's logs, and its own SHA-256

A directory whose manifest or files are not those that were written does not count as a checkpoint. The run that
continues renames it to damaged-000011, so that it neither takes the place of a valid one nor is lost.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from creditgraph.pipeline.core.encoding import Encoded, decode
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.run.run_directory import make_folder, sync_directory, writing

logger = logging.getLogger("creditgraph")

FORMAT = 4
SHARDS = "shards"
STATE_FILES = ("tensors.safetensors", "state.json")
_NUMBER = "[0-9]" * 6
_ERRNOS = (28, 122, 27, 30, 13)  # ENOSPC, EDQUOT, EFBIG, EROFS, EACCES


class DamagedError(RunError):
    """A checkpoint whose files are not those that were written."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When the state of a run is saved."""

    every: int = 10
    """iterations between checkpoints; 0 saves only at the end and when interrupted"""
    keep: int = 2
    """newest checkpoints kept; 2 leaves one to fall back to when the last is damaged"""
    background: bool = False
    """go on while processes of their own write what every rank writes for itself (`learner.megatron`), from a copy in
    host memory; the checkpoint counts from the end of the iteration in which the last of them is done"""

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 1:
            raise ValueError(f"every {self.every} and keep {self.keep}: expected every ≥ 0 and keep ≥ 1.")


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint.

    Attributes:
        groups: group name → state.
        logs: file of the run directory → its size and SHA-256 ("bytes", "sha256") when the checkpoint was written.
    """

    path: Path
    iteration: int
    groups: dict[str, Any]
    logs: dict[str, dict[str, Any]] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of a run, in one directory."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path
        self.keep = keep
        make_folder(path)

    def clean(self) -> None:
        """Removes the remains of an interrupted write; the caller holds the run's lock."""
        for entry in [*self.path.glob(".tmp-*"), *self.path.glob(".old-*")]:
            _remove(entry)

    def aside(self, iteration: int) -> Path:
        """The temporary folder for the state after `iteration`."""
        return self.path / f".tmp-{iteration:06d}"

    def save(
        self,
        iteration: int,
        groups: Mapping[str, Encoded],
        shards: Callable[[Path], None] | None = None,
        logs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Path:
        """Writes the state after `iteration` in one call; `shards` is called with the folder `SHARDS` in it."""
        self.begin(iteration, groups)
        if shards is not None:
            with self.attempt(iteration) as aside:
                (aside / SHARDS).mkdir()
                shards(aside / SHARDS)
        return self.complete(iteration, logs or {})

    @contextmanager
    def attempt(self, iteration: int) -> Iterator[Path]:
        """Around writing in the folder of `aside`: an error of the file system removes it and names what is missing."""
        aside = self.aside(iteration)
        with writing(self.path / f"{iteration:06d}"):
            try:
                yield aside
            except (OSError, SafetensorError) as error:
                _remove(aside)
                raise _as_os_error(error) from error

    def begin(self, iteration: int, groups: Mapping[str, Encoded]) -> None:
        """Writes the states after `iteration`, under a name that does not count; `complete` makes them a checkpoint."""
        _remove(self.aside(iteration))
        with self.attempt(iteration) as aside:
            aside.mkdir()
            _write_states(aside, groups)

    def complete(self, iteration: int, logs: Mapping[str, Mapping[str, Any]]) -> Path:
        """Makes a checkpoint of what was written since `begin`; the directory appears complete or not at all.

        Every rank may have summed its part of the shards with `sum_shards`. `logs` are the marks of `Checkpoint.logs`.
        """
        final = self.path / f"{iteration:06d}"
        with self.attempt(iteration) as aside:
            _write_manifest(aside, iteration, logs)
        with writing(final):
            # A run that was resumed from an earlier checkpoint may write the same iteration again.
            if final.exists():
                self._discard(final)
            os.replace(aside, final)
            sync_directory(self.path)
        for old in numbered(self.path)[: -self.keep]:
            self._discard(old)
        return final

    def latest(self, rename: bool = False, reads: Callable[[str], bool] | None = None) -> Checkpoint | None:
        """The newest valid checkpoint, or None; a damaged one is skipped with a warning.

        Args:
            rename: rename damaged ones to `damaged-…`; the caller holds the run's lock.
            reads: whether to read a group of this name; by default all groups are read.

        Raises:
            RunError: it was written by another version, or holds payloads of a class that is not imported. Starting
                again would overwrite the run.
        """
        damaged = 0
        for path in reversed(numbered(self.path)):
            try:
                return load(path, reads)
            except DamagedError as error:
                damaged += 1
                place = f", set aside as {self.set_aside(path).name}" if rename else ""
                logger.warning("%s It is skipped%s; the previous one is tried.", error, place)
        if damaged:
            logger.warning(
                "%s: no valid checkpoint is left; a run that continues here starts from its first iteration.", self.path
            )
        return None

    def set_aside(self, path: Path) -> Path:
        """Renames a damaged checkpoint to a free name `damaged-…`, which is kept until somebody removes it."""
        target = path.with_name(f"damaged-{path.name}")
        number = 2
        while target.exists():
            target = path.with_name(f"damaged-{path.name}-{number}")
            number += 1
        with writing(path):
            os.replace(path, target)
            sync_directory(self.path)
        return target

    def _discard(self, path: Path) -> None:
        # Renamed first: a half-removed checkpoint must not look like a damaged one.
        aside = path.with_name(f".old-{path.name}")
        _remove(aside)
        with writing(path):
            os.replace(path, aside)
        _remove(aside)


def _write_states(aside: Path, groups: Mapping[str, Encoded]) -> None:
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


def _write_manifest(aside: Path, iteration: int, logs: Mapping[str, Mapping[str, Any]]) -> None:
    sums = {name: checksum(aside / name) for name in STATE_FILES}
    for part in aside.glob(f".{SHARDS}-*.json"):
        sums |= json.loads(part.read_text(encoding="utf-8"))
        part.unlink()
    files: dict[str, dict[str, Any]] = {}
    for name in [*STATE_FILES, *_shard_names(aside)]:
        files[name] = {"bytes": (aside / name).stat().st_size, "sha256": sums.get(name) or checksum(aside / name)}
        _sync_file(aside / name)
    manifest = {"format": FORMAT, "iteration": iteration, "files": files, "logs": logs}
    manifest["sha256"] = manifest_checksum(manifest)
    (aside / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _sync_file(aside / "manifest.json")
    sync_directory(aside)


def numbered(folder: Path) -> list[Path]:
    """The checkpoints in a run's checkpoints/ folder, oldest first, damaged ones included that are not set aside."""
    entries = (p for p in folder.glob(f"{_NUMBER}*") if p.name.isdecimal()) if folder.is_dir() else ()
    return sorted(entries, key=lambda p: int(p.name))


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads the manifest of a checkpoint directory: iteration, size and SHA-256 of each file, marks of logs.

    Raises:
        DamagedError: there is none that can be read, it is not as it was written, or it is that of another iteration.
        RunError: it has another format, or must not be read.
    """
    file = path / "manifest.json"
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict):
            raise DamagedError(f"{file}: expected a JSON object, got a {type(manifest).__name__}.")
        written = manifest.get("format")
        signed = "sha256" in manifest
        # Earlier formats have no checksum; in later ones a wrong one says more than the number of the format.
        if signed and manifest["sha256"] != manifest_checksum(manifest):
            raise DamagedError(f"{file}: its checksum is not that of its content; the checkpoint is damaged.")
        if type(written) is int and written != FORMAT:
            raise RunError(
                f"{path}: expected checkpoint format {FORMAT}, got {written}; continue the run with the version of "
                "creditgraph that wrote it, or start a new one with another run.name."
            )
        problem = "no checksum of its own" if not signed else _ill_typed(manifest)
        if problem:
            raise DamagedError(f"{file}: {problem}; the checkpoint is damaged.")
    except PermissionError as error:
        raise RunError(f"{file}: may not be read; correct its permissions.") from error
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, RunError):
            raise
        raise DamagedError(f"{path}: not a readable checkpoint ({type(error).__name__}: {error}).") from error
    if path.name.isdecimal() and manifest["iteration"] != int(path.name):
        raise DamagedError(
            f"{file}: expected iteration {int(path.name)}, as the folder is named, got {manifest['iteration']}; the "
            "checkpoint is damaged."
        )
    return dict(manifest)


def load(path: Path, reads: Callable[[str], bool] | None = None, verify: bool = True) -> Checkpoint:
    """Reads one checkpoint directory.

    Args:
        path: the directory.
        reads: whether to read a group of this name; by default all groups are read.
        verify: whether to compare checksums, except those of shards (`check_shards`); sizes are always compared.

    Raises:
        DamagedError: a file is missing, cut off or changed.
        RunError: it has another format, holds payloads of a class that is not imported, or must not be read.
    """
    manifest = read_manifest(path)
    try:
        for name, entry in manifest["files"].items():
            _check_file(path / name, entry, verify and name in STATE_FILES)
        trees = json.loads((path / "state.json").read_text(encoding="utf-8"))
        trees = {group: tree for group, tree in trees.items() if reads is None or reads(group)}
        with safe_open(path / "tensors.safetensors", framework="pt") as file:
            names = [name for name in file.keys() if name.rsplit("/", 1)[0] in trees]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in names}
    except PermissionError as error:
        raise RunError(f"{path}: may not be read ({error.filename}); correct its permissions.") from error
    except (OSError, ValueError, AttributeError, RecursionError, SafetensorError) as error:
        if isinstance(error, RunError):
            raise
        raise DamagedError(f"{path}: not a readable checkpoint ({type(error).__name__}: {error}).") from error
    by_group: dict[str, dict[str, Tensor]] = {group: {} for group in trees}
    for name, tensor in tensors.items():
        group, number = name.rsplit("/", 1)
        by_group[group][number] = tensor
    try:
        groups = {group: decode(Encoded(tree, by_group[group])) for group, tree in trees.items()}
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, RunError):
            raise
        # Its bytes are those that were written, so an older checkpoint would be no different.
        raise RunError(
            f"{path / 'state.json'}: cannot be restored ({type(error).__name__}: {error}); continue the run with the "
            "version of creditgraph that wrote it."
        ) from error
    return Checkpoint(path, manifest["iteration"], groups, manifest["logs"])


def sum_shards(folder: Path, part: int, parts: int) -> None:
    """Writes the SHA-256 of every `parts`-th shard in a folder that is being written, beside it for `save`."""
    aside = folder.parent
    sums = {name: checksum(aside / name) for name in _shard_names(aside)[part::parts]}
    (aside / f".{SHARDS}-{part}.json").write_text(json.dumps(sums), encoding="utf-8")


def check_shards(path: Path, part: int = 0, parts: int = 1) -> None:
    """Compares the checksums of every `parts`-th shard of a checkpoint; raises DamagedError."""
    files = read_manifest(path)["files"]
    for name in sorted(files.keys() - set(STATE_FILES))[part::parts]:
        _check_file(path / name, files[name], verify=True)


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_file(file: Path, entry: Mapping[str, Any], verify: bool) -> None:
    try:
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise DamagedError(f"{file}: {size} bytes, the manifest says {entry['bytes']}; the checkpoint is damaged.")
        if verify and checksum(file) != entry["sha256"]:
            raise DamagedError(f"{file}: its checksum differs from the manifest; the checkpoint is damaged.")
    except PermissionError:
        raise
    except OSError as error:
        raise DamagedError(f"{file}: cannot be read ({error.strerror}); the checkpoint is damaged.") from error


def manifest_checksum(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its own checksum, as JSON with sorted keys and without spaces."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _ill_typed(manifest: Mapping[str, Any]) -> str:
    """What is wrong with the types of a manifest, "" when nothing is."""
    if type(manifest.get("format")) is not int or type(manifest.get("iteration")) is not int:
        return "expected whole numbers for format and iteration"
    for section in ("files", "logs"):
        entries = manifest.get(section)
        if not isinstance(entries, dict):
            return f"expected {section} by name, got {type(entries).__name__}"
        for name, entry in entries.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return f"expected {section} below the folder, got '{name}'"
            if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or not entry.get("sha256"):
                return f"expected bytes and sha256 of {name}, got {entry!r:.40}"
    missing = [name for name in STATE_FILES if name not in manifest["files"]]
    return f"no entry for {missing[0]}" if missing else ""


def _shard_names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in (folder / SHARDS).rglob("*") if p.is_file())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _as_os_error(error: Exception) -> OSError:
    """Restores the errno of a failed write, which safetensors reports as text only."""
    if isinstance(error, OSError):
        return error
    for number in _ERRNOS:
        if f"os error {number})" in str(error):
            return OSError(number, os.strerror(number))
    return OSError(0, str(error))


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
