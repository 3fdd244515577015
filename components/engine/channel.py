"""The channel that transfers weights from a learner to servers: one version at a time, as files, with a checksum."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from creditgraph.components.engine.folders import own_folder, remove_abandoned
from creditgraph.components.engine.probe import Probe
from creditgraph.components.engine.weight_files import (
    FAILED,
    FULL,
    Checksum,
    buckets,
    layout_of,
    overwrite_file,
    to_send,
    write_file,
)
from creditgraph.components.models.weights import read_file
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.payloads import Adapter, Weights
from creditgraph.pipeline.core.ranks import same_device

PREFIX = "creditgraph-weights-"
# Metadata of settings that may change when a run is continued: they determine where servers are and how they are
# reached, not what they compute.
PLACE = {"place": True}
_ADAPTER_TENSORS = "adapter_model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, kw_only=True)
class ChannelSettings:
    """Transfer of weights to servers."""

    kind: Literal["file", "broadcast", "ipc"] = field(default="file", metadata=PLACE)
    """file: safetensors that servers read, for CPUs and for servers of another cluster. Without files, in buckets, as
    the learner exports them: broadcast, over one process group to all servers at once, NCCL between GPUs that differ
    from the learner's, gloo between CPUs; ipc, to servers that run on this process's own GPU. Both are tested with
    gloo and mocked GPUs only"""
    path: str = field(default="/dev/shm", metadata=PLACE)
    """folder for weight files; a shared file system when servers run on other hosts"""
    dtype: Literal["model", "bfloat16", "float32"] = "model"
    """dtype of the tensors in transfer; model: that of model.dtype, so that float32 stays exact"""
    bucket_mb: int = field(default=128, metadata=PLACE)
    """most megabytes of whole tensors per file, or per message, of which two are held at a time; servers load one while
    the next is made"""

    def __post_init__(self) -> None:
        if self.bucket_mb < 1:
            raise ValueError(f"bucket_mb: expected at least 1, got {self.bucket_mb}.")

    def sent_dtype(self, model: ModelSpec) -> torch.dtype:
        """The dtype of tensors in transfer."""
        dtype: torch.dtype = getattr(torch, model.dtype if self.dtype == "model" else self.dtype)
        return dtype


@dataclass(frozen=True, kw_only=True)
class Update:
    """Weights for servers to load.

    Attributes:
        version: number of learner iterations that led to them.
        checksum: that of all tensors, see `creditgraph.components.engine.weight_files.Checksum`; completes when
            all files are written, or with the error of the writer.
        path: folder of `files`; "" if another process has published them.
        files: paths of safetensors files with Hugging Face names, in order, each a bucket of whole tensors.
        written: whether all files exist already; else they appear one by one until `checksum` completes.
        adapter: name by which requests select the LoRA adapter that `path` holds in PEFT's layout; "" for whole
            weights.
        loaded: whether another process has published them and has servers load them; they are then only verified here.
        transfer: the `creditgraph.components.engine.served.transfer.Transfer` from which servers get them instead of
            from files.
        probe: a request whose response shows whether the weights took effect, or None.
        expected: the log-probs of that response, which may still be being computed.
    """

    version: int
    checksum: Future[str]
    path: str = ""
    files: tuple[str, ...] = ()
    written: bool = True
    adapter: str = ""
    loaded: bool = False
    transfer: Any = None
    probe: Probe | None = None
    expected: Future[list[float]] | None = None

    @classmethod
    def by_another(cls, weights: Weights, checksum: str) -> "Update":
        """The same weights as another process has published; reads no tensor."""
        done: Future[str] = Future()
        done.set_result(checksum)
        adapter = "" if weights.adapter is None else f"{PREFIX}{weights.version}"
        return cls(version=weights.version, checksum=done, adapter=adapter, loaded=True)

    def label(self) -> str:
        """What a server reports as its weights version: version and checksum, so that no other weights have it."""
        return f"{self.version}-{self.checksum.result()}"


class FileChannel:
    """Weights through safetensors files: in /dev/shm on one host, or on a file system that all hosts share.

    A version is a folder. For servers on this host each of its files appears when it is complete, and is an overwritten
    file of the version before the previous one: writing to allocated memory takes a third of the time of allocating
    it. A server that still reads the old file reports the wrong version and loads again.

    Args:
        settings: settings of the channel.
        dtype: dtype of the tensors in the files.
        near: whether the servers are on this host, so that they see a file as soon as it is complete, and may load it
            while the next one is written.
    """

    def __init__(self, settings: ChannelSettings, dtype: torch.dtype, near: bool = False) -> None:
        self._settings = settings
        self._dtype = dtype
        self._near = near
        self._versions: dict[int, Path] = {}
        self._made = False
        self._spare: Path | None = None  # the version before the previous one, to be overwritten
        self._writer = ThreadPoolExecutor(1, "creditgraph-weights", same_device())
        self.folder = own_folder(Path(settings.path), PREFIX)
        """folder of the files, to be removed with the run"""
        remove_abandoned(Path(settings.path), PREFIX)

    def publish(self, weights: Weights) -> Update:
        """Writes the tensors of `weights`, each once, or those of an adapter; the files exist until `retire`.

        With near servers a thread writes whole weights (`Update.written`): until then the tensors must not change.

        Raises:
            RunError: there is no room; names the setting.
        """
        tensors = to_send(dict(weights.pairs()), self._dtype)
        if weights.adapter is None:
            cut = buckets(tensors, self._settings.bucket_mb << 20)
            parts = {f"bucket-{n:05d}.safetensors": bucket for n, bucket in enumerate(cut)}
        else:
            parts = {_ADAPTER_TENSORS: tensors}
        later = self._near and weights.adapter is None
        folder = self.folder / f"v{weights.version}"
        try:
            self._make_folder(folder, tensors)
            checksum = Future[str]()
            if not later:
                checksum.set_result(_write_parts(folder, parts, weights.adapter))
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise self._not_written(weights.version, tensors, error) from error
        self._versions[weights.version] = folder
        if later:
            checksum = self._writer.submit(self._write_later, weights.version, folder, parts)
        return Update(
            version=weights.version,
            checksum=checksum,
            adapter="" if weights.adapter is None else f"{PREFIX}{weights.version}",
            path=str(folder),
            files=tuple(str(folder / name) for name in parts),
            written=not later,
        )

    def retire(self, version: int) -> None:
        """Removes the files of all other versions, but keeps the newest of them for near servers."""
        for folder in [self._versions.pop(v) for v in sorted(self._versions) if v != version]:
            if self._spare is not None:
                shutil.rmtree(self._spare, ignore_errors=True)
            self._spare = folder
        if self._spare is not None and not self._near:
            shutil.rmtree(self._spare, ignore_errors=True)
            self._spare = None

    def close(self) -> None:
        """Removes all files."""
        self._writer.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make_folder(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Makes a folder with only hidden files to overwrite; raises OSError if there is no room."""
        shutil.rmtree(folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if not self._made:
            self.folder.mkdir(mode=0o700)  # never one that another user has made
            self._made = True
        if self._spare is not None and self._spare.exists():
            self._spare.replace(folder)
            self._spare = None
            for file in list(folder.iterdir()):
                file.replace(folder / f".{file.name}")
        else:
            folder.mkdir()
        # Checked before writing: a memory file system would let the file grow and end the writer with SIGBUS.
        room = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in folder.iterdir())
        if room < _bytes(tensors):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _write_later(self, version: int, folder: Path, parts: Mapping[str, dict[str, Tensor]]) -> str:
        try:
            return _write_parts(folder, parts, None)
        except OSError as error:
            with contextlib.suppress(OSError):
                (folder / FAILED).touch()
            tensors = {name: tensor for part in parts.values() for name, tensor in part.items()}
            raise self._not_written(version, tensors, error) from error

    def _not_written(self, version: int, tensors: Mapping[str, Tensor], error: OSError) -> RunError:
        path = self._settings.path
        if error.errno not in FULL:
            return RunError(f"engine.channel.path: weights cannot be written to {path} ({error.strerror}).")
        return RunError(
            f"weights version {version}: expected room for two versions of {_bytes(tensors) / 1e6:.1f} MB, got too "
            f"little in {path} ({error.strerror}). Free space there, or set engine.channel.path to a folder with room."
        )


def peft_config(adapter: Adapter) -> str:
    """The text of PEFT's adapter_config.json."""
    return json.dumps(
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": adapter.rank,
            "lora_alpha": adapter.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(adapter.targets),
        },
        indent=1,
    )


def _write_parts(folder: Path, parts: Mapping[str, dict[str, Tensor]], adapter: Adapter | None) -> str:
    """Writes the files; returns the checksum of the tensors in memory, not of the files."""
    checksum = Checksum()
    if adapter is not None:
        (folder / _ADAPTER_CONFIG).write_text(peft_config(adapter), encoding="utf-8")
    for name, tensors in parts.items():
        unfinished = folder / f".{name}"
        if unfinished.exists() and layout_of(dict(read_file(unfinished))) == layout_of(tensors):
            overwrite_file(unfinished, tensors)
        else:
            unfinished.unlink(missing_ok=True)
            write_file(unfinished, tensors)
        unfinished.replace(folder / name)
        for tensor_name, tensor in tensors.items():
            checksum.add(tensor_name, tensor)
    for leftover in folder.glob(".*"):
        leftover.unlink()
    return checksum.result()


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
