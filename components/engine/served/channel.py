"""How weights get from a learner to engines: a `WeightChannel` publishes one version at a time, with a checksum to hold it against."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from components.engine.adapters import CONFIG_FILE, TENSORS_FILE, adapter_name, peft_config
from components.engine.served.dialect import Update
from pipeline.core.errors import CreditgraphError, DataError, RunError
from pipeline.core.payloads import Weights

SAMPLED_TENSORS = 8
_SAMPLED_BYTES = 1 << 20
_PREFIX = "creditgraph-weights-"
_FAILED = "failed"  # tells those who wait for files of a folder that no more come
_POLL_SECONDS = 0.001
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, kw_only=True)
class ChannelSettings:
    """How weights reach servers."""

    kind: Literal["file", "nccl"] = "file"
    """file: safetensors that servers read; nccl: broadcast to the servers' GPUs through vLLM's own update API, not yet
    run on a GPU"""
    path: str = "/dev/shm"
    """folder for weight files; a shared file system when servers run on other hosts"""
    fallback: str = ""
    """folder taken when `path` is full; "" stops the run instead"""
    dtype: Literal["model", "bfloat16", "float32"] = "model"
    """of the tensors on their way; model: that of model.dtype, so that float32 stays exact"""
    bucket_mb: int = 128
    """most megabytes of whole tensors per file, or per packed broadcast; servers load one file while the next is
    written"""

    def __post_init__(self) -> None:
        if self.bucket_mb < 1:
            raise ValueError(f"bucket_mb is {self.bucket_mb}; wanted at least 1.")


class WeightChannel(Protocol):
    """Publishes weights; a pool then has its servers load them."""

    def publish(self, weights: Weights, early: bool = False) -> Update:
        """Makes `weights` loadable; the update stays loadable until `retire`. With `early` some files may come later (`Update.written`);
        the tensors must not change until they have."""
        ...

    def retire(self, version: int) -> None:
        """Drops every update but that of `version`, which late servers still load."""
        ...

    def close(self) -> None:
        """Drops everything."""
        ...


class FileChannel:
    """Weights through safetensors files: in /dev/shm on one host, or on a file system that all hosts share.

    A version is a folder that appears under its name when it is complete. Published early, the folder is there at once,
    and each file when it is complete; its files are those of the last but one version, written over: a server that
    still reads those tells the wrong version and loads again. Weights that are a folder already (`Weights.path`) in the
    right dtype are not copied.

    Args:
        settings: of the channel.
        dtype: of the tensors in the files.
    """

    def __init__(self, settings: ChannelSettings, dtype: torch.dtype) -> None:
        self._settings, self._dtype = settings, dtype
        self._folders: dict[int, Path] = {}
        self._layouts: dict[
            Path, list[Layout]
        ] = {}  # of versions that were published early: their files may be written over
        self._spare: Path | None = None
        self._writer = ThreadPoolExecutor(1, "creditgraph-weights")
        self.path = _own_folder(Path(settings.path))
        self.fallback = _own_folder(Path(settings.fallback)) if settings.fallback else None
        remove_abandoned(Path(settings.path))

    @property
    def folders(self) -> list[Path]:
        """Where files may be; to be removed with the run."""
        return [self.path] if self.fallback is None else [self.path, self.fallback]

    def publish(self, weights: Weights, early: bool = False) -> Update:
        """Writes the weights, all but adapters in a thread with `early`; raises RunError, naming the setting, when there is no room."""
        tensors, files = self._source(weights)
        update = self._described(weights, tensors)
        if files is None and early and not update.adapter:
            return self._begin(update, tensors)
        if files is None:
            files = self._write(weights, tensors)
        return dataclasses.replace(update, path=str(files[0].parent), files=tuple(map(str, files)))

    def describe(self, weights: Weights) -> Update:
        """The update that another process publishes of the same weights: nothing is written, servers are only verified."""
        tensors, _ = self._source(weights)
        return dataclasses.replace(self._described(weights, tensors), loaded=True)

    @staticmethod
    def _described(weights: Weights, tensors: dict[str, Tensor]) -> Update:
        # An adapter is small: every tensor is in the checksum.
        names = sample_names(tensors) if weights.adapter is None else tuple(sorted(tensors))
        name = "" if weights.adapter is None else adapter_name(weights.version)
        checksum = sample_checksum(tensors, names)
        return Update(version=weights.version, path="", files=(), sample=names, checksum=checksum, adapter=name)

    def retire(self, version: int) -> None:
        """Removes the files of all other versions, but keeps one that an early version may be written over."""
        for folder in [self._folders.pop(v) for v in sorted(self._folders) if v != version]:
            self._drop_spare()
            if folder in self._layouts:
                self._spare = folder
            else:
                shutil.rmtree(folder, ignore_errors=True)

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._layouts.pop(self._spare, None)
            shutil.rmtree(self._spare, ignore_errors=True)
            self._spare = None

    def close(self) -> None:
        """Removes all files."""
        self._writer.shutdown()
        self._folders.clear()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _source(self, weights: Weights) -> tuple[dict[str, Tensor], list[Path] | None]:
        """Tensors to write in the right dtype, and the files that hold exactly them, if there are any."""
        if weights.tensors is not None:
            return distinct(weights.tensors, self._dtype), None
        assert weights.path is not None, "the engine names a path for a model's own weights"
        files = sorted(Path(weights.path).resolve().glob("*.safetensors"))
        if not files:
            raise DataError(
                f"weights path {weights.path}: no *.safetensors file; wanted a folder in Hugging Face layout."
            )
        tensors = {name: tensor for file in files for name, tensor in read_file(file)}
        if all(tensor.dtype == self._dtype for tensor in tensors.values()):
            return tensors, files
        return distinct(tensors, self._dtype), None

    def _begin(self, update: Update, tensors: dict[str, Tensor]) -> Update:
        """The update with the names of its files, which a thread begins to write."""
        needed = sum(tensor.nbytes for tensor in tensors.values())
        cut = list(self._buckets(tensors))
        layouts = [layout_of(bucket) for bucket in cut]
        spare = self._spare
        if spare is None or self._layouts[spare] != layouts or spare.name == f"v{update.version}":
            self._drop_spare()
            spare = None
            folder = next((f for f in self.folders if _has_room(f, needed)), None)
            if folder is None:
                raise self._no_room(
                    update.version, needed, [f"{f.parent} ({os.strerror(errno.ENOSPC)})" for f in self.folders]
                )
        else:
            folder = spare.parent
        final = folder / f"v{update.version}"
        with _told(folder):
            shutil.rmtree(final, ignore_errors=True)
            final.mkdir(parents=True)
        self._folders[update.version], self._layouts[final] = final, layouts
        parts = {final / f"bucket-{n:05d}.safetensors": bucket for n, bucket in enumerate(cut)}
        written = self._writer.submit(self._write_parts, parts, spare, update.version, needed)
        if spare is not None:
            self._spare = None
            del self._layouts[spare]
        return dataclasses.replace(update, path=str(final), files=tuple(map(str, parts)), written=written)

    def _write_parts(self, parts: dict[Path, dict[str, Tensor]], spare: Path | None, version: int, needed: int) -> None:
        folder = next(iter(parts)).parent
        try:
            for file, bucket in parts.items():
                aside = file.with_name(f".{file.name}")
                if spare is None:
                    write_file(aside, bucket)
                else:
                    (spare / file.name).replace(aside)
                    write_over(aside, bucket)
                aside.replace(file)
            if spare is not None:
                spare.rmdir()
        except OSError as error:
            with contextlib.suppress(OSError):
                (folder / _FAILED).touch()
            if error.errno in _FULL:
                raise self._no_room(version, needed, [f"{folder.parent.parent} ({error.strerror})"]) from error
            raise _not_written(folder.parent, error) from error

    def _write(self, weights: Weights, tensors: dict[str, Tensor]) -> list[Path]:
        needed = sum(tensor.nbytes for tensor in tensors.values())
        tried: list[str] = []
        for folder in self.folders:
            try:
                return self._write_to(folder, weights, tensors, needed)
            except OSError as error:
                if error.errno not in _FULL:
                    raise _not_written(folder, error) from error
                tried.append(f"{folder.parent} ({error.strerror})")
        raise self._no_room(weights.version, needed, tried)

    def _no_room(self, version: int, needed: int, tried: Sequence[str]) -> RunError:
        hint = (
            "engine.channel.path and engine.channel.fallback to folders"
            if self.fallback
            else "engine.channel.fallback to a folder"
        )
        return RunError(
            f"weights version {version}: {needed / 1e6:.1f} MB found no room in {', nor in '.join(tried)}; wanted room "
            "for two "
            f"versions. Free space there, or set {hint} with room."
        )

    def _write_to(self, folder: Path, weights: Weights, tensors: dict[str, Tensor], needed: int) -> list[Path]:
        if not _has_room(folder, needed):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        aside, final = folder / f".v{weights.version}", folder / f"v{weights.version}"
        for stale in (aside, final):
            shutil.rmtree(stale, ignore_errors=True)
        aside.mkdir()
        try:
            if weights.adapter is not None:
                # PEFT's layout, which is what vLLM reads.
                (aside / CONFIG_FILE).write_text(peft_config(weights.adapter), encoding="utf-8")
                names = [write_file(aside / TENSORS_FILE, tensors)]
            else:
                names = [
                    write_file(aside / f"bucket-{n:05d}.safetensors", bucket)
                    for n, bucket in enumerate(self._buckets(tensors))
                ]
            aside.replace(final)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._folders[weights.version] = final
        return [final / name for name in names]

    def _buckets(self, tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        yield from buckets(tensors, self._settings.bucket_mb << 20)


def _has_room(folder: Path, needed: int) -> bool:
    """Asked before writing: a memory file system would let the file grow and end the writer with SIGBUS."""
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(folder).free >= needed


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _not_written(folder, error) from error


def _not_written(folder: Path, error: OSError) -> RunError:
    return RunError(f"engine.channel.path: weights cannot be written to {folder.parent} ({error.strerror}).")


def wait_for(file: str | Path, deadline: float) -> None:
    """Returns when `file`, of an update that is being written, is there.

    Raises:
        CreditgraphError: its writer failed, or it is not there by `deadline` (time.monotonic()).
    """
    path = Path(file)
    while not path.exists():
        if (path.parent / _FAILED).exists():
            raise CreditgraphError(f"{path}: could not be written; the process that publishes weights says why.")
        if time.monotonic() >= deadline:
            raise CreditgraphError(f"{path}: not there in time; wanted it from the process that publishes weights.")
        time.sleep(_POLL_SECONDS)


def as_sent(weights: Weights, dtype: torch.dtype) -> Weights:
    """The weights (tensors, no path) after a way through a channel of `dtype`."""
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in (weights.tensors or {}).items()}
    return dataclasses.replace(weights, tensors=tensors)


def buckets(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors of at most `limit` bytes together; a bigger one is alone."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def distinct(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU in `dtype`; of tied ones only the first."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        target = dtype if tensor.is_floating_point() else tensor.dtype
        plain = tensor.detach().to(device="cpu", dtype=target).contiguous()
        # safetensors refuses tensors that share a storage, as views of one flat buffer do.
        found[name] = plain.clone() if plain.untyped_storage().nbytes() != plain.nbytes else plain
    return found


def write_file(file: Path, tensors: dict[str, Tensor]) -> str:
    """One safetensors file; its name. Raises OSError when there is no room."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, file)
    except SafetensorError as error:
        text = str(error)
        number = next((n for n in _FULL if f"os error {n}" in text), errno.EIO)
        raise OSError(number, os.strerror(number) if number != errno.EIO else text) from error
    return file.name


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """What must be equal for the tensors of one file to be written over those of another."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def write_over(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors over those of the same layout in a safetensors file: memory that is there takes a third of the time of new."""
    with file.open("r+b", buffering=0) as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(length))
        for name, tensor in tensors.items():
            handle.seek(8 + length + header[name]["data_offsets"][0])
            data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
            while data:
                data = data[handle.write(data) :]


def read_file(file: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor (mapped, not read) of everything in a safetensors file."""
    from safetensors import safe_open

    with safe_open(str(file), framework="pt", device="cpu") as opened:
        for name in opened.keys():  # noqa: SIM118 (no mapping)
            yield name, opened.get_tensor(name)


def sample_names(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The fixed sample that a checksum covers: names evenly spread over the sorted ones, the first and the last among them."""
    names = sorted(tensors)
    if len(names) <= SAMPLED_TENSORS:
        return tuple(names)
    return tuple(names[i * (len(names) - 1) // (SAMPLED_TENSORS - 1)] for i in range(SAMPLED_TENSORS))


def sample_checksum(tensors: Mapping[str, Tensor], names: Sequence[str]) -> str:
    """Hash of the named tensors: name, dtype, shape, first and last MiB. Raises CreditgraphError when one is missing."""
    digest = hashlib.sha256()
    for name in names:
        if name not in tensors:
            raise CreditgraphError(f"weights: no tensor '{name}'; wanted every tensor that the checksum covers.")
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        raw = tensor.reshape(-1).view(torch.uint8)
        digest.update(raw[:_SAMPLED_BYTES].cpu().numpy().data)
        digest.update(raw[-_SAMPLED_BYTES:].cpu().numpy().data)
    return digest.hexdigest()[:32]


def _own_folder(parent: Path) -> Path:
    # Host, process and its start time: whoever finds the folder can tell whether its run still lives.
    return parent / f"{_PREFIX}{socket.gethostname()}-{os.getpid()}-{_started(os.getpid())}-{os.urandom(3).hex()}"


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "0"


def remove_abandoned(parent: Path) -> None:
    """Removes weight folders of this host's runs that are gone."""
    own = f"{_PREFIX}{socket.gethostname()}-"
    for folder in parent.glob(f"{own}*"):
        pid, _, rest = folder.name.removeprefix(own).partition("-")
        if pid.isdigit() and _started(int(pid)) != rest.partition("-")[0]:
            shutil.rmtree(folder, ignore_errors=True)
