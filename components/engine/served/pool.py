"""A pool of inference servers: routing, back-pressure, retries elsewhere, weight updates.

A prompt goes to one server, so that its group shares the prefix cache there, as long as that server is not much busier
than others (see `Ring`). Only valid responses count: a server that fails, hangs or returns nonsense causes retries, and
no row is lost. A server gets requests only while it holds the newest weights of the pool.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from creditgraph.components.engine.channel import Update
from creditgraph.components.engine.messages import (
    BadResponse,
    RowRequest,
    ScoreRequest,
    ScoreResponse,
)
from creditgraph.components.engine.served.addresses import Address, with_keys, write_rendezvous
from creditgraph.components.engine.served.dialect import Dialect, RefusedError, ServerError, failures, result_of
from creditgraph.components.engine.served.ring import Ring
from creditgraph.components.engine.served.server import Interrupted, Server
from creditgraph.components.engine.served.settings import PoolSettings
from creditgraph.components.engine.served.tasks import Feed, Reset, Task, sampling, scoring
from creditgraph.components.engine.served.transfer import together
from creditgraph.pipeline.core.errors import LostError, RunError
from creditgraph.pipeline.core.ranks import same_device

T = TypeVar("T")
_AnyRequest = RowRequest | ScoreRequest
_MAX_THREADS = 512  # in which rows get their next requests; more rows than that wait for each other
_TICK_SECONDS = 0.5


class AllServersLost(LostError):
    """All servers of a pool are lost; no weights were changed in the iteration."""


class ServerPool:
    """Servers behind one blocking interface. The event loop has its own thread; several threads may call at a time.

    Args:
        dialect: how to start servers and communicate with them.
        settings: settings of the pool.
        addresses: addresses of the servers; those without URL are started here.
        folder: run directory: logs go below it, and the rendezvous file into it.
        place: node name, for messages.
        remove: folders that are removed when this process is gone, however it ended (weight files).
        rendezvous: name of the file with the addresses of servers that are started here.
        may_start: whether the devices are free for a server to start; it waits until they are.
        replica, replicas: number of this process, and how many share the servers.
    """

    def __init__(
        self,
        dialect: Dialect,
        settings: PoolSettings,
        addresses: Sequence[Address],
        folder: Path,
        place: str = "engine",
        remove: Sequence[Path] = (),
        rendezvous: str = "engines.json",
        may_start: Callable[[], bool] = lambda: True,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        self.settings = settings
        self.place = place
        self._dialect = dialect
        self._folder = folder
        self._rendezvous = folder / rendezvous
        self.servers = [
            Server(
                index=n,
                dialect=dialect,
                settings=settings,
                logs=folder / "logs",
                remove=tuple(remove),
                current=lambda: self._update,
                changed=self._wake,
                address=address,
                own=not address.url,
                may_start=lambda: not self._resting and may_start(),
                sharers=-(-replicas // len(addresses)),
            )
            for n, address in enumerate(with_keys(addresses))
        ]
        self.updates: list[tuple[str, float, float]] = []
        """server, begin and end (perf_counter) of the last weight update"""
        self._counters: dict[str, float] = defaultdict(float)
        self._losses = 0
        self._update: Update | None = None
        self._resting = False  # from `sleep` to the next update no server may start
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._ring = Ring(self.servers, replica, replicas)
        self._ticker: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        # Broadcasts run in threads of the loop.
        self._loop.set_default_executor(ThreadPoolExecutor(None, "creditgraph-servers", same_device()))
        self._thread = threading.Thread(target=self._loop.run_forever, name="server pool", daemon=True)
        self._thread.start()

    # The blocking side

    def start(self) -> None:
        """Starts or connects to the servers and waits until all are ready; raises RunError, with log lines."""
        try:
            self._call(self._start())
        except BaseException:
            self.close()
            raise
        if any(server.own for server in self.servers):
            write_rendezvous(self._rendezvous, [server.address for server in self.servers])

    def update(self, update: Update) -> None:
        """Has every server load `update`; those that fail are out until they hold it. Raises RunError when all fail."""
        self._call(self._update_all(update))

    def sleep(self) -> None:
        """Has every server give its memory back until the next update; raises RunError for one that cannot."""
        self._call(self._sleep_all())

    def generate(
        self,
        requests: Sequence[RowRequest],
        feed: Feed,
        reset: Reset,
    ) -> None:
        """Sends requests until every row has ended.

        Args:
            requests: one per row.
            feed: called with a row, the next part of its response, and whether it is the last; returns True when the
                row has ended and raises BadResponse for an invalid part.
            reset: called with a row whose parts do not count: its response was cut off, or is not valid. The request is
                then sent to another server.
        """
        self._call(self._send_all(requests, sampling(self._dialect, feed, reset)))

    def converse(
        self,
        rows: int,
        follow: Callable[[int], RowRequest | None],
        feed: Feed,
        reset: Reset,
    ) -> None:
        """Sends the next request of a row once the one before has ended, until no row has another.

        Args:
            rows: number of rows.
            follow: called with a row, from threads of its own, for its next request; None if it has none.
            feed, reset: as of `generate`.
        """

        async def play(row: int) -> None:
            while (request := await self._loop.run_in_executor(threads, follow, row)) is not None:
                await self._send(request, sampling(self._dialect, feed, reset))

        with ThreadPoolExecutor(max(1, min(rows, _MAX_THREADS)), "creditgraph-rows", same_device()) as threads:
            self._call(together(*(play(row) for row in range(rows))))

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResponse]:
        """Sends requests until each has a valid response; returns the responses in order."""
        responses: dict[int, ScoreResponse] = {}
        self._call(self._send_all(requests, scoring(self._dialect, responses)))
        return [responses[request.row] for request in requests]

    def take_counters(self) -> dict[str, float]:
        """Counts since the last call: requests, retries, aborted, servers_lost, seconds_update."""
        counters = dict(self._counters)
        self._counters.clear()
        losses = sum(server.losses for server in self.servers)
        if losses > self._losses:
            counters["servers_lost"] = losses - self._losses
            self._losses = losses
        return counters

    def num_ready(self) -> int:
        """Number of servers that hold the current weights and respond."""
        return sum(server.state == "ready" for server in self.servers)

    def in_flight(self) -> dict[str, float]:
        """Server → number of requests that it is working on."""
        return {f"server {server.index} requests": float(server.outstanding) for server in self.servers}

    def close(self) -> None:
        """Ends requests, servers that were started here, and the thread."""
        if self._thread.is_alive():
            self._call(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            if any(server.own for server in self.servers):
                self._rendezvous.unlink(missing_ok=True)
            self._dialect.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise RunError(f"node '{self.place}': the pool of servers was closed while it had requests.") from None
        except BaseException:
            future.cancel()  # a Ctrl-C here ends the requests at the servers too
            raise

    # Starting

    async def _start(self) -> None:
        await together(*(server.start() for server in self.servers))
        self._ticker = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            if self._waiting and self._all_lost():
                self._wake()

    # Weights

    async def _update_all(self, update: Update) -> None:
        begin = time.perf_counter()
        self._update = update
        self._ring.clear()
        self._resting = False
        self.updates = []
        usable = [server for server in self.servers if server.state in ("starting", "ready", "updating", "asleep")]
        if update.transfer is not None:
            update.transfer.expect([server.client for server in usable])
        failures = await asyncio.gather(*(self._load(server, update) for server in usable), return_exceptions=True)
        if any(failures):
            # An error on this side is the cause, and would occur with every other server too.
            pending: tuple[Future[Any] | None, ...] = (update.checksum, update.expected)
            for work in pending:
                if work is not None and (update.transfer is None or work.done()):
                    await result_of(work)
        for server, failure in zip(usable, failures, strict=True):
            if isinstance(failure, BaseException) and not isinstance(failure, Exception):
                raise failure  # this pool is being closed
            if failure is not None and server.state in ("starting", "updating"):
                server.lose(str(failure), restart=True)
        while not self.num_ready():
            self._check_lost()
            await self._changed()
        self._counters["seconds_update"] += time.perf_counter() - begin

    async def _load(self, server: Server, update: Update) -> None:
        begin = time.perf_counter()
        await server.load(update, self.settings.in_flight)
        self.updates.append((f"server {server.index}", begin, time.perf_counter()))

    async def _sleep_all(self) -> None:
        self._resting = True
        await together(*(server.sleep() for server in self.servers))

    # Requests

    async def _send_all(self, requests: Sequence[_AnyRequest], task: Task) -> None:
        await together(*(self._send(request, task) for request in requests))

    async def _send(self, request: _AnyRequest, task: Task) -> None:
        """Sends one request until a server returns a valid response."""
        wrong: list[Server] = []
        while True:
            server = await self._choose(request.group, wrong)
            label = server.label
            self._counters["requests"] += 1
            try:
                reported = await server.request(lambda client, request_id: task.send(client, request, request_id))
                self._check_label(server, reported, label)
            except Interrupted:
                # The server was lost, not the request wrong, so this does not count towards `retries`.
                self._counters["retries"] += 1
                task.undo(request.row)
                continue
            except failures() as error:
                self._counters["retries"] += 1
                task.undo(request.row)
                wrong.append(server)
                self._count_failure(server, error)
                if len(wrong) > self.settings.retries:
                    raise self._failed(request, wrong, error) from error
                continue
            finally:
                self._wake(1)
            server.failures = 0
            if task.done(request.row):
                return
            self._counters["aborted"] += 1

    def _check_label(self, server: Server, reported: str | None, at_start: str | None) -> None:
        """Raises ServerError for a response by other weights than the server held when the request began or ended."""
        if reported is None or reported in (at_start, server.label):
            return
        reason = f"expected a response by weights version {server.label}, got one by version {reported}"
        if server.state == "ready":
            server.lose(reason, restart=False)
        raise ServerError(f"{server.name}: {reason}.")

    def _count_failure(self, server: Server, error: Exception) -> None:
        if isinstance(error, RefusedError):
            return
        if server.process is not None and not server.process.running:
            server.lose(f"its process {server.process.status()}", restart=True)
        elif server.state == "ready":
            server.count_failure(error)

    def _failed(self, request: _AnyRequest, wrong: list[Server], error: Exception) -> Exception:
        if isinstance(error, BadResponse) and len({server.index for server in wrong}) == len(self.servers):
            return error  # every server returns it, so the cause is the weights or the request; the error says which
        names = ", ".join(sorted({server.name for server in wrong}))
        return RunError(
            f"node '{self.place}', row {request.row}: expected a valid response within {self.settings.retries} retries "
            f"({self.place}.pool.retries), got none from {names}; the last error: {error} See the servers' logs."
            f"{wrong[-1].log_lines()}"
        )

    # Routing

    async def _choose(self, group: int, avoid: Sequence[Server]) -> Server:
        """A server with room."""
        while True:
            ready = [server for server in self.servers if server.state == "ready"]
            if ready:
                candidates = [server for server in ready if server not in avoid] or ready
                if chosen := self._ring.choose(group, candidates, self.settings.max_in_flight):
                    return chosen
            else:
                self._check_lost()
            await self._changed()

    async def _changed(self) -> None:
        """Waits until a server has room or changed its state."""
        future = self._loop.create_future()
        self._waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._wake(1)  # it was woken for a free place that it will not use
            elif future in self._waiting:
                self._waiting.remove(future)
            raise

    def _wake(self, count: int | None = None) -> None:
        for _ in range(len(self._waiting) if count is None else count):
            while self._waiting:
                future = self._waiting.popleft()
                if not future.done():
                    future.set_result(None)
                    break

    def _all_lost(self) -> bool:
        now = time.monotonic()
        return all(
            server.state == "gone"
            or (server.state == "lost" and not server.own and now - server.lost_at > server.patience)
            for server in self.servers
        )

    def _check_lost(self) -> None:
        if not self._all_lost():
            return
        reasons = "".join(f"\n  {server.name}: {server.reason}" for server in self.servers)
        raise AllServersLost(
            f"node '{self.place}': all {len(self.servers)} servers are lost:{reasons}\n"
            "Expected at least one that responds. See the logs named above and correct the cause (memory, a port, a "
            "host that is down), then start the same command again: it continues from the last finished iteration."
        )

    async def _close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        await asyncio.gather(*(server.close() for server in self.servers), return_exceptions=True)
        for task in asyncio.all_tasks(self._loop):
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.sleep(0)
