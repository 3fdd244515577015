"""torch's flash attention over packed rows, with the signatures of torch 2.10 and later, and when it can be had."""

import inspect
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from creditgraph.pipeline.core.errors import ConfigError

HALF = (torch.bfloat16, torch.float16)
WIDEST_HEAD = 256
_LAYER = threading.local()  # the backward pass computes layers again in threads of its own


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
    with getattr(_LAYER, "kept", None) or nullcontext():
        out = varlen_attn(q, k, v, *offsets, *longest, **more)
    assert isinstance(out, Tensor)
    return out


def keeping() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts in which a layer is computed, and computed again, for `torch.utils.checkpoint`'s `context_fn`.

    Results of flash attention are kept and given a second time: beside long rows they are small and take long.
    """
    results: deque[Any] = deque()
    return _layer(_Kept(results, again=False)), _layer(_Kept(results, again=True))


class _Kept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around one call of attention, so that no other operation goes through Python."""

    def __init__(self, results: deque[Any], again: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results
        self.again = again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.torch_attn._varlen_attn.default:
            return func(*args, **(kwargs or {}))
        if self.again and self.results:
            return self.results.popleft()
        result = func(*args, **(kwargs or {}))
        if not self.again:
            # Autograd gives the tensors themselves a graph, which would hold what holds these.
            self.results.append(tuple(x.detach() for x in result))
        return result


@contextmanager
def _layer(kept: _Kept) -> Iterator[None]:
    outer, _LAYER.kept = getattr(_LAYER, "kept", None), kept
    try:
        yield
    finally:
        _LAYER.kept = outer


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
