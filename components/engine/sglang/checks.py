"""Checks by hash that an SGLang server holds the weights of some files, with `/weights_checker` (SGLang 0.5.23)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.engine.channel import Update
from components.engine.weight_files import sample_checksum

# SGLang keeps these projections as one matrix, in this order.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# The vocabulary is padded with rows of zeros.
_PADDED = ("embed_tokens.weight", "lm_head.weight")
_PADDED_ROWS = 64
_PART = re.compile(r"^(.*\.)(q_proj|k_proj|v_proj|gate_proj|up_proj)(\..*)$")
_WORD = (1 << 32) - 1
_TILE_WORDS = 8192


def parts_of(name: str) -> tuple[str, tuple[str, ...]]:
    """SGLang's name of the weight that holds tensor `name`, and the names of the tensors it is stacked from.

    >>> parts_of("model.layers.0.self_attn.k_proj.bias")[0]
    'model.layers.0.self_attn.qkv_proj.bias'
    >>> parts_of("model.norm.weight")
    ('model.norm.weight', ('model.norm.weight',))
    """
    match = _PART.match(name)
    if match is None:
        return name, (name,)
    fused = next(whole for whole, parts in _FUSED.items() if match[2] in parts)
    return match[1] + fused + match[3], tuple(match[1] + part + match[3] for part in _FUSED[fused])


def names_to_skip(names: Sequence[str], sample: Sequence[str]) -> list[str]:
    """SGLang's names of weights that hold no sampled tensor, so that the server need not hash them."""
    hashed = {parts_of(name)[0] for name in sample}
    others = {parts_of(name)[0] for name in names} - hashed
    # The server skips by substring, so a part of a name that is to be hashed must not be listed.
    return sorted(other for other in others if not any(other in name for name in hashed))


def held_checksum(
    update: Update, tensors: Mapping[str, Tensor], ranks: Sequence[Mapping[str, str]], dtype: torch.dtype, cuda: bool
) -> str | None:
    """Returns `update.checksum` if the server's hashes match the files, else the difference; None if none compares.

    Args:
        update: the update whose sample is compared.
        tensors: the tensors of its files.
        ranks: SGLang weight name → hash, per tensor-parallel rank. Of several ranks only weights that each holds whole
            are compared.
        dtype: dtype of the server's weights.
        cuda: whether the server hashes on a GPU, with a different hash function.
    """
    in_files = sample_checksum(tensors, update.sample)
    if in_files != update.checksum:
        return f"{in_files} (in the files themselves)"
    compared = 0
    for name in update.sample:
        whole, parts = parts_of(name)
        if (
            whole not in ranks[0]
            or any(part not in tensors for part in parts)
            or (len(ranks) > 1 and "norm" not in name)
        ):
            continue
        tensor = torch.cat([tensors[part].to(dtype) for part in parts])
        if whole.endswith(_PADDED):
            tensor = torch.cat([tensor, tensor.new_zeros(-len(tensor) % _PADDED_ROWS, *tensor.shape[1:])])
        expected = f"{(hash_on_gpu if cuda else hash_on_cpu)(tensor):016x}"
        other = next((rank[whole] for rank in ranks if rank.get(whole) != expected), None)
        if other is not None:
            return f"{other} for '{whole}' (expected {expected})"
        compared += 1
    return update.checksum if compared else None


def hash_on_cpu(tensor: Tensor) -> int:
    """`sglang.srt.managers.mm_utils.tensor_hash` of a CPU tensor."""
    return int.from_bytes(hashlib.sha256(_bytes(tensor)).digest()[:8], "big")


def hash_on_gpu(tensor: Tensor) -> int:
    """`sglang.kernels.ops.memory.gpu_tensor_hash` of the same bytes, computed here."""
    raw = _bytes(tensor)
    words = np.frombuffer(bytes(raw) + b"\0" * (-len(raw) % 4), dtype=np.uint32)
    if not len(words):
        return 0
    seed = 0x243F6A88
    seeds = (seed, ((seed * 0x9E3779B1) ^ 0xDEADBEEF) & _WORD)
    index = np.arange(len(words), dtype=np.uint32)
    tiles = np.arange(0, len(words), _TILE_WORDS)
    halves = []
    for start, factor, turn in ((seeds[0], 0x27D4EB2D, 15), (seeds[1], 0x165667B1, 13)):
        place = (index * np.uint32(factor) + np.uint32(start)) ^ (
            (index << np.uint32(turn)) | (index >> np.uint32(32 - turn))
        )
        sums = np.add.reduceat(_mix(words ^ place), tiles, dtype=np.uint32)
        halves.append(_mix(sums ^ np.uint32((len(words) * 4) & _WORD)).astype(np.uint64))
    total = int(((halves[0] << np.uint64(32)) | halves[1]).sum(dtype=np.uint64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        total = ((total ^ (total >> shift)) * factor) & ((1 << 64) - 1)
    return total ^ (total >> 31)


def _mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
