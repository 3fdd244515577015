"""The processes of a run: their places and devices, and turns on memory that learner and servers share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The place of this process among all processes of a run.

    Ranks are divided into contiguous replicas: rank r belongs to replica r // (world // num_replicas).

    Attributes:
        rank: number of this process, from 0.
        world: number of processes.
        local_rank: number of this process on its host; it owns the GPU of that number.
        replica: number of its data-parallel replica.
        num_replicas: number of data-parallel replicas.

    >>> ranks = Ranks(rank=5, world=8, num_replicas=2)
    >>> ranks.replica, ranks.position, ranks.leader, ranks.per_replica
    (1, 1, False, 4)
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    num_replicas: int = 1

    @property
    def per_replica(self) -> int:
        """Number of ranks in a replica."""
        return self.world // self.num_replicas

    @property
    def replica(self) -> int:
        """The replica of this rank."""
        return self.rank // self.per_replica

    @property
    def position(self) -> int:
        """The place of this rank inside its replica; 0 is the leader."""
        return self.rank % self.per_replica

    @property
    def leader(self) -> bool:
        """Whether `replica` nodes run on this rank."""
        return self.position == 0

    def share(self, count: int) -> slice:
        """This replica's contiguous part of `count` items; the first replicas get one more if they do not divide.

        >>> [Ranks(rank=r, world=3, num_replicas=3).share(8) for r in range(3)]
        [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None)]
        """
        # Contiguous shares keep the groups of a prompt together.
        size, more = divmod(count, self.num_replicas)
        start = self.replica * size + min(self.replica, more)
        return slice(start, start + size + (self.replica < more))


def use_device(device: str) -> None:
    """Makes a GPU the current one of this thread; nothing for the CPU, or "cuda" without a number.

    Libraries allocate and communicate on the current device, and it belongs to the thread: a new thread begins with
    the first GPU, which may be another rank's.
    """
    if device.startswith("cuda:"):
        torch.cuda.set_device(torch.device(device))


def same_device() -> Callable[[], None]:
    """An initialiser of threads that gives them the current GPU of the thread that calls this."""
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return partial(use_device, f"cuda:{torch.cuda.current_device()}" if begun else "cpu")


def _alone() -> None:
    """The meeting of a run of one process."""


class DeviceSlots:
    """Whose turn it is on the devices of this process; all its nodes share the object.

    The learner's turn begins before it loads its model, and before each of its iterations: all engines give their
    memory back, then all ranks meet, because the servers of a leader run on the GPUs of its replica's other ranks too.
    It ends with the next iteration, after a checkpoint was written: the learner moves what only learning needs to the
    CPU, and all ranks meet again. Engines take their memory when they load the next weights.

    Args:
        shared: whether any engine shares the learner's devices; if not, nothing happens.
        meet: waits for all ranks.

    Attributes:
        learning: whether it is the learner's turn; servers must not start then.
    """

    def __init__(self, shared: bool = False, meet: Callable[[], None] = _alone) -> None:
        self.shared = shared
        self.learning = False
        self._meet = meet
        self._engines: list[Callable[[], None]] = []
        self._learners: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def add_engine(self, give_back: Callable[[], None]) -> None:
        """Has `give_back` called when the learner's turn begins; it does nothing for an engine that holds nothing."""
        self._engines.append(give_back)

    def add_learner(self, offload: Callable[[], None], onload: Callable[[], None]) -> None:
        """Has `offload` called when the learner's turn ends, and `onload` when it begins."""
        self._learners.append((offload, onload))

    def begin(self) -> None:
        """Begins the learner's turn; all ranks call it."""
        if self.shared and not self.learning:
            for give_back in self._engines:
                give_back()
            self._meet()
            self.learning = True
            self.recall()

    def end(self) -> None:
        """Ends the learner's turn; all ranks call it."""
        if self.shared and self.learning:
            for offload, _ in self._learners:
                offload()
            self._meet()
            self.learning = False

    def recall(self) -> None:
        """Has learners take back what they have moved, for a checkpoint outside of their turn."""
        for _, onload in self._learners:
            onload()
