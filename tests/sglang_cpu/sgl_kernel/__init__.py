"""Stands in for sgl_kernel (CUDA kernels) where SGLang runs on a CPU in tests.

Any name can be imported; calling one raises. The one kernel that CPU inference of dense models needs, the hash behind
per-request sampling seeds, is written in torch below. `sgl_kernel.scalar_type` must stay absent: SGLang falls back to
its own when the import fails.
"""

import importlib.machinery
import sys
import types

import torch

__version__ = "0.3.21"


def _missing(name):
    def kernel(*_, **__):
        raise NotImplementedError(f"{name}: tests/sglang_cpu stands in for sgl_kernel on a CPU and has no such kernel.")

    kernel.__name__ = name.rpartition(".")[2]
    return kernel


class _Submodule(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{self.__name__}.{name}")


# The submodules SGLang imports by name.
for _name in ("allreduce", "elementwise", "flash_attn", "kvcacheio", "mamba", "quantization", "speculative", "utils"):
    _module = _Submodule(f"sgl_kernel.{_name}")
    _module.__spec__ = importlib.machinery.ModuleSpec(_module.__name__, None, is_package=True)
    sys.modules[_module.__name__] = globals()[_name] = _module


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(f"sgl_kernel.{name}")


# --- MurmurHash3 (x86, 32 bit) of the 16 bytes (seed: 8, position: 4, column: 4), for all columns at once
_MASK = 0xFFFFFFFF


def _rotate(x, bits):
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def _mix(state, word):
    word = _rotate((word * 0xCC9E2D51) & _MASK, 15)
    return (_rotate(state ^ ((word * 0x1B873593) & _MASK), 13) * 5 + 0xE6546B64) & _MASK


def _murmur_hash32(seed, positions, cols):
    """seed uint64 [N], positions [N], cols [V] → uint32 [N, V]."""
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    state = torch.zeros_like(seed)
    for word in (seed, seed >> 32, positions.to(torch.int64)):
        state = _mix(state, word & _MASK)
    state = _mix(state[:, None], (cols.to(torch.int64) & _MASK)[None, :]) ^ 16
    state ^= state >> 16
    state = (state * 0x85EBCA6B) & _MASK
    state ^= state >> 13
    state = (state * 0xC2B2AE35) & _MASK
    state ^= state >> 16
    return state.to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor cols) -> Tensor")
_library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")
