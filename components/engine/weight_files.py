"""Weights as safetensors files for engines: writing them, and the checksum that verifies their transfer.

Both ends of the transfer use this module: the channel that publishes and the workers that load.
"""

import errno
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from creditgraph.pipeline.core.errors import CreditgraphError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FAILED = "failed"  # a file of this name in a folder means that no more files will be written
_BLOCK = 1 << 16  # words of a checksum that are summed at once; 512 KiB of int64, which a core's cache holds
_BLOCKS_ON_GPU = 256  # summed by one launch, with 128 MiB of int64
_SPREAD = 0x9E3779B97F4A7C15  # 2⁶⁴ divided by the golden ratio
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


@dataclass
class Checksum:
    """The checksum of a set of tensors, added one by one in any order: every bit of every tensor counts.

    A tensor's part is Σ wᵢ·xᵢ mod 2⁶⁴ over its 32-bit words xᵢ, with 64-bit wᵢ that `_factors` draws: a change of one
    word, however small, always changes it, and of other changes about one in 2³² passes (our reading of multilinear
    hashing, Carter and Wegman 1979). It finds damage; people are kept out
    by keys and file modes. The sum is of integers, so it is the same on every device and in any order, and is computed
    where the tensor is. The whole is a SHA-256 of all names, dtypes, shapes and parts.
    """

    parts: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor, or replaces the one of this name."""
        self.parts[name] = f"{name} {tensor.dtype} {tuple(tensor.shape)} {_sum_of_words(tensor):016x}"

    def result(self) -> str:
        """32 hexadecimal digits."""
        lines = "\n".join(self.parts[name] for name in sorted(self.parts))
        return hashlib.sha256(lines.encode()).hexdigest()[:32]


def checksum_of(tensors: Mapping[str, Tensor]) -> str:
    """`Checksum` of named tensors."""
    checksum = Checksum()
    for name, tensor in tensors.items():
        checksum.add(name, tensor)
    return checksum.result()


def _sum_of_words(tensor: Tensor) -> int:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if tail := len(raw) % 4:
        raw = torch.cat([raw, raw.new_zeros(4 - tail)])
    # A copy where a tensor of bytes does not begin at a multiple of four, as views of a larger one.
    aligned = raw if raw.data_ptr() % 4 == 0 and raw.storage_offset() % 4 == 0 else raw.clone()
    words = aligned.view(torch.int32)
    factors = _factors(words.device)
    whole = len(words) // _BLOCK * _BLOCK
    sums: list[int] = []
    # int32 · int64 is computed in int64, which wraps.
    for blocks in torch.split(words[:whole].view(-1, _BLOCK), 1 if words.device.type == "cpu" else _BLOCKS_ON_GPU):
        sums += (blocks * factors).sum(1).tolist()
    sums.append(int((words[whole:] * factors[: len(words) - whole]).sum()))
    # Each block has a factor of its own, so that blocks cannot be exchanged; odd, so that no change is lost.
    return sum(part * (2 * n * _SPREAD + 1) for n, part in enumerate(sums)) % (1 << 64)


@cache
def _factors(device: torch.device) -> Tensor:
    """int64 [_BLOCK]: the first numbers of SplitMix64, of which the lowest bit is set.

    Steele, Lea and Flood: Fast splittable pseudorandom number generators, OOPSLA 2014 (constants from the reference
    implementation).
    """
    numbers = []
    for n in range(1, _BLOCK + 1):
        z = n * _SPREAD % (1 << 64)
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % (1 << 64)
        z = (z ^ (z >> 31)) | 1
        numbers.append(z - (1 << 64) if z >> 63 else z)
    return torch.tensor(numbers, device=device)
