"""One server of a pool: its weights, its requests, and its recovery after a fault."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from creditgraph.components.engine.channel import Update
from creditgraph.components.engine.probe import ProbeError, compare_logprobs
from creditgraph.components.engine.served.connection import check_closed
from creditgraph.components.engine.served.dialect import InFlight, ServerError, failures, parsing, result_of
from creditgraph.components.engine.served.launched import CHECK_SECONDS, Launched, describe
from creditgraph.pipeline.core.errors import CreditgraphError, RunError

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("creditgraph")

T = TypeVar("T")
Send = Callable[["httpx.AsyncClient", str], Coroutine[Any, Any, T]]
"""Sends a request of the given id over a client."""
State = Literal["starting", "ready", "updating", "asleep", "lost", "gone"]
BREAKER = 3  # consecutive failures after which a server is taken out of the pool
ABORT_SECONDS = 2.0
RETRY_SECONDS = 10.0  # longest wait between attempts to bring a server back


@cache
def _faults() -> tuple[type[Exception], ...]:
    """What a server's answer, or none, may raise."""
    return (
        *failures(),
        CreditgraphError,
        RuntimeError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
    )


class Interrupted(Exception):
    """The server was taken out of the pool while it had the request; send it to another server."""


@dataclass(eq=False, kw_only=True)
class Server(Launched):
    """A server and its state in the pool. All methods run on the pool's event loop.

    Attributes:
        current: returns the update that the server must hold before it gets requests, or None before the first one.
        changed: called after every change of state.
        sharers: processes of this run that send requests to it at a time, about.
        difference: largest difference in the last probe [nats].
    """

    current: Callable[[], Update | None]
    changed: Callable[[], None]
    sharers: int = 1
    state: State = "starting"
    label: str | None = None
    difference: float = 0.0
    reason: str = ""
    failures: int = 0
    losses: int = 0
    running: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    responded: float = 0.0
    lost_at: float = 0.0
    _asleep: bool = False
    _count: int = 0
    _epoch: int = 0
    _recovery: asyncio.Task[None] | None = None
    _watch: asyncio.Task[None] | None = None

    @property
    def outstanding(self) -> int:
        """Number of requests it is working on."""
        return len(self.running)

    async def start(self) -> None:
        """Starts the process (if it is ours) and waits until it responds; raises RunError, with its last log lines."""
        await self.launch()
        await check_closed(self.address, self.name, self.own)
        self._asleep = False
        self.failures = 0
        self.label = None
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._check_health())

    # Weights

    async def load(self, update: Update, in_flight: InFlight) -> None:
        """Brings the server to `update` and makes it ready; raises RunError naming it when it fails or is late."""
        self._become("updating")
        stage = "finishing its requests"
        epoch = self._epoch
        begin = time.monotonic()
        try:
            async with asyncio.timeout(self.settings.update_seconds):
                if in_flight == "finish":
                    while self.running:
                        await asyncio.wait(self.running.values())
                if self._asleep:
                    stage = "waking up"
                    await self.dialect.wake(self.client, weights=True)
                if not update.loaded:
                    stage = "pausing"
                    await self.dialect.pause(self.client, in_flight)
                    stage = f"loading weights version {update.version}"
                    await self.dialect.update(self.client, update)
                if self._asleep:
                    stage = "waking up"
                    await self.dialect.wake(self.client, weights=False)
                    self._asleep = False
                stage = "reporting its weights"
                await self._verify(update)
                if not update.loaded:
                    stage = "resuming"
                    await self.dialect.resume(self.client)
                stage = "responding to a probe"
                await self._probe(update)
        except TimeoutError:
            raise RunError(
                f"{self.name}: expected it to finish within {self.settings.update_seconds:g} s "
                f"(engine.pool.update_seconds), but it was {stage} for {time.monotonic() - begin:.1f} s."
                f"{self.log_lines()}"
            ) from None
        except _faults() as error:
            raise RunError(f"{self.name}: failed while {stage}: {describe(error)}{self.log_lines()}") from error
        finally:
            if update.transfer is not None:
                update.transfer.drop(self.client)  # the others must not wait for one that has failed before
        if self._epoch != epoch or self.state != "updating":
            raise RunError(f"{self.name}: lost while it loaded weights version {update.version}: {self.reason}")
        self.label = update.label()
        self.failures = 0
        self._become("ready")

    async def sleep(self) -> None:
        """Waits for its requests, then has it give its memory back until `load`; raises RunError naming it."""
        if self.state == "lost" and self.own and self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
            await self.stop_process()
            self._recovery = asyncio.create_task(self._recover(restart=True))  # waits until a server may start
        if self.state not in ("starting", "ready"):
            return  # asleep already, or out of the pool
        self._become("updating")
        try:
            async with asyncio.timeout(self.settings.update_seconds):
                while self.running:
                    await asyncio.wait(self.running.values())
                await self.dialect.sleep(self.client)
        except _faults() as error:
            raise RunError(f"{self.name}: it cannot sleep: {describe(error)}{self.log_lines()}") from error
        self._asleep = True
        self.label = None
        self._become("asleep")

    async def _verify(self, update: Update) -> None:
        expected = await result_of(update.checksum)
        label, checksum = await self.dialect.reported(self.client, update)
        if checksum is not None and checksum != expected:
            raise ServerError(
                f"expected checksum {expected} of weights version {update.version}, the server reports {checksum}: "
                "the weights were changed on the way to it."
            )
        if label != update.label():
            raise ServerError(f"expected weights version {update.label()}, the server reports {label}.")

    async def _probe(self, update: Update) -> None:
        if update.probe is None or update.expected is None:
            return
        response = await self.dialect.score(self.client, update.probe.request, f"probe-{time.monotonic_ns()}")
        if response.version not in (None, update.label()):
            raise ServerError(f"expected a probe of weights version {update.label()}, got one of {response.version}.")
        expected = await result_of(update.expected)
        self.difference = compare_logprobs(response.logprobs, expected, update.probe.tolerance)

    # Requests

    async def request(self, send: Send[T]) -> T:
        """One request; raises Interrupted when the server is taken out meanwhile."""
        self._count += 1
        request_id = f"{self.address.identity or 'creditgraph'}-{self._count}-{time.monotonic_ns()}"
        task = asyncio.create_task(send(self.lane(self._count), request_id))
        self.running[request_id] = task
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            self.running.pop(request_id, None)
        if task.cancelled():
            raise Interrupted
        self.responded = time.monotonic()
        with parsing(self.name):
            return task.result()

    def count_failure(self, error: Exception) -> None:
        """Counts a wrong or missing response; too many in a row take the server out."""
        self.failures += 1
        if self.failures >= BREAKER and self.state == "ready":
            self.lose(f"{self.failures} failures in a row, the last one: {describe(error)}", restart=True)

    # Faults

    @property
    def patience(self) -> float:
        """Seconds until one that others started counts as gone; a job starts those that it lists again."""
        return self.settings.start_seconds if self.address.listed_in else self.settings.hang_seconds

    def lose(self, reason: str, restart: bool) -> None:
        """Takes the server out of the pool, has its requests sent to others, and starts to recover it."""
        if self.state in ("lost", "gone"):
            return
        self.reason = reason
        self.label = None
        self.lost_at = time.monotonic()
        self._epoch += 1
        self.losses += 1
        logger.warning("%s is out of the pool: %s%s", self.name, reason, self.log_lines())
        self._become("lost")
        for task in list(self.running.values()):
            task.cancel()
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._recover(restart))

    async def _recover(self, restart: bool) -> None:
        """Loads the current weights, or starts the server again, until it holds them; gives up after `restarts`."""
        wait = 0.1
        started = is_off = False
        while self.state == "lost":
            update = self.current()
            if update is not None and update.transfer is not None and update.transfer.gone:
                await asyncio.sleep(RETRY_SECONDS / 10)  # until the learner publishes the next version, or rests
                update.transfer.gone = False
                restart = restart and self.process is not None and not self.process.running
            try:
                if self.own and (restart or self.process is None or not self.process.running):
                    if self.starts > self.settings.restarts or is_off:
                        await self.stop_process()
                        self._become("gone")
                        return
                    await self.start()
                    started = True
                else:
                    if not await self.follow():
                        await self.connect()  # a transfer knows the server's start by its connection
                    await asyncio.wait_for(self.dialect.ready(self.client, self.address.identity), CHECK_SECONDS)
                if update is None:
                    self._become("ready")
                    return
                await self.load(update, "abort")
                if self.current() is not update:  # newer weights came meanwhile
                    self._become("lost")
                    restart = False
                    continue
                logger.warning("%s is back in the pool with weights version %d.", self.name, update.version)
                return
            except _faults() as error:
                self.reason = describe(error)
                self._become("lost")
                restart = True
                # A new process that computes otherwise than the learner is not alone with it: so would the next.
                is_off = started and isinstance(error.__cause__, ProbeError)
                await asyncio.sleep(wait)
                wait = min(wait * 2, RETRY_SECONDS)

    async def _check_health(self) -> None:
        """Takes the server out if its process ends, its health checks fail, or it makes no progress.

        A server elsewhere is checked while this process has requests there, and less often the more processes do. So
        however many share the servers of a run, each gets about one check in two seconds.
        """
        healthy = moved = time.monotonic()
        last_progress = -1.0
        interval = min(2.0 * self.sharers, self.settings.hang_seconds / 4)
        while self.state != "gone":
            await asyncio.sleep(interval)
            if self.state not in ("ready", "updating", "asleep") or not (self.own or self.running):
                healthy = moved = time.monotonic()
                continue
            if self.process is not None and not self.process.running:
                self.lose(f"its process {self.process.status()}", restart=True)
                continue
            try:
                async with asyncio.timeout(min(CHECK_SECONDS, self.settings.hang_seconds)):
                    progress = None
                    if self.running and self.state == "ready":
                        progress = await self.dialect.progress(self.client)
                    # A count of tokens is a sign of life too.
                    if progress is not None or await self.dialect.ready(self.client, self.address.identity):
                        healthy = time.monotonic()
                    if progress is not None and progress != last_progress:
                        last_progress = progress
                        moved = time.monotonic()
            except _faults() as error:
                self.reason = describe(error)
            now = time.monotonic()
            moved = max(moved, self.responded) if self.running else now
            if now - healthy > self.settings.hang_seconds:
                self.lose(
                    f"no good health check for {now - healthy:.1f} s ({self.reason or 'not ready'})", restart=True
                )
            elif now - moved > self.settings.stall_seconds:
                self.lose(f"{self.outstanding} requests, but no token for {now - moved:.0f} s", restart=True)

    def _become(self, state: State) -> None:
        self.state = state
        self.changed()

    # Ending

    async def close(self) -> None:
        """Ends its requests, its process (where it is ours) and its connection."""
        self.state = "gone"
        ids = list(self.running)
        for task in (self._watch, self._recovery, *self.running.values()):
            if task is not None:
                task.cancel()
        if ids and self.process is None:
            with contextlib.suppress(*_faults()):  # if the server is gone, so are its requests
                await asyncio.wait_for(self.dialect.abort(self.client, ids), ABORT_SECONDS)
        await self.stop_process()
        await self.disconnect()
