"""Streams new weights from a learner to servers, in buckets, to all of them at once; nothing is written to disk."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from creditgraph.components.engine.bucket import Bucket, in_buckets
from creditgraph.components.engine.group import Meeting, UpdateGroup, new_group_name
from creditgraph.components.engine.served.addresses import LOOPBACK, free_port, own_address
from creditgraph.components.engine.weight_files import Checksum
from creditgraph.pipeline.core.errors import CreditgraphError

Pairs = Callable[[], Iterator[tuple[str, Tensor]]]


class Receiver(Protocol):
    """One server in a transfer; its methods are called in this order, all but `join` for each version."""

    client: Any  # httpx.AsyncClient, of this start of the server
    ranks: int  # its processes that hold weights

    async def join(self, meeting: Meeting, first: int) -> None:
        """Has its processes join a group, as ranks from `first` on."""
        ...

    async def begin(self) -> None:
        """Prepares it for new weights."""
        ...

    async def take(self, bucket: Bucket, group: str) -> None:
        """Has it load a bucket that comes over the group; "": from shared memory."""
        ...

    async def end(self) -> None:
        """Tells it that all have come."""
        ...


class Links:
    """The group over which tensors travel: this process and all processes of the servers that take part.

    It is kept as long as the same servers take part. All servers get a bucket by one broadcast; so one that ends in the
    middle of it takes the others out of the pool as well, until they have loaded the weights again.

    Args:
        device: device of the sender; decides between NCCL and gloo.
        seconds: limit of each step.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device = device
        self._seconds = seconds
        self._members: list[Any] = []
        self.group: UpdateGroup | None = None

    async def open(self, receivers: Sequence[Receiver]) -> UpdateGroup:
        """The group of these servers."""
        clients = [receiver.client for receiver in receivers]
        same = len(clients) == len(self._members) and all(map(_is, clients, self._members))
        if self.group is not None and same:
            return self.group
        self.close()
        address = _address_for(clients)
        meeting = Meeting(
            name=new_group_name(),
            address=address,
            port=free_port(address),
            backend="nccl" if self._device.type == "cuda" else "gloo",
            world=1 + sum(receiver.ranks for receiver in receivers),
            seconds=self._seconds,
        )
        joining = []
        first = 1
        for receiver in receivers:
            joining.append(receiver.join(meeting, first))
            first += receiver.ranks
        self.group, *_ = await together(asyncio.to_thread(UpdateGroup, meeting, 0, self._device), *joining)
        self._members = clients
        return self.group

    def close(self) -> None:
        """Leaves the group."""
        if self.group is not None:
            self.group.close()
        self.group = None
        self._members = []


class Transfer:
    """One version on its way to servers.

    Servers that are `expected` get it together, once each has asked for it or has dropped out; a server that asks
    later, after a fault, gets a stream of its own.

    Args:
        pairs: the tensors; called once per stream.
        version: their number.
        dtype: dtype of floating-point tensors in transfer.
        bucket_bytes: most bytes of whole tensors in a bucket; two buckets are held at a time.
        links: the group to broadcast over; None for memory that the servers open.

    Attributes:
        checksum: of all tensors; completes with the first stream.
        gone: whether the learner has no longer had the tensors when they were last asked for.
    """

    def __init__(self, pairs: Pairs, version: int, dtype: torch.dtype, bucket_bytes: int, links: Links | None) -> None:
        self.checksum: Future[str] = Future()
        self.gone = False
        self._pairs = pairs
        self._version = version
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._links = links
        self._expected: set[Any] = set()
        self._waiting: list[tuple[Receiver, asyncio.Future[None]]] = []
        self._rounds: set[asyncio.Task[None]] = set()
        self._one = asyncio.Lock()
        self._reader = ThreadPoolExecutor(1, "creditgraph-stream")  # reads the learner's tensors, always the same one

    def expect(self, servers: Sequence[Any]) -> None:
        """Names the servers that begin together, by their clients."""
        self._expected = set(servers)

    def drop(self, server: Any) -> None:
        """Waits no longer for a server."""
        self._expected.discard(server)
        self._start()

    async def receive(self, receiver: Receiver) -> None:
        """Has a server get all tensors; raises its error, or that of the stream."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((receiver, done))
        self.drop(receiver.client)
        await done

    def _start(self) -> None:
        self._waiting = [(receiver, done) for receiver, done in self._waiting if not done.done()]
        if self._expected or not self._waiting:
            return
        task = asyncio.create_task(self._round(self._waiting))
        self._waiting = []
        self._rounds.add(task)
        task.add_done_callback(self._rounds.discard)

    async def _round(self, members: list[tuple[Receiver, asyncio.Future[None]]]) -> None:
        error: BaseException | None = None
        try:
            async with self._one:
                checksum = await self._stream([receiver for receiver, _ in members])
            if not self.checksum.done():
                self.checksum.set_result(checksum)
        except BaseException as raised:
            error = raised
            if self._links is not None:
                self._links.close()  # it cannot be used again
            if self.gone and not self.checksum.done():
                self.checksum.set_exception(error)  # an error on this side, which every server would meet
        for _, done in members:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

    async def _stream(self, receivers: Sequence[Receiver]) -> str:
        group = None if self._links is None else await self._links.open(receivers)
        checksum = Checksum()
        buckets = in_buckets(self._pairs(), self._version, self._dtype, self._bucket_bytes, checksum)
        loop = asyncio.get_running_loop()
        try:
            bucket = await loop.run_in_executor(self._reader, self._next, buckets)
            await together(*(receiver.begin() for receiver in receivers))
            while bucket is not None:
                takes = [receiver.take(bucket, "" if group is None else group.name) for receiver in receivers]
                sending = [] if group is None else [asyncio.to_thread(group.broadcast, bucket.flat)]
                following = loop.run_in_executor(self._reader, self._next, buckets)  # prepared while this one travels
                bucket, *_ = await together(_result(following), *takes, *sending)
            await together(*(receiver.end() for receiver in receivers))
        finally:
            await loop.run_in_executor(self._reader, buckets.close)  # type: ignore[attr-defined]
        return checksum.result()

    def _next(self, buckets: Iterator[Bucket]) -> Bucket | None:
        self.gone = True
        try:
            bucket = next(buckets, None)
        except CreditgraphError:
            raise
        except BaseException:
            self.gone = False
            raise
        self.gone = False
        return bucket

    def close(self) -> None:
        """Ends the thread."""
        self._reader.shutdown(wait=False)


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of all; the first failure is raised at once, and the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _result(future: asyncio.Future[Any]) -> Any:
    return await asyncio.shield(future)


def _is(a: Any, b: Any) -> bool:
    return a is b


def _address_for(clients: Sequence[Any]) -> str:
    """The address of this process at which all servers reach it; servers on Unix sockets are on this host."""
    for client in clients:
        host = client.base_url.host
        if client.base_url.port is not None and host not in (LOOPBACK, "localhost"):
            return own_address(host, client.base_url.port)
    return LOOPBACK
