"""One server of a pool: its process, its connection, whether it may be asked, and how it comes back after a fault."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from components.engine.served.dialect import Dialect, InFlight, Probe, ServerError, Update
from components.engine.served.server import Address, ServerProcess, free_port, last_lines, relocated
from pipeline.core.errors import CreditgraphError, RunError

logger = logging.getLogger("creditgraph")

State = Literal["starting", "ready", "updating", "lost", "gone"]
START_TRIES = 3  # for a port that somebody takes between our look and the server's
LANE_REQUESTS = 8  # at one connection pool of httpx, whose work per request grows with its number of connections
BREAKER = 3  # failures in a row that take a server out
CHECK_SECONDS = 10.0  # for one health check or version query
_PORT_TAKEN = ("address already in use", "errno 98")


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """How a pool treats its servers."""

    host: str = "127.0.0.1"
    """address that servers listen on; whoever reaches it can change their weights, so name one of a closed network
    only"""
    port: int = 0
    """port of the first server, the others follow; 0 takes free ones"""
    start_seconds: float = 600.0
    """until a server that is started must answer"""
    update_seconds: float = 300.0
    """until a server must have loaded new weights"""
    hang_seconds: float = 60.0
    """a server without a good health check for so long is lost; what it was asked is asked elsewhere"""
    stall_seconds: float = 600.0
    """a server that is asked but neither samples nor answers for so long is lost"""
    max_in_flight: int = 256
    """requests at one server at a time; further ones wait here"""
    retries: int = 4
    """wrong or missing answers to one request before the run stops"""
    restarts: int = 3
    """how often a server that we started is started again in a run"""
    in_flight: Literal["finish", "abort"] = "finish"
    """requests that run when weights change: finish on the old weights, or abort and ask again under the new ones"""

    def __post_init__(self) -> None:
        for name in ("start_seconds", "update_seconds", "hang_seconds", "stall_seconds", "max_in_flight"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; wanted more than 0.")
        for name in ("port", "retries", "restarts"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; wanted 0 or more.")


class Interrupted(Exception):
    """The server was taken out while it was asked; ask elsewhere."""


@dataclass(eq=False)
class Member:
    """A server and all that the pool knows of it. Everything here runs on the pool's event loop.

    Attributes:
        index: number of the server, from 0.
        dialect: how to speak to it.
        settings: of the pool.
        logs: folder of log files.
        remove: folders to be removed when the run is gone.
        wanted: gives the update that the server must hold before it may be asked, or None before the first one.
        changed: called after every change of state.
        address: where it is; the URL is "" before it was started.
    """

    index: int
    dialect: Dialect
    settings: PoolSettings
    logs: Path
    remove: tuple[Path, ...]
    wanted: Callable[[], Update | None]
    changed: Callable[[], None]
    address: Address
    own: bool
    state: State = "starting"
    version: int | None = None
    reason: str = ""
    failures: int = 0
    starts: int = 0
    losses: int = 0
    process: ServerProcess | None = None
    client: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(trust_env=False))
    running: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    answered: float = 0.0
    lost_at: float = 0.0
    _lanes: list[httpx.AsyncClient] = field(default_factory=list)
    _count: int = 0
    _epoch: int = 0
    _recovery: asyncio.Task[None] | None = None
    _watch: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """For messages: number and address."""
        return f"{self.address.name or f'server {self.index}'} ({self.address.url.removeprefix('http://') or 'not started'})"

    @property
    def outstanding(self) -> int:
        """Requests it is working on."""
        return len(self.running)

    def log_lines(self) -> str:
        """The last lines of its log, for messages."""
        if self.process is not None:
            text, place = self.process.output(), str(self.process.log)
        elif self.address.log:
            try:
                text, place = Path(self.address.log).read_text(errors="replace")[-65536:], self.address.log
            except OSError:
                return ""
        else:
            return ""
        lines = last_lines(text)
        return f"\n  last lines of {place}:{lines}" if lines else ""

    # Starting

    async def start(self) -> None:
        """Starts the process (where it is ours) and waits until it answers; raises RunError, with its last log lines, when it does not."""
        deadline = time.monotonic() + self.settings.start_seconds
        for attempt in range(1, START_TRIES + 1):
            if self.own:
                await self._launch(attempt)
            await self._connect()
            try:
                await self._until_ready(deadline)
                break
            except _PortTaken:
                if self.settings.port or attempt == START_TRIES:
                    raise RunError(
                        f"{self.name}: its port was taken by another process before it could listen"
                        f"{'' if self.settings.port else f', {START_TRIES} times'}; wanted a free one. Start the run "
                        "again."
                    ) from None
        self.failures, self.version = 0, None
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watching())

    async def _launch(self, attempt: int) -> None:
        await self._stop_process()
        port = self.settings.port + self.index if self.settings.port else free_port(self.settings.host)
        self.starts += 1
        identity = f"creditgraph-{self.index}-{time.time_ns() & 0xFFFFFFFFFF:010x}"
        name = self.address.name or f"server {self.index}"
        log = self.logs / f"engine-{name.removeprefix('server ')}.log"
        launch = self.dialect.launch(port, identity)
        if self.address.gpus:
            launch = dataclasses.replace(
                launch, environment={**launch.environment, "CUDA_VISIBLE_DEVICES": self.address.gpus}
            )
        self.process = ServerProcess(launch, log, self.remove, self.settings.host)
        self.address = dataclasses.replace(
            self.address,
            url=f"http://{self.settings.host}:{port}",
            identity=identity,
            name=name,
            log=str(log),
            pid=self.process.pid,
        )

    async def _connect(self) -> None:
        await self._disconnect()
        lanes = -(-self.settings.max_in_flight // LANE_REQUESTS)
        self.client, *self._lanes = (
            httpx.AsyncClient(
                base_url=self.address.url,
                timeout=httpx.Timeout(
                    None, connect=CHECK_SECONDS
                ),  # a long answer is no fault: health checks find servers that hang
                # Servers close idle connections after 5 s by default, counted from when they answered, which may be
                # long before we read it.
                limits=httpx.Limits(
                    max_connections=None, max_keepalive_connections=2 * LANE_REQUESTS, keepalive_expiry=1.0
                ),
                trust_env=False,  # no proxy between us and our servers
            )
            for _ in range(1 + lanes)
        )

    async def _disconnect(self) -> None:
        for client in (self.client, *self._lanes):
            await client.aclose()

    async def _until_ready(self, deadline: float) -> None:
        said = ""
        while True:
            if self.process is not None and not self.process.running:
                if any(sign in self.process.output().lower() for sign in _PORT_TAKEN):
                    raise _PortTaken
                raise RunError(f"{self.name}: {self.process.ended()} before it answered.{self.log_lines()}")
            try:
                if await asyncio.wait_for(self.dialect.ready(self.client, self.address.identity), CHECK_SECONDS):
                    return
            except _NOT_YET as error:
                said = _told(error)
            if time.monotonic() >= deadline:
                raise RunError(
                    f"{self.name}: no answer within {self.settings.start_seconds:g} s ({said or 'not ready'}); wanted "
                    "it ready. "
                    f"Raise engine.pool.start_seconds if it was still loading.{self.log_lines()}"
                )
            await asyncio.sleep(0.1)

    # Weights

    async def load(self, update: Update, in_flight: InFlight) -> None:
        """Brings the server to `update` and makes it ready; raises RunError naming it when it does not get there in time."""
        self._become("updating")
        stage, epoch, begin = "finishing its requests", self._epoch, time.monotonic()
        try:
            async with asyncio.timeout(self.settings.update_seconds):
                if in_flight == "finish":
                    while self.running:
                        await asyncio.wait(self.running.values())
                if not update.loaded:
                    stage = "pausing"
                    await self.dialect.pause(self.client, in_flight)
                    stage = f"loading weights version {update.version}"
                    await self.dialect.update(self.client, update)
                stage = "telling its version"
                await self._verify(update)
                if not update.loaded:
                    stage = "resuming"
                    await self.dialect.resume(self.client)
                stage = "answering a probe"
                if update.probe is not None:
                    await self._check(update.version, update.probe)
        except TimeoutError:
            raise RunError(
                f"{self.name}: stuck {stage} for {time.monotonic() - begin:.1f} s; wanted it done within "
                f"{self.settings.update_seconds:g} s (engine.pool.update_seconds).{self.log_lines()}"
            ) from None
        except _FAULTS as error:
            raise RunError(f"{self.name}: failed {stage}: {_told(error)}{self.log_lines()}") from error
        if self._epoch != epoch or self.state != "updating":
            raise RunError(f"{self.name}: lost while it loaded weights version {update.version}: {self.reason}")
        self.version, self.failures = update.version, 0
        self._become("ready")

    async def _verify(self, update: Update) -> None:
        version, checksum = await self.dialect.loaded(self.client, update)
        if version != update.version:
            raise ServerError(f"it tells weights version {version}; wanted {update.version}.")
        if checksum is not None and checksum != update.checksum:
            raise ServerError(
                f"its weights of version {version} have checksum {checksum}; wanted {update.checksum}: they were "
                "changed on their way."
            )

    async def _check(self, version: int, probe: Probe) -> None:
        answer = await self.dialect.score(self.client, probe.ask, f"probe-{time.monotonic_ns()}")
        wanted = await probe.wanted()
        if len(answer.logprobs) != len(wanted):
            raise ServerError(f"{len(answer.logprobs)} log-probs for {len(wanted)} tokens of the probe.")
        # Weights that give no numbers are told by the first generation.
        worst = max((abs(a - b) for a, b in zip(answer.logprobs, wanted, strict=True) if math.isfinite(b)), default=0.0)
        if not worst <= probe.tolerance:
            raise ServerError(
                f"its log-probs of a fixed sequence differ by up to {worst:.3g} nats from those of weights version "
                f"{version}; "
                f"wanted at most {probe.tolerance:g}: it does not sample with the weights it tells."
            )

    # Requests

    async def ask(self, request: Callable[[httpx.AsyncClient, str], Coroutine[Any, Any, Any]]) -> Any:
        """One request; raises Interrupted when the server is taken out meanwhile."""
        self._count += 1
        request_id = f"{self.address.identity or 'creditgraph'}-{self._count}-{time.monotonic_ns()}"
        task = asyncio.create_task(request(self._lanes[self._count % len(self._lanes)], request_id))
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
        self.answered = time.monotonic()
        try:
            return task.result()
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerError(f"an answer without the wanted fields ({type(error).__name__}: {error})") from error

    def failed(self, error: Exception) -> None:
        """Counts a wrong or missing answer; too many in a row take the server out."""
        self.failures += 1
        if self.failures >= BREAKER and self.state == "ready":
            self.lose(f"{self.failures} failures in a row, the last one: {_told(error)}", restart=True)

    # Faults

    def lose(self, reason: str, restart: bool) -> None:
        """Takes the server out, has its requests asked elsewhere, and starts bringing it back."""
        if self.state in ("lost", "gone"):
            return
        self.reason, self.version, self.lost_at = reason, None, time.monotonic()
        self._epoch += 1
        self.losses += 1
        logger.warning("%s is out of the pool: %s%s", self.name, reason, self.log_lines())
        self._become("lost")
        for task in list(self.running.values()):
            task.cancel()
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._recover(restart))

    async def _recover(self, restart: bool) -> None:
        """Until it holds the wanted weights again: loads them, or starts the process anew; gives up after `restarts` starts."""
        wait = 0.1
        while self.state == "lost":
            update = self.wanted()
            try:
                if self.own and (restart or self.process is None or not self.process.running):
                    if self.starts > self.settings.restarts:
                        await self._stop_process()
                        self._become("gone")
                        return
                    await self.start()
                else:
                    if moved := relocated(self.address):
                        logger.warning("%s was started again at %s.", self.name, moved.url)
                        self.address = moved
                        await self._connect()
                    await asyncio.wait_for(self.dialect.ready(self.client, self.address.identity), CHECK_SECONDS)
                if update is None:
                    self._become("ready")
                    return
                await self.load(update, "abort")
                if self.wanted() is not update:  # newer weights came meanwhile
                    self._become("lost")
                    restart = False
                    continue
                logger.warning("%s is back in the pool with weights version %d.", self.name, update.version)
                return
            except (*_NOT_YET, *_FAULTS) as error:
                self.reason = _told(error)
                self._become("lost")
                restart = True
                await asyncio.sleep(wait)
                wait = min(wait * 2, 10.0)

    async def _watching(self) -> None:
        """Takes the server out when its process ends, when it answers no health checks, or when it makes no progress."""
        good, moved, told = time.monotonic(), time.monotonic(), -1.0
        every = min(2.0, self.settings.hang_seconds / 4)
        while self.state != "gone":
            await asyncio.sleep(every)
            if self.state not in ("ready", "updating"):
                good = moved = time.monotonic()
                continue
            if self.process is not None and not self.process.running:
                self.lose(f"its process {self.process.ended()}", restart=True)
                continue
            try:
                async with asyncio.timeout(min(CHECK_SECONDS, self.settings.hang_seconds)):
                    if await self.dialect.ready(self.client, self.address.identity):
                        good = time.monotonic()
                    if self.running and self.state == "ready":
                        progress = await self.dialect.progress(self.client)
                        if progress is not None and progress != told:
                            told, moved = progress, time.monotonic()
            except (*_NOT_YET, *_FAULTS) as error:
                self.reason = _told(error)
            now = time.monotonic()
            moved = max(moved, self.answered) if self.running else now
            if now - good > self.settings.hang_seconds:
                self.lose(f"no good health check for {now - good:.1f} s ({self.reason or 'not ready'})", restart=True)
            elif now - moved > self.settings.stall_seconds:
                self.lose(f"{self.outstanding} requests, but no token for {now - moved:.0f} s", restart=True)

    def _become(self, state: State) -> None:
        self.state = state
        self.changed()

    # Ending

    async def _stop_process(self) -> None:
        if self.process is not None:
            process, self.process = self.process, None
            await asyncio.to_thread(process.stop)

    async def close(self) -> None:
        """Ends its requests, its process (where it is ours) and its connection."""
        self.state = "gone"
        for task in (self._watch, self._recovery):
            if task is not None:
                task.cancel()
        ids = list(self.running)
        for task in list(self.running.values()):
            task.cancel()
        if ids and self.process is None:
            await self.abort(ids)
        await self._stop_process()
        await self._disconnect()

    async def abort(self, request_ids: list[str]) -> None:
        """Ends requests at the server, as far as it listens."""
        try:
            async with asyncio.timeout(2.0):
                await self.dialect.abort(self.client, request_ids)
        except (*_NOT_YET, *_FAULTS):
            pass


class _PortTaken(Exception):
    """Another process listens where the server wanted to."""


def _told(error: BaseException) -> str:
    text = str(error).strip() or ("no answer in time" if isinstance(error, TimeoutError) else "")
    return (
        f"{type(error).__name__}: {text}"
        if text and not isinstance(error, CreditgraphError)
        else text or type(error).__name__
    )


_NOT_YET = (httpx.HTTPError, httpx.InvalidURL, ServerError, TimeoutError, OSError)
_FAULTS = (httpx.HTTPError, CreditgraphError, TimeoutError, OSError, RuntimeError, KeyError, TypeError, ValueError)
