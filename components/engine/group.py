"""A process group of this process and one SGLang server, to broadcast weights: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import Tensor

_LOCK = threading.Lock()
_NUMBERS = count()


def new_group_name() -> str:
    """A name that no other group of this process or of a server has; both sides join the group by it."""
    return f"creditgraph-{os.getpid()}-{next(_NUMBERS)}"


class UpdateGroup:
    """Rank 0 of a group whose other ranks are a server's. The constructor blocks until the server has joined.

    There is one group per server, so that a dead server blocks no other one. The group is built as SGLang builds its
    side (`sglang.srt.utils.common.init_custom_process_group`), independent of other groups of this process.

    Args:
        name: name of the group, see `new_group_name`.
        address, port: address on which this process listens for the others.
        backend: "gloo" or "nccl"; NCCL needs GPUs that differ between this process and the server.
        ranks: number of the server's ranks.
        timeout: seconds for meeting, and for each broadcast.
    """

    def __init__(self, name: str, address: str, port: int, backend: str, ranks: int, timeout: float) -> None:
        from torch.distributed.distributed_c10d import (
            Backend,
            GroupName,
            PrefixStore,
            _new_process_group_helper,
            _world,
        )
        from torch.distributed.rendezvous import rendezvous

        self.name = name
        self.device = "cuda" if backend == "nccl" else "cpu"
        limit = timedelta(seconds=timeout)
        store, rank, size = next(rendezvous(f"tcp://{address}:{port}", 0, 1 + ranks, timeout=limit))
        store.set_timeout(limit)
        with _LOCK:
            prefixed = PrefixStore(name, store)
            group, _ = _new_process_group_helper(
                size, rank, [], Backend(backend), prefixed, group_name=GroupName(name), timeout=limit
            )
            _world.pg_group_ranks[group] = {i: i for i in range(size)}
        self._group: Any = group

    def broadcast(self, tensor: Tensor) -> None:
        """Sends a tensor to all ranks; returns when it is sent."""
        tensor = tensor.to(self.device)
        torch.distributed.broadcast(tensor, src=0, group=self._group)
        if self.device == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Leaves the group."""
        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)
            self._group = None
