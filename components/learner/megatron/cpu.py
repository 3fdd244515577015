"""megatron-core without CUDA: redirects its calls for a CUDA device to the CPU.

megatron-core 0.16 names CUDA in some thirty places that a CPU run reaches: `device="cuda"`,
`torch.cuda.current_device()`, `tensor.type() == "torch.cuda.FloatTensor"`, states of the CUDA generator. While
`megatron_on_cpu` is active these calls get the CPU, but only if they come from a module of megatron; CUDA calls of all
other code still fail. With a CUDA device it does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _Stream:
    """The stream on which token counts of experts would be copied from a device."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing is pending."""

    def record_event(self) -> _Stream:
        """An event that has happened."""
        return self

    def synchronize(self) -> None:
        """Nothing is pending."""


_STREAM = _Stream()


def _as_counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Must be active during construction of a model, a training step, an optimiser or checkpoint call and an export."""
    if torch.cuda.is_available():
        yield
        return
    cuda = torch.cuda
    with ExitStack() as stack:
        # The device of new buffers, of received pipeline tensors and of parameters moved to "the" device.
        stack.enter_context(_replaced(cuda, "current_device", _for_megatron(cuda.current_device, lambda: CPU)))
        # After pipeline communication and before a checkpoint; the CPU has nothing pending.
        stack.enter_context(_replaced(cuda, "synchronize", _for_megatron(cuda.synchronize, lambda *_: None)))
        # Experts' token counts, which travel on a stream of their own and arrive as numpy arrays.
        stack.enter_context(_replaced(token_dispatcher, "maybe_move_tensor_to_cpu", _as_counts))
        stack.enter_context(_replaced(token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", _STREAM))
        current = _for_megatron(cuda.current_stream, lambda: _STREAM)
        stack.enter_context(_replaced(cuda, "current_stream", current))
        stack.enter_context(_replaced(cuda, "stream", _for_megatron(cuda.stream, nullcontext)))
        # The tracker of random states takes each region's state from the device generator: here the CPU's, so that
        # recomputed activations draw the same numbers as the first time.
        stack.enter_context(_replaced(cuda, "manual_seed", _for_megatron(cuda.manual_seed, torch.manual_seed)))
        get_state = _for_megatron(cuda.get_rng_state, lambda *_: torch.get_rng_state())
        stack.enter_context(_replaced(cuda, "get_rng_state", get_state))
        stack.enter_context(_replaced(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()))
        stack.enter_context(
            _replaced(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
        )
        stack.enter_context(_Redirect())
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


class _Redirect(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # `.cuda()` leaves the tensor where it is.
        if func is Tensor.cuda and _from_megatron(2):
            return args[0]
        # Optimiser and gradient buffers sort parameters by "torch.cuda.FloatTensor" and the like.
        if func is Tensor.type and len(args) == 1 and not kwargs and _from_megatron(2):
            return func(*args).replace("torch.", "torch.cuda.", 1)
        # Factories with device="cuda"; pinned memory needs a device to be pinned for.
        if (_is_cuda(kwargs.get("device")) or kwargs.get("pin_memory")) and _from_megatron(2):
            kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _from_megatron(depth: int) -> bool:
    name = sys._getframe(depth).f_globals.get("__name__", "")
    return isinstance(name, str) and name.split(".", 1)[0] == "megatron"


def _for_megatron(own: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return (instead if _from_megatron(2) else own)(*args, **kwargs)

    return call
