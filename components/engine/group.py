"""A process group of this process and servers, to broadcast weights: gloo between CPUs, NCCL between GPUs."""

import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import Tensor

from creditgraph.pipeline.core.ranks import use_device

_LOCK = threading.Lock()
_NUMBERS = count()


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the members of a group meet.

    Attributes:
        name: name of the group, which no other group of a member has.
        address, port: where rank 0 listens for the others.
        backend: "gloo" or "nccl"; NCCL needs a GPU of its own for each member.
        world: number of members.
        seconds: limit for meeting, and for each broadcast.
    """

    name: str
    address: str
    port: int
    backend: str
    world: int
    seconds: float


def new_group_name() -> str:
    """A name that no other group of this process or of a server has."""
    return f"creditgraph-{os.getpid()}-{next(_NUMBERS)}"


class UpdateGroup:
    """One member of a group; rank 0 sends. The constructor blocks until all have met.

    The group is built as SGLang builds its side (`sglang.srt.utils.common.init_custom_process_group`), independent of
    other groups of this process.

    Args:
        meeting: where the members meet.
        rank: number of this member.
        device: device of the tensors.
    """

    def __init__(self, meeting: Meeting, rank: int, device: str | torch.device) -> None:
        from torch.distributed.distributed_c10d import (
            Backend,
            GroupName,
            PrefixStore,
            _new_process_group_helper,
            _world,
        )
        from torch.distributed.rendezvous import rendezvous

        self.name = meeting.name
        self.device = torch.device(device)
        limit = timedelta(seconds=meeting.seconds)
        place = f"tcp://{meeting.address}:{meeting.port}"
        store, rank, size = next(rendezvous(place, rank, meeting.world, timeout=limit))
        store.set_timeout(limit)
        use_device(str(self.device))  # NCCL takes the thread's current device
        with _LOCK:
            prefixed = PrefixStore(meeting.name, store)
            group, _ = _new_process_group_helper(
                size,
                rank,
                [],
                Backend(meeting.backend),
                prefixed,
                group_name=GroupName(meeting.name),
                timeout=limit,
            )
            _world.pg_group_ranks[group] = {i: i for i in range(size)}
        self._group: Any = group

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Sends rank 0's tensor to all others, which give one to be filled; returns it when it is there."""
        use_device(str(self.device))
        tensor = tensor.to(self.device)
        torch.distributed.broadcast(tensor, src=0, group=self._group)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return tensor

    def close(self) -> None:
        """Leaves the group."""
        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)
            self._group = None
