"""torch's flash attention over packed rows, with the signatures of torch 2.10 and later, and when it can be had."""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from creditgraph.pipeline.core.errors import ConfigError

HALF = (torch.bfloat16, torch.float16)
WIDEST_HEAD = 256


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention of each row's queries to its keys, aligned at their ends.

    Args:
        q: [queries, H, D].
        k, v: [keys, H_kv, D].
        offsets: int32 [rows + 1], cumulative lengths of queries and of keys.
        longest: longest row of queries and of keys.
        scaling: factor on the scores; None means 1 / √D.
        window: keys that a query attends to, itself included; None means all before it.

    Returns:
        [queries, H, D].
    """
    from torch.nn.attention.varlen import varlen_attn

    known = parameters()
    more: dict[str, Any] = {}
    # torch 2.10 and 2.11 take grouped keys and values without being told.
    if "enable_gqa" in known:
        more["enable_gqa"] = q.shape[1] != k.shape[1]
    if "window_size" in known:
        more["window_size"] = (-1 if window is None else window - 1, 0)
        more["scale"] = scaling
    else:
        # torch 2.10 has the scale 1 / √D and no windows, which `obstacle` reports.
        more["is_causal"] = True
        if scaling is not None:
            q = q * (scaling * q.shape[2] ** 0.5)
    out = varlen_attn(q, k, v, *offsets, *longest, **more)
    assert isinstance(out, Tensor)
    return out


@cache
def parameters() -> frozenset[str]:
    """Names of the arguments of torch's function, which differ between its versions."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


@cache
def obstacle(device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None) -> str:
    """Why attention on a CUDA device cannot be torch's flash attention; "" when it can."""
    if dtype not in HALF:
        return f"the model's dtype is {str(dtype).removeprefix('torch.')} (expected bfloat16)"
    if head_dim > WIDEST_HEAD or head_dim % 8:
        return f"its heads have {head_dim} numbers (expected a multiple of 8 up to {WIDEST_HEAD})"
    if window is not None and "window_size" not in parameters():
        return f"torch {torch.__version__} has no sliding windows there (expected 2.11 or newer)"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]} (expected 8.0 or newer)"
    return ""


def check_fast(reason: str, slow_attention: bool) -> None:
    """Raises ConfigError for a `reason` why attention on a GPU would be slow, unless `slow_attention` accepts that."""
    if reason and not slow_attention:
        raise ConfigError(
            f"learner: no flash attention over packed rows on this GPU: {reason}. Change that, or set "
            "learner.compute.slow_attention=true to train with a slower one."
        )
