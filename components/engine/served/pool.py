"""A pool of inference servers: routing, back-pressure, retries elsewhere, weight updates.

A prompt goes to one server, so that its group shares the prefix cache there, as long as that server is not much busier
than another. Each row goes on as soon as its own answer is there. An answer counts once and only if it is sound: a
server that fails, hangs or answers nonsense costs retries, never rows. A server may be asked only while it holds the
weights that the pool was last given.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx

from components.engine.served.dialect import (
    Answer,
    Ask,
    BadAnswer,
    Dialect,
    RefusedError,
    ScoreAnswer,
    ScoreAsk,
    ServerError,
    Update,
)
from components.engine.served.member import Interrupted, Member, PoolSettings
from components.engine.served.server import Address, check_port, write_rendezvous
from pipeline.core.errors import LostError, RunError

logger = logging.getLogger("creditgraph")

T = TypeVar("T")
_SPILL = 16  # requests by which a prompt's server may be busier than twice another before the prompt is asked there too
_TICK_SECONDS = 0.5


class _Asked(Protocol):
    row: int
    group: int


class ServerPool:
    """Servers behind one blocking interface. Its event loop has a thread of its own; any thread may call, several at a time.

    Args:
        dialect: how to start servers and speak to them.
        settings: of the pool.
        addresses: of the servers; those without URL are started here.
        folder: run directory: logs go below it, and the rendezvous file into it.
        place: node name, for messages.
        rendezvous: name of the file with the addresses of servers that are started here.
        remove: folders that are removed when this process is gone, however it ended (weight files).
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
    ) -> None:
        self.settings, self.place = settings, place
        self._dialect, self._addresses, self._folder, self._remove = dialect, list(addresses), folder, tuple(remove)
        self._rendezvous = folder / rendezvous
        self.members: list[Member] = []
        self.counters: Counter[str] = Counter()
        self._update: Update | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server pool", daemon=True)
        self._thread.start()
        self._ticker: asyncio.Task[None] | None = None
        self._losses = 0
        self.updates: list[
            tuple[str, float, float]
        ] = []  # server, begin and end of the last weight update (perf_counter)

    # The blocking side

    def start(self) -> None:
        """Starts or finds the servers and waits until all are ready; raises RunError, with log lines, for one that is not."""
        try:
            if self.settings.port:
                for index in (n for n, address in enumerate(self._addresses) if not address.url):
                    check_port(self.settings.port + index, f"{self.place}.pool.port")
            self._call(self._start())
        except BaseException:
            self.close()
            raise
        if any(m.own for m in self.members):
            write_rendezvous(self._rendezvous, [m.address for m in self.members])

    def update(self, update: Update) -> None:
        """Has every server load `update`; those that do not are out until they hold it. Raises RunError when none does."""
        self._call(self._update_all(update))

    def generate(self, asks: Sequence[Ask], advance: Callable[[int, Answer], Ask | None]) -> None:
        """Asks until every row has ended; `advance(row, answer)` gives the row's next ask and raises BadAnswer for an unsound answer."""
        self._call(
            self._rows(asks, lambda m, ask: lambda client, rid: self._dialect.generate(client, ask, rid), advance)
        )

    def stream(
        self, asks: Sequence[Ask], feed: Callable[[int, Answer, bool], bool], again: Callable[[int], None]
    ) -> None:
        """Like `generate` with one ask per row, whose tokens are handed over as they come.

        `feed(row, part, last)` tells whether the row has ended and raises BadAnswer for an unsound part; after one, and
        after an answer that was cut off, `again(row)` is called and the row asked for elsewhere.
        """
        by_row = {ask.row: ask for ask in asks}
        ended: set[int] = set()

        def request(member: Member, ask: Ask) -> Callable[[httpx.AsyncClient, str], Coroutine[Any, Any, Any]]:
            def take(part: Answer, last: bool) -> bool:
                if feed(ask.row, part, last):
                    ended.add(ask.row)
                return ask.row in ended

            async def whole(client: httpx.AsyncClient, name: str) -> _Streamed:
                return _Streamed(await self._dialect.stream(client, ask, name, take))

            return whole

        def undo(row: int) -> None:
            ended.discard(row)
            again(row)

        self._call(self._rows(asks, request, lambda row, _: None if row in ended else by_row[row], undo))

    def score(self, asks: Sequence[ScoreAsk], take: Callable[[int, ScoreAnswer], None]) -> None:
        """One answer per ask; `take(row, answer)` raises BadAnswer for an unsound one."""
        self._call(self._rows(asks, lambda m, ask: lambda client, rid: self._dialect.score(client, ask, rid), take))

    def take_counters(self) -> dict[str, float]:
        """What happened since the last call: requests, retries, aborted, servers_lost, seconds; and servers_ready now."""
        found, self.counters = self.counters, Counter()
        losses = sum(member.losses for member in self.members)
        if losses > self._losses:
            found["servers_lost"], self._losses = losses - self._losses, losses
        return {**found, "servers_ready": float(sum(m.state == "ready" for m in self.members))}

    def progress(self) -> dict[str, int]:
        """Requests that run and that wait, now."""
        return {"running": sum(m.outstanding for m in self.members), "waiting": len(self._waiting)}

    def in_flight(self) -> dict[str, float]:
        """Server → requests that it works on, now."""
        return {f"server {m.index} requests": float(m.outstanding) for m in self.members}

    def close(self) -> None:
        """Ends requests, servers that were started here, and the thread."""
        if self._thread.is_alive():
            self._call(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            if any(m.own for m in self.members):
                self._rendezvous.unlink(missing_ok=True)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise RunError(f"node '{self.place}': the pool of servers was closed while it was asked.") from None
        except BaseException:
            future.cancel()  # a Ctrl-C here ends the requests at the servers too
            raise

    # Starting

    async def _start(self) -> None:
        logs = self._folder / "logs"
        self.members = [
            Member(
                n,
                self._dialect,
                self.settings,
                logs,
                self._remove,
                lambda: self._update,
                self._wake,
                address,
                own=not address.url,
            )
            for n, address in enumerate(self._addresses)
        ]
        tasks = [asyncio.create_task(self._first_start(member)) for member in self.members]
        await _all(tasks)
        self._ticker = asyncio.create_task(self._tick())

    async def _first_start(self, member: Member) -> None:
        try:
            await member.start()
        except RunError:
            if (
                not member.own
                or member.process is None
                or "killed by" not in member.process.ended()
                or not self.settings.restarts
            ):
                raise
            logger.warning("%s %s while it started; starting it once more.", member.name, member.process.ended())
            await member.start()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            if self._waiting and self._hopeless():
                self._wake()

    # Weights

    async def _update_all(self, update: Update) -> None:
        begin = time.perf_counter()
        self._update, self.updates = update, []
        usable = [m for m in self.members if m.state in ("starting", "ready", "updating")]
        failures = await asyncio.gather(*(self._load(m, update) for m in usable), return_exceptions=True)
        if any(failures):
            # What went wrong on this side is the cause, and no other server would fare better.
            await update.complete()
            if update.probe is not None:
                await update.probe.wanted()
        for member, failure in zip(usable, failures, strict=True):
            if isinstance(failure, asyncio.CancelledError) or (
                failure is not None and not isinstance(failure, Exception)
            ):
                raise failure
            if failure is not None and member.state in ("starting", "updating"):
                member.lose(str(failure), restart=True)
        while not any(m.state == "ready" for m in self.members):
            self._check_hope()
            await self._changed()
        self.counters["seconds_update"] += time.perf_counter() - begin  # type: ignore[assignment]

    async def _load(self, member: Member, update: Update) -> None:
        begin = time.perf_counter()
        await member.load(update, self.settings.in_flight)
        self.updates.append((f"server {member.index}", begin, time.perf_counter()))

    # Requests

    async def _rows(
        self,
        asks: Sequence[Any],
        request: Callable[[Member, Any], Callable[[httpx.AsyncClient, str], Coroutine[Any, Any, Any]]],
        advance: Callable[[int, Any], Any],
        undo: Callable[[int], None] = lambda row: None,
    ) -> None:
        homes: dict[int, Member] = {}

        async def row(ask: Any) -> None:
            while ask is not None:
                ask = await self._answered(ask, homes, request, advance, undo)

        await _all([asyncio.create_task(row(ask)) for ask in asks])

    async def _answered(
        self,
        ask: _Asked,
        homes: dict[int, Member],
        request: Callable[[Member, Any], Callable[[httpx.AsyncClient, str], Coroutine[Any, Any, Any]]],
        advance: Callable[[int, Any], Any],
        undo: Callable[[int], None],
    ) -> Any:
        """One sound answer to `ask`, from whichever server; what `advance` makes of it. `undo(row)` follows every other one."""
        wrong: list[Member] = []
        while True:
            member = await self._take(ask.group, homes, wrong)
            version = member.version
            self.counters["requests"] += 1
            try:
                answer = await member.ask(request(member, ask))
                self._check_version(member, answer.version, version)
                following = advance(ask.row, answer)
            except Interrupted:
                self.counters["retries"] += 1
                undo(ask.row)
                continue
            except (ServerError, BadAnswer, httpx.HTTPError, OSError) as error:
                self.counters["retries"] += 1
                undo(ask.row)
                wrong.append(member)
                self._failed(member, error)
                if len(wrong) > self.settings.retries:
                    raise self._gave_up(ask, wrong, error) from error
                continue
            finally:
                self._wake(1)
            member.failures = 0
            if following is ask:
                self.counters["aborted"] += 1
            return following

    def _check_version(self, member: Member, told: int | None, at_start: int | None) -> None:
        if told is None or told in (at_start, member.version):
            return
        found = f"it answered with weights version {told}; wanted {member.version}"
        if member.state == "ready":
            member.lose(found, restart=False)
        raise ServerError(f"{member.name}: {found}.")

    def _failed(self, member: Member, error: Exception) -> None:
        if isinstance(error, RefusedError):
            return
        if member.process is not None and not member.process.running:
            member.lose(f"its process {member.process.ended()}", restart=True)
        elif member.state == "ready":
            member.failed(error)

    def _gave_up(self, ask: _Asked, wrong: list[Member], error: Exception) -> Exception:
        if isinstance(error, BadAnswer) and len({m.index for m in wrong}) == len(self.members):
            return error  # every server says so: it is the weights or the request, and the sentence tells which
        names = ", ".join(sorted({m.name for m in wrong}))
        return RunError(
            f"node '{self.place}', row {ask.row}: {len(wrong)} requests without a sound answer from {names}; the last "
            f"one: {error} "
            f"Wanted one within {self.settings.retries} retries ({self.place}.pool.retries). See the servers' "
            f"logs.{wrong[-1].log_lines()}"
        )

    # Routing

    async def _take(self, group: int, homes: dict[int, Member], avoid: Sequence[Member]) -> Member:
        """A server with room: the prompt's own, if that is not much busier than the least busy one."""
        while True:
            ready = [m for m in self.members if m.state == "ready"]
            if ready:
                candidates = [m for m in ready if m not in avoid] or ready
                least = min(candidates, key=lambda m: m.outstanding)
                home = homes.get(group)
                if home not in candidates:
                    homes[group] = home = least
                assert home is not None
                chosen = home if home.outstanding <= 2 * least.outstanding + _SPILL else least
                for member in (chosen, least):
                    if member.outstanding < self.settings.max_in_flight:
                        return member
            else:
                self._check_hope()
            await self._changed()

    async def _changed(self) -> None:
        """Returns when a server has room or changed its state."""
        future = self._loop.create_future()
        self._waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._wake(1)  # it was woken for a place that it will not take
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

    def _hopeless(self) -> bool:
        now, patience = time.monotonic(), self.settings.hang_seconds
        return all(
            m.state == "gone" or (m.state == "lost" and not m.own and now - m.lost_at > patience) for m in self.members
        )

    def _check_hope(self) -> None:
        if not self._hopeless():
            return
        said = "".join(f"\n  {m.name}: {m.reason}" for m in self.members)
        raise AllServersLost(
            f"node '{self.place}': all {len(self.members)} servers are lost:{said}\n"
            "Wanted at least one that answers. See the logs named above and correct the cause (memory, a port, a host "
            "that is down), "
            "then start the same command again: it continues from the last finished iteration."
        )

    async def _close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        await asyncio.gather(*(m.close() for m in self.members), return_exceptions=True)
        for task in asyncio.all_tasks(self._loop):
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class _Streamed:
    version: int | None


class AllServersLost(LostError):
    """No server of a pool is left; nothing of the iteration is learned from yet."""


async def _all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Waits for all; the first failure cancels the others and is raised."""
    if not tasks:
        return
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


__all__ = ["AllServersLost", "PoolSettings", "ServerPool"]
