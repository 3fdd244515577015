"""Weights as safetensors files for engines: writing them, and the checksum that verifies their transfer.

Both ends of the transfer use this module: the channel that publishes and the workers that load.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipeline.core.errors import CreditgraphError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FAILED = "failed"  # a file of this name in a folder means that no more files will be written
_SAMPLED_TENSORS = 8
_SAMPLED_BYTES = 1 << 20
_POLL_SECONDS = 0.001


def write_file(file: Path, tensors: dict[str, Tensor]) -> None:
    """Writes one safetensors file; raises OSError when there is no room."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, file)
    except SafetensorError as error:
        # safetensors reports the error number only in its text.
        text = str(error)
        number = next((n for n in FULL if f"os error {n}" in text), errno.EIO)
        raise OSError(number, os.strerror(number) if number != errno.EIO else text) from error


def layout_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Layout that must be equal for `overwrite_file` to replace other tensors by these."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def overwrite_file(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors over those of the same layout in a file."""
    with file.open("r+b", buffering=0) as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(length))
        for name, tensor in tensors.items():
            handle.seek(8 + length + header[name]["data_offsets"][0])
            data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
            while data:
                data = data[handle.write(data) :]


def buckets(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Consecutive tensors of at most `limit` bytes together; a bigger one is alone."""
    parts: list[dict[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if not parts or size + tensor.nbytes > limit:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    return parts


def in_dtype(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors, floating-point ones in `dtype`."""
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def to_send(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU, floating-point ones in `dtype`."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        target = dtype if tensor.is_floating_point() else tensor.dtype
        copy = tensor.detach().to(device="cpu", dtype=target).contiguous()
        # safetensors refuses tensors that share a storage, as views of one flat buffer do.
        plain[name] = copy.clone() if copy.untyped_storage().nbytes() != copy.nbytes else copy
    return plain


def wait_for(file: str | Path, deadline: float) -> None:
    """Waits for `file`, which another process is about to write.

    Raises:
        CreditgraphError: its writer failed, or it does not exist by `deadline` (time.monotonic()).
    """
    path = Path(file)
    while not path.exists():
        if (path.parent / FAILED).exists():
            raise CreditgraphError(
                f"{path}: could not be written; see the error of the process that publishes weights."
            )
        if time.monotonic() >= deadline:
            raise CreditgraphError(f"{path}: expected it from the process that publishes weights, which is late.")
        time.sleep(_POLL_SECONDS)


def sample_names(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The fixed sample that a checksum covers: evenly spread over the sorted names, with the first and the last."""
    names = sorted(tensors)
    if len(names) <= _SAMPLED_TENSORS:
        return tuple(names)
    return tuple(names[i * (len(names) - 1) // (_SAMPLED_TENSORS - 1)] for i in range(_SAMPLED_TENSORS))


def sample_checksum(tensors: Mapping[str, Tensor], names: Sequence[str]) -> str:
    """Hash of the named tensors: name, dtype, shape, first and last MiB. Raises CreditgraphError if one is missing."""
    digest = hashlib.sha256()
    for name in names:
        if name not in tensors:
            raise CreditgraphError(f"weights: expected every tensor of the checksum, got none named '{name}'.")
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        raw = tensor.reshape(-1).view(torch.uint8)
        digest.update(raw[:_SAMPLED_BYTES].cpu().numpy().data)
        digest.update(raw[-_SAMPLED_BYTES:].cpu().numpy().data)
    return digest.hexdigest()[:32]
