"""Moves tensors that a learner needs only while it learns to the CPU and back, without a change of one bit."""

from collections.abc import Iterable

import torch
from torch import Tensor


class HostMemory:
    """The memory of device tensors on the host.

    Whole storages are moved, so tensors that are views of one buffer stay that; a moved tensor must not be used until
    it is back. Host memory is page-locked for GPUs, because copies are then several times as fast, and kept from one
    time to the next, because locking pages is slow.
    """

    def __init__(self) -> None:
        self._moved: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._spare: dict[int, list[Tensor]] = {}

    @property
    def holds(self) -> bool:
        """Whether tensors are here."""
        return bool(self._moved)

    def offload(self, tensors: Iterable[Tensor], stay: Iterable[Tensor] = ()) -> None:
        """Moves tensors here, but none that shares memory with one of `stay`; does nothing if it holds some already."""
        if self.holds:
            return
        seen = {_address(tensor) for tensor in stay}
        on_gpu = False
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            if _address(tensor) in seen or not storage.nbytes():
                continue
            seen.add(_address(tensor))
            gpu = storage.device.type == "cuda"
            on_gpu |= gpu
            size = storage.nbytes()
            spare = self._spare.get(size)
            host = spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=gpu)
            host.copy_(_bytes(storage))
            storage.resize_(0)
            self._moved.append((storage, host))
        if on_gpu:
            torch.cuda.empty_cache()  # other processes see only what the allocator has returned

    def onload(self) -> None:
        """Moves all tensors back."""
        for storage, host in self._moved:
            storage.resize_(len(host))
            _bytes(storage).copy_(host)
            self._spare.setdefault(len(host), []).append(host)
        self._moved.clear()


def _local(tensor: Tensor) -> Tensor:
    """A DTensor's shard on this rank; any other tensor itself."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def _address(tensor: Tensor) -> int:
    return int(_local(tensor).untyped_storage()._cdata)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
