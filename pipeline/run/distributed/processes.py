"""The processes of a run, joined by torch.distributed: gloo for control and CPU tensors, NCCL for tensors on GPUs."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.ranks import Ranks, use_device
from creditgraph.pipeline.run.distributed.network import (
    CONNECT_TIMEOUT,
    choose_interface,
    connect_gpus,
    not_connected,
    within,
)
from creditgraph.pipeline.run.distributed.team import Collectives, DistributedError, Rendezvous, Team
from creditgraph.pipeline.run.distributed.watchdog import EXIT_CODE, PULSE, WAITS, PeerLost, Watchdog, leave, stopped
from creditgraph.pipeline.run.distributed.wire_format import pack, pieces, unpack
from creditgraph.pipeline.run.timeline.heartbeat import where

START_TIMEOUT = 300.0  # seconds in which all ranks must have started
# A rank waits for another one as long as that lives, which the watchdog sees; a collective of NCCL begins on all ranks
# after one of gloo, so it has a limit.
FOREVER = timedelta(days=20)
GPU_LIMIT = timedelta(minutes=30)


class Processes(Team):
    """The ranks of a run, as one of them sees them.

    Use it as a context manager around all collective work: an error inside ends all ranks.

    Args:
        meeting: where the ranks meet.
        ranks: planned ranks.
        device: "cpu" or "cuda…"; with CUDA, sums of GPU tensors go over NCCL.
    """

    def __init__(self, meeting: Rendezvous, ranks: Ranks, device: str) -> None:
        super().__init__(ranks)
        use_device(device)
        self._hosts_store = meeting.hosts_store
        try:
            store: Any = TCPStore(
                meeting.address,
                meeting.port,
                None,
                meeting.hosts_store,
                timedelta(seconds=START_TIMEOUT),
                wait_for_workers=False,
            )
            prefix = f"creditgraph/{meeting.attempt}"
            _all_here(PrefixStore(f"{prefix}/here", store), ranks)
        except (dist.DistError, RuntimeError, TimeoutError) as error:
            raise DistributedError(
                f"rank {ranks.rank}: the {ranks.world} processes did not meet at {meeting.address}:{meeting.port} "
                "within "
                f"{START_TIMEOUT:g} s ({str(error).splitlines()[0]}); see that all were started, that this host can be "
                "reached from the "
                "others, and that the port is free (MASTER_PORT)."
            ) from error
        choose_interface(meeting.address)
        options: dict[str, Any] = {"rank": ranks.rank, "world_size": ranks.world, "timeout": GPU_LIMIT}
        options["store"] = PrefixStore(f"{prefix}/groups", store)
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        try:
            within(CONNECT_TIMEOUT, lambda: dist.init_process_group(backend, **options))
        except (dist.DistError, RuntimeError, TimeoutError) as error:
            raise not_connected("gloo", ranks, error) from error
        self._watchdog = Watchdog(PrefixStore(f"{prefix}/watch", store.clone()), ranks, self._places)
        self._everyone = dist.new_group(backend="gloo", timeout=FOREVER)
        if device.startswith("cuda"):
            _check_own_gpus(ranks, device, self._everyone)
        self._collectives = {name: _Collectives(ranks) for name in ("generation", "learning")}
        if device.startswith("cuda"):
            connect_gpus(ranks, device)

    def collectives(self, lane: str) -> Collectives:
        """Communication for one lane."""
        return self._collectives[lane]

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        held = torch.tensor([number])
        with _collective("agreeing"):
            dist.all_reduce(held, dist.ReduceOp.MAX, group=self._everyone)
        return int(held)

    def from_first(self, value: Any) -> Any:
        """Rank 0's value."""
        return unpack(_broadcast(pack(value) if self.ranks.rank == 0 else None, 0, self._everyone))

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.most(0)

    def report(self, error: BaseException) -> None:
        """Reports to the other ranks that this one has failed."""
        if not _is_loss(error):
            self._watchdog.report(_text(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self.barrier()
            except PeerLost as lost:
                self._end(lost)
            self._watchdog.close()
            dist.destroy_process_group()
            return
        self._end(error)

    def _end(self, error: BaseException) -> NoReturn:
        """Prints the run's first error and ends the process."""
        rank = self.ranks.rank
        if _is_loss(error):
            first = self._watchdog.blame() or self._watchdog.report(
                f"{_text(error)}; all ranks are alive, so the network between two of them broke{self._places()}"
            )
        else:
            first = self._watchdog.report(_text(error))
            if first.startswith(f"rank {rank} ") and not isinstance(error, CreditgraphError):
                traceback.print_exception(error)
        if self._hosts_store:
            time.sleep(3 * PULSE)  # the store ends with this process, and the others must read the error before
        leave(stopped(rank, first), 2 if isinstance(error, CreditgraphError) and not _is_loss(error) else EXIT_CODE)

    def _places(self) -> str:
        place = where(self.folder) if self.folder else ""
        return f" ({place})" if place else ""


class _Collectives(Collectives):
    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        size = ranks.per_replica

        def group(members: list[int]) -> Any:
            return dist.new_group(members, timeout=FOREVER, use_local_synchronization=True)

        self._peers = group([r * size + ranks.position for r in range(ranks.num_replicas)])
        self._leader = ranks.replica * size
        self._inside = group([self._leader + i for i in range(size)]) if size > 1 else None

    def all_sum(self, x: Tensor) -> Tensor:
        total = x.detach().clone().contiguous()
        with _collective("summing over replicas"):
            dist.all_reduce(total, group=self._peers)
        return total

    def exchange(self, parts: list[Any]) -> list[Any]:
        return swap(parts, self._peers)

    def to_first(self, value: Any) -> list[Any] | None:
        # gloo gathers tensors of one size only.
        mine = self._padded(pack(value))
        slots = [torch.empty_like(mine) for _ in range(self._ranks.num_replicas)] if self._ranks.rank == 0 else None
        with _collective("collecting on rank 0"):
            dist.gather(mine, slots, dst=0, group=self._peers)
        return None if slots is None else [unpack(slot) for slot in slots]

    def fold_to_first(self, value: Any, fold: Callable[[Any, Any], Any]) -> Any:
        # A binary tree: after the round with step s, every (2 s)-th replica has folded the values of 2 s replicas.
        me = self._ranks.replica
        replicas = self._ranks.num_replicas
        step = 1
        while step < replicas:
            if me % (2 * step):
                with _collective("collecting on rank 0"):
                    self._send(pack(value), me - step)
                return None
            if me + step < replicas:
                with _collective("collecting on rank 0"):
                    value = fold(value, unpack(self._receive(me + step)))
            step *= 2
        return value

    def among_leaders(self, value: Any) -> list[Any]:
        return [unpack(data) for data in self._gathered(pack(value))]

    def from_leader(self, value: Any) -> Any:
        if self._inside is None:
            return value
        data = _broadcast(pack(value) if self._ranks.leader else None, self._leader, self._inside)
        return value if self._ranks.leader else unpack(data)

    def _send(self, data: Tensor, replica: int) -> None:
        rank = replica * self._ranks.per_replica + self._ranks.position
        dist.send(torch.tensor([len(data)]), rank, group=self._peers)
        dist.send(data, rank, group=self._peers)

    def _receive(self, replica: int) -> Tensor:
        rank = replica * self._ranks.per_replica + self._ranks.position
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank, group=self._peers)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, rank, group=self._peers)
        return data

    def _padded(self, data: Tensor) -> Tensor:
        """Pads the data to the size of the largest replica's; packed values contain their own length."""
        most = torch.tensor([len(data)])
        with _collective("exchanging between replicas"):
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._peers)
        return torch.cat([data, data.new_zeros(int(most) - len(data))])

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        mine = self._padded(mine)
        slots = [torch.empty_like(mine) for _ in range(self._ranks.num_replicas)]
        with _collective("exchanging between replicas"):
            dist.all_gather(slots, mine, group=self._peers)
        return slots


def swap(parts: list[Any], group: Any) -> list[Any]:
    """Sends parts[i] to the i-th rank of a group; returns what each rank sent to this one, in order."""
    me = dist.get_rank(group)
    # What stays here is neither packed nor copied.
    packed = [[] if i == me else pieces(part) for i, part in enumerate(parts)]
    sizes = torch.tensor([sum(map(len, data)) for data in packed])
    theirs = torch.empty_like(sizes)
    sent = torch.cat([torch.zeros(0, dtype=torch.uint8), *(piece for data in packed for piece in data)])
    del packed
    with _collective("exchanging between replicas"):
        dist.all_to_all_single(theirs, sizes, group=group)
        received = sent.new_empty(int(theirs.sum()))
        dist.all_to_all_single(received, sent, theirs.tolist(), sizes.tolist(), group=group)
    del sent
    return [parts[me] if i == me else unpack(data) for i, data in enumerate(torch.split(received, theirs.tolist()))]


def _all_here(store: Any, ranks: Ranks) -> None:
    """Waits until all ranks have come to the store; a rank that is missing is no fault of the network between them."""
    store.set_timeout(timedelta(seconds=START_TIMEOUT))
    if store.add("ranks", 1) == ranks.world:
        store.set("all", "here")
    store.wait(["all"])


def _broadcast(data: Tensor | None, source: int, group: Any) -> Tensor:
    """uint8 [bytes] of the rank `source` (None elsewhere), on all ranks of the group."""
    size = torch.tensor([0 if data is None else len(data)])
    with _collective(f"waiting for rank {source}"):
        dist.broadcast(size, source, group=group)
        data = torch.empty(int(size), dtype=torch.uint8) if data is None else data
        dist.broadcast(data, source, group=group)
    return data


@contextmanager
def _collective(what: str) -> Iterator[None]:
    thread = threading.get_ident()
    WAITS[thread] = time.monotonic()
    try:
        yield
    except RuntimeError as error:  # gloo and NCCL have no error type for a lost peer
        raise PeerLost(f"{what} failed: {str(error).splitlines()[0]}") from error
    finally:
        del WAITS[thread]


def _is_loss(error: BaseException | None) -> bool:
    """Whether an error, or any error in its chain of causes, follows from the end of another rank."""
    while error is not None:
        if isinstance(error, PeerLost | dist.DistError):
            return True
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False


_SIGNS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL error", "ProcessGroupNCCL")


def _text(error: BaseException) -> str:
    return (
        str(error) if isinstance(error, CreditgraphError) else "".join(traceback.format_exception_only(error)).strip()
    )


def _check_own_gpus(ranks: Ranks, device: str, group: Any) -> None:
    """Raises DistributedError if two ranks use one GPU, on which NCCL ends with an error that names neither."""
    own = str(torch.cuda.get_device_properties(device).uuid)
    all_of_them = [""] * ranks.world
    dist.all_gather_object(all_of_them, own, group=group)
    first = all_of_them.index(own)
    if first != ranks.rank:
        raise DistributedError(
            f"rank {ranks.rank}: its GPU ({device}, {own}) is rank {first}'s too; expected a GPU per process. Start "
            "fewer processes per host, or show each its own GPU (srun --gpus-per-task=1)."
        )


def run_together(meeting: Rendezvous, ranks: Ranks, device: str, work: Callable[[Team], int]) -> int:
    """Runs `work` on this rank, together with all others when there are any."""
    if ranks.world == 1:
        return work(Team(ranks))
    try:
        processes = Processes(meeting, ranks, device)
    except DistributedError as error:
        leave(str(error), 2)
    with processes:
        return work(processes)
    raise AssertionError  # __exit__ ends the process after an error
