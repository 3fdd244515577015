"""Checks by hash that an SGLang server holds the weights of some files, with `/weights_checker` (SGLang 0.5.23)."""

import hashlib
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# SGLang keeps these projections as one matrix, in this order.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# The vocabulary is padded with rows of zeros.
_PADDED = ("embed_tokens.weight", "lm_head.weight")
_PADDED_ROWS = 64
_PART = re.compile(r"^(.*\.)(q_proj|k_proj|v_proj|gate_proj|up_proj)(\..*)$")
_WORD = (1 << 32) - 1
_TILE_WORDS = 8192
_TILES = 256  # hashed at once


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


def expected_hashes(tensors: Mapping[str, Tensor], dtype: torch.dtype, cuda: bool) -> dict[str, str]:
    """SGLang weight name → hash of each weight that a server of one rank makes of these tensors.

    Args:
        tensors: the tensors of an update's files.
        dtype: dtype of the server's weights.
        cuda: whether the server hashes on a GPU, with a different hash function.
    """
    hashes: dict[str, str] = {}
    for name in tensors:
        whole, parts = parts_of(name)
        if whole in hashes or any(part not in tensors for part in parts):
            continue
        tensor = torch.cat([tensors[part].to(dtype) for part in parts])  # and hashed on their device
        if whole.endswith(_PADDED):
            tensor = torch.cat([tensor, tensor.new_zeros(-len(tensor) % _PADDED_ROWS, *tensor.shape[1:])])
        hashes[whole] = f"{(hash_on_gpu if cuda else hash_on_cpu)(tensor):016x}"
    return hashes


def first_difference(expected: Mapping[str, str], ranks: Sequence[Mapping[str, str]]) -> str | None:
    """A weight that a server holds with another hash, for messages; "" if there is none, None if none compares.

    Args:
        expected: see `expected_hashes`.
        ranks: SGLang weight name → hash, per tensor-parallel rank. Of several ranks only weights that each holds whole
            are compared.
    """
    names = [name for name in expected if name in ranks[0] and (len(ranks) == 1 or "norm" in name)]
    for name in names:
        other = next((rank.get(name) for rank in ranks if rank.get(name) != expected[name]), expected[name])
        if other != expected[name]:
            return f"{other} for '{name}' (expected {expected[name]})"
    return "" if names else None


def hash_on_cpu(tensor: Tensor) -> int:
    """`sglang.srt.managers.mm_utils.tensor_hash` of a CPU tensor."""
    return int.from_bytes(hashlib.sha256(_bytes(tensor)).digest()[:8], "big")


def hash_on_gpu(tensor: Tensor) -> int:
    """`sglang.kernels.ops.memory.gpu_tensor_hash` of the same bytes, computed on the tensor's device."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = torch.cat([raw, raw.new_zeros(-len(raw) % 4)]).view(torch.int32)
    if not len(words):
        return 0
    total = 0
    step = _TILE_WORDS * _TILES
    for start in range(0, len(words), step):
        block = words[start : start + step].long() & _WORD
        total += sum(_hash_of_tiles(block, start, len(words)))
    total %= 1 << 64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        total = ((total ^ (total >> shift)) * factor) & ((1 << 64) - 1)
    return total ^ (total >> 31)


def _hash_of_tiles(words: Tensor, start: int, count: int) -> list[int]:
    """The hash of each tile of `words`, int64 [W] below 2³²; the first is number `start` of `count`."""
    index = torch.arange(start, start + len(words), device=words.device) & _WORD
    seed = 0x243F6A88
    seeds = (seed, ((seed * 0x9E3779B1) ^ 0xDEADBEEF) & _WORD)
    halves = []
    for begin, factor, turn in ((seeds[0], 0x27D4EB2D, 15), (seeds[1], 0x165667B1, 13)):
        turned = ((index << turn) | (index >> (32 - turn))) & _WORD
        mixed = _mix(words ^ ((index * factor + begin) & _WORD) ^ turned)
        padded = torch.cat([mixed, mixed.new_zeros(-len(mixed) % _TILE_WORDS)])
        sums = padded.view(-1, _TILE_WORDS).sum(1) & _WORD
        halves.append(_mix(sums ^ ((count * 4) & _WORD)).tolist())
    return [(high << 32) | low for high, low in zip(*halves, strict=True)]


def _mix(x: Tensor) -> Tensor:
    # Products wrap in int64, which leaves their lower 32 bits.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & _WORD
    return x ^ (x >> 16)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
