"""The process and the connection of one server: its start, and the wait until it responds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from creditgraph.components.engine.served.addresses import (
    LOOPBACK,
    UNIX,
    Address,
    Waiting,
    check_port,
    free_port,
    relocated,
    wait_for_server,
)
from creditgraph.components.engine.served.connection import LANE_REQUESTS, new_client
from creditgraph.components.engine.served.dialect import Dialect, WrongKeyError, failures
from creditgraph.components.engine.served.process import SOCKET, ServerProcess, last_lines, read_log
from creditgraph.components.engine.served.settings import PoolSettings
from creditgraph.pipeline.core.errors import CreditgraphError, RunError

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("creditgraph")

START_TRIES = 3  # another process may use the port between our check and the server's start
CHECK_SECONDS = 10.0  # for one health check or version query
GATE_SECONDS = 0.1  # between two looks at whether a server may start
LOOK_SECONDS, LISTED_SECONDS = 0.1, 1.0  # between two looks at whether one of ours, or of others, is ready
_PORT_TAKEN = ("address already in use", "errno 98")


@dataclass(eq=False, kw_only=True)
class Launched:
    """A server that this process starts, or only connects to. All methods run on the pool's event loop.

    Attributes:
        index: number of the server, from 0.
        dialect: how to communicate with it.
        settings: settings of the pool.
        logs: folder of log files.
        remove: folders to be removed when the run is gone.
        address: its address; the URL is "" before it was started.
        own: whether this process starts it.
        may_start: whether the devices are free for a server to start.
        client: connection, of this start of the server.
    """

    index: int
    dialect: Dialect
    settings: PoolSettings
    logs: Path
    remove: tuple[Path, ...]
    address: Address
    own: bool
    may_start: Callable[[], bool] = lambda: True
    starts: int = 0
    process: ServerProcess | None = None
    client: httpx.AsyncClient = field(init=False)
    _lanes: dict[int, httpx.AsyncClient] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.client = new_client(self.address)

    @property
    def name(self) -> str:
        """For messages: number and address."""
        return f"{self.address.name} ({self.address.url.removeprefix('http://') or 'not started'})"

    def log_lines(self) -> str:
        """The last lines of its log, for messages."""
        if not self.address.log:
            return ""
        text = read_log(Path(self.address.log)) if self.process is None else self.process.output()
        lines = last_lines(text)
        return f"\n  last lines of {self.address.log}:{lines}" if lines else ""

    async def launch(self) -> None:
        """Starts the process (if it is ours) and waits until it responds; raises RunError, with its last log lines."""
        while self.own and not self.may_start():  # a learner holds the memory of its GPUs
            await asyncio.sleep(GATE_SECONDS)
        waiting = wait_for_server(self.name, self.settings, started=self.own or bool(self.address.listed_in))
        for attempt in range(1, START_TRIES + 1):
            if self.own:
                await self._start_process()
            await self.connect()
            ended = await self._until_ready(waiting)
            if not ended:
                break
            if attempt == START_TRIES:
                raise RunError(f"{self.name}: {ended}. Start the run again.")
            logger.warning("%s: %s; starting it once more.", self.name, ended)

    async def _start_process(self) -> None:
        await self.stop_process()
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

    async def connect(self) -> None:
        """Connects to its address."""
        await self.disconnect()
        self.client = new_client(self.address)

    async def follow(self) -> bool:
        """Connects to where its rendezvous file has it now; False where that is where it was."""
        moved = relocated(self.address)
        if moved is None:
            return False
        logger.warning("%s was started again at %s.", self.name, moved.url)
        self.address = moved
        await self.connect()
        return True

    def lane(self, number: int) -> httpx.AsyncClient:
        """A client for the request of some number, made when it is needed: most processes use few of many servers."""
        lane = number % -(-self.settings.max_in_flight // LANE_REQUESTS)
        if lane not in self._lanes:
            self._lanes[lane] = new_client(self.address)
        return self._lanes[lane]

    async def disconnect(self) -> None:
        """Closes its connections."""
        for client in (self.client, *self._lanes.values()):
            await client.aclose()
        self._lanes.clear()

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
            except failures() as error:
                last = describe(error)
                if await self.follow():
                    continue
                # A server of ours knows the key: then another one has taken its port, and ours is about to end.
                if isinstance(error, WrongKeyError) and self.process is None:
                    step = "Name the file with its key in engine.key_file."
                    raise RunError(f"{self.name}: it refuses this run's key ({error}). {step}") from error
            if waiting.is_over(last):
                raise RunError(
                    f"{self.name}: expected it ready within {waiting.seconds:g} s, got no response ({last}). Raise "
                    f"{waiting.setting} if it was still loading.{self.log_lines()}"
                )
            # Hundreds of leaders may wait for a server of others, and look into the same file each time.
            await asyncio.sleep(LOOK_SECONDS if self.own else LISTED_SECONDS)

    async def stop_process(self) -> None:
        """Ends its process, if it is ours."""
        if self.process is not None:
            process = self.process
            self.process = None
            await asyncio.to_thread(process.stop)


def describe(error: BaseException) -> str:
    """An error in a sentence: its text, with its class if it is not ours."""
    return str(error) if isinstance(error, CreditgraphError) else f"{type(error).__name__}: {error}".rstrip(": ")
