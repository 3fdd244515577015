"""One server of a pool: its process, its connection, its weights, and its recovery after a fault."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx

from components.engine.channel import Update
from components.engine.probe import compare_logprobs
from components.engine.served.addresses import UNIX, Address, Waiting, check_port, free_port, relocated, wait_for_server
from components.engine.served.connection import LANE_REQUESTS, check_closed, new_client
from components.engine.served.dialect import Dialect, InFlight, ServerError, WrongKeyError, parsing, result_of
from components.engine.served.process import SOCKET, ServerProcess, last_lines, read_log
from components.engine.served.settings import PoolSettings
from pipeline.core.errors import CreditgraphError, RunError

logger = logging.getLogger("creditgraph")

T = TypeVar("T")
Send = Callable[[httpx.AsyncClient, str], Coroutine[Any, Any, T]]
"""Sends a request of the given id over a client."""
State = Literal["starting", "ready", "updating", "lost", "gone"]
START_TRIES = 3  # another process may use the port between our check and the server's start
BREAKER = 3  # consecutive failures after which a server is taken out of the pool
CHECK_SECONDS = 10.0  # for one health check or version query
ABORT_SECONDS = 2.0
LOOPBACK = "127.0.0.1"
RETRY_SECONDS = 10.0  # longest wait between attempts to bring a server back
_PORT_TAKEN = ("address already in use", "errno 98")
_NOT_READY = (httpx.HTTPError, httpx.InvalidURL, ServerError, TimeoutError, OSError)
_FAULTS = (
    *_NOT_READY,
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


@dataclass(eq=False)
class Server:
    """A server and its state in the pool. All methods run on the pool's event loop.

    Attributes:
        index: number of the server, from 0.
        dialect: how to communicate with it.
        settings: settings of the pool.
        logs: folder of log files.
        remove: folders to be removed when the run is gone.
        current: returns the update that the server must hold before it gets requests, or None before the first one.
        changed: called after every change of state.
        address: its address; the URL is "" before it was started.
        own: whether this process starts it.
        difference: largest difference in the last probe [nats].
    """

    index: int
    dialect: Dialect
    settings: PoolSettings
    logs: Path
    remove: tuple[Path, ...]
    current: Callable[[], Update | None]
    changed: Callable[[], None]
    address: Address
    own: bool
    state: State = "starting"
    label: str | None = None
    difference: float = 0.0
    reason: str = ""
    failures: int = 0
    starts: int = 0
    losses: int = 0
    process: ServerProcess | None = None
    client: httpx.AsyncClient = field(init=False)
    running: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    responded: float = 0.0
    lost_at: float = 0.0
    _lanes: list[httpx.AsyncClient] = field(default_factory=list)
    _count: int = 0
    _epoch: int = 0
    _recovery: asyncio.Task[None] | None = None
    _watch: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.client = new_client(self.address)

    @property
    def name(self) -> str:
        """For messages: number and address."""
        return f"{self.address.name} ({self.address.url.removeprefix('http://') or 'not started'})"

    @property
    def outstanding(self) -> int:
        """Number of requests it is working on."""
        return len(self.running)

    def log_lines(self) -> str:
        """The last lines of its log, for messages."""
        if not self.address.log:
            return ""
        text = read_log(Path(self.address.log)) if self.process is None else self.process.output()
        lines = last_lines(text)
        return f"\n  last lines of {self.address.log}:{lines}" if lines else ""

    # Starting

    async def start(self) -> None:
        """Starts the process (if it is ours) and waits until it responds; raises RunError, with its last log lines."""
        waiting = wait_for_server(self.name, self.settings, started=self.own or bool(self.address.listed_in))
        for attempt in range(1, START_TRIES + 1):
            if self.own:
                await self._launch()
            await self._connect()
            ended = await self._until_ready(waiting)
            if not ended:
                break
            if attempt == START_TRIES:
                raise RunError(f"{self.name}: {ended}. Start the run again.")
            logger.warning("%s: %s; starting it once more.", self.name, ended)
        await check_closed(self.address, self.name, self.own)
        self.failures = 0
        self.label = None
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._check_health())

    async def _launch(self) -> None:
        await self._stop_process()
        host = self.settings.host or LOOPBACK
        port = self.settings.port + self.index if self.settings.port else 0
        on_socket = self.dialect.sockets and not self.settings.host and not port
        if not on_socket:
            port = port or free_port(host)
            check_port(port, host, "engine.pool.port")
        self.starts += 1
        identity = f"creditgraph-{self.index}-{time.time_ns() & 0xFFFFFFFFFF:010x}"
        log = self.logs / f"engine-{self.address.name.removeprefix('server ')}.log"
        launch = self.dialect.launch(port, identity)
        if self.address.gpus:
            environment = {**launch.environment, "CUDA_VISIBLE_DEVICES": self.address.gpus}
            launch = replace(launch, environment=environment)
        self.process = ServerProcess(launch, log, self.remove, host, self.address.key)
        self.address = replace(
            self.address,
            url=f"{UNIX}{self.process.scratch}/{SOCKET}" if on_socket else f"http://{host}:{port}",
            identity=identity,
            log=str(log),
            pid=self.process.pid,
        )

    async def _connect(self) -> None:
        await self._disconnect()
        lanes = -(-self.settings.max_in_flight // LANE_REQUESTS)
        self.client, *self._lanes = (new_client(self.address) for _ in range(1 + lanes))

    async def _disconnect(self) -> None:
        for client in (self.client, *self._lanes):
            await client.aclose()

    async def _until_ready(self, waiting: Waiting) -> str:
        """Waits for the server; returns "", or the reason why the process ended if another start may help."""
        last = "not ready"
        while True:
            if self.process is not None and not self.process.running:
                status = self.process.status()
                if any(sign in self.process.output().lower() for sign in _PORT_TAKEN):
                    return "another process took its port before it could listen"
                if "killed by" in status and self.settings.restarts:  # by the kernel for memory, or by a person
                    return f"{status} while it started"
                raise RunError(f"{self.name}: {status} before it was ready.{self.log_lines()}")
            try:
                if await asyncio.wait_for(self.dialect.ready(self.client, self.address.identity), CHECK_SECONDS):
                    return ""
            except _NOT_READY as error:
                last = _describe(error)
                # A server of ours knows the key: then another one has taken its port, and ours is about to end.
                if isinstance(error, WrongKeyError) and self.process is None:
                    step = "Name the file with its key in engine.key_file."
                    raise RunError(f"{self.name}: it refuses this run's key ({error}). {step}") from error
            if waiting.is_over(last):
                raise RunError(
                    f"{self.name}: expected it ready within {waiting.seconds:g} s, got no response ({last}). Raise "
                    f"{waiting.setting} if it was still loading.{self.log_lines()}"
                )
            await asyncio.sleep(0.1)

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
                if not update.loaded:
                    stage = "pausing"
                    await self.dialect.pause(self.client, in_flight)
                    stage = f"loading weights version {update.version}"
                    await self.dialect.update(self.client, update)
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
        except _FAULTS as error:
            raise RunError(f"{self.name}: failed while {stage}: {_describe(error)}{self.log_lines()}") from error
        if self._epoch != epoch or self.state != "updating":
            raise RunError(f"{self.name}: lost while it loaded weights version {update.version}: {self.reason}")
        self.label = update.label()
        self.failures = 0
        self._become("ready")

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
        task = asyncio.create_task(send(self._lanes[self._count % len(self._lanes)], request_id))
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
            self.lose(f"{self.failures} failures in a row, the last one: {_describe(error)}", restart=True)

    # Faults

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
        while self.state == "lost":
            update = self.current()
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
                if self.current() is not update:  # newer weights came meanwhile
                    self._become("lost")
                    restart = False
                    continue
                logger.warning("%s is back in the pool with weights version %d.", self.name, update.version)
                return
            except _FAULTS as error:
                self.reason = _describe(error)
                self._become("lost")
                restart = True
                await asyncio.sleep(wait)
                wait = min(wait * 2, RETRY_SECONDS)

    async def _check_health(self) -> None:
        """Takes the server out if its process ends, its health checks fail, or it makes no progress."""
        healthy = moved = time.monotonic()
        last_progress = -1.0
        interval = min(2.0, self.settings.hang_seconds / 4)
        while self.state != "gone":
            await asyncio.sleep(interval)
            if self.state not in ("ready", "updating"):
                healthy = moved = time.monotonic()
                continue
            if self.process is not None and not self.process.running:
                self.lose(f"its process {self.process.status()}", restart=True)
                continue
            try:
                async with asyncio.timeout(min(CHECK_SECONDS, self.settings.hang_seconds)):
                    if await self.dialect.ready(self.client, self.address.identity):
                        healthy = time.monotonic()
                    if self.running and self.state == "ready":
                        progress = await self.dialect.progress(self.client)
                        if progress is not None and progress != last_progress:
                            last_progress = progress
                            moved = time.monotonic()
            except _FAULTS as error:
                self.reason = _describe(error)
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

    async def _stop_process(self) -> None:
        if self.process is not None:
            process = self.process
            self.process = None
            await asyncio.to_thread(process.stop)

    async def close(self) -> None:
        """Ends its requests, its process (where it is ours) and its connection."""
        self.state = "gone"
        ids = list(self.running)
        for task in (self._watch, self._recovery, *self.running.values()):
            if task is not None:
                task.cancel()
        if ids and self.process is None:
            with contextlib.suppress(*_FAULTS):  # if the server is gone, so are its requests
                await asyncio.wait_for(self.dialect.abort(self.client, ids), ABORT_SECONDS)
        await self._stop_process()
        await self._disconnect()


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, CreditgraphError) else f"{type(error).__name__}: {error}".rstrip(": ")
