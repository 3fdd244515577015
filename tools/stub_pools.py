"""Leaders' pools of servers, the product's own, on servers that do nothing: who gets which request, and who asks what.

All are in one process and talk over loopback. A server answers a request after `seconds`, so that all requests of an
iteration are there at once, as those of long responses are.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from creditgraph.components.engine.messages import RowRequest, RowResponse
from creditgraph.components.engine.served.addresses import Address
from creditgraph.components.engine.served.dialect import call
from creditgraph.components.engine.served.pool import ServerPool
from creditgraph.components.engine.served.settings import PoolSettings

HANG = 8.0  # seconds; servers are checked every two seconds


class StubDialect:
    """As much of a `Dialect` as requests and checks of health use."""

    sockets = False

    async def ready(self, client: Any, identity: str) -> bool:
        await call(client, "GET", "/ready")
        return True

    async def progress(self, client: Any) -> float:
        return float((await call(client, "GET", "/progress"))["tokens"])

    async def generate(self, client: Any, request: RowRequest, request_id: str, take: Any) -> None:
        await call(client, "POST", "/row")
        take(RowResponse(tokens=[1], logprobs=[0.0], entropies=None, reason="length"), True)

    def close(self) -> None:
        pass


class StubServers:
    """Counts what comes to each of some servers; a thread of its own serves them all."""

    def __init__(self, count: int, seconds: float) -> None:
        self.seen: list[Counter[str]] = [Counter() for _ in range(count)]
        self.urls: list[str] = []
        self._servers: list[asyncio.Server] = []
        self._seconds = seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    async def _listen(self) -> None:
        for index in range(len(self.seen)):

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, index: int = index) -> None:
                await self._serve(index, reader, writer)

            server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)
            self._servers.append(server)
            self.urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    async def _serve(self, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Closed here: the garbage collector does it in whatever thread it runs, and may then remove a new connection
        # that has got the same number from the poll of this loop, whose request is never read.
        with contextlib.closing(writer):
            while head := await _request(reader):
                path = head.split()[1].decode()
                self.seen[index][path] += 1
                if path == "/row":
                    await asyncio.sleep(self._seconds)
                body = b'{"tokens": %d}' % int(time.monotonic() * 1000)
                denied = b"401 Unauthorized" if b"uthorization:" not in head else b"200 OK"
                writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (denied, len(body), body))

    def close(self) -> None:
        """Ends the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _request(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")  # requests have no body
    except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
        return b""


@dataclass(frozen=True)
class Routed:
    """Of one iteration of all leaders.

    Attributes:
        fullest: requests of the fullest server over the mean.
        checks: requests per second at a server, the mean, that were no rows.
    """

    leaders: int
    servers: int
    fullest: float
    checks: float


def route(leaders: int, servers: int, prompts: int, group: int, seconds: float, folder: Path) -> Routed:
    """Every leader sends `prompts` groups at once; a response takes `seconds`."""
    stubs = StubServers(servers, seconds)
    settings = PoolSettings(connect_seconds=300.0, hang_seconds=HANG, max_in_flight=256)
    pools = [
        ServerPool(
            StubDialect(),  # type: ignore[arg-type]
            settings,
            [Address(url=url, name=f"server {n}", key="k") for n, url in enumerate(stubs.urls)],
            folder,
            replica=leader,
            replicas=leaders,
        )
        for leader in range(leaders)
    ]

    def work(pool: ServerPool) -> None:
        rows = [
            RowRequest(
                row=n,
                group=n // group,
                tokens=[1],
                max_tokens=1,
                seed=n,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                stream=False,
            )
            for n in range(prompts * group)
        ]
        pool.generate(rows, lambda *_: True, lambda _: None)

    with ThreadPoolExecutor(leaders) as threads:
        try:
            list(threads.map(ServerPool.start, pools))
            for server in (server for pool in pools for server in pool.servers):
                server.state = "ready"  # as after an update of weights
            for seen in stubs.seen:
                seen.clear()
            begin = time.monotonic()
            # A request that is never answered ends the measurement.
            list(threads.map(work, pools, timeout=10 * seconds))
            passed = time.monotonic() - begin
            rows = [seen["/row"] for seen in stubs.seen]
            checks = sum(seen.total() for seen in stubs.seen) - sum(rows)
        finally:
            list(map(ServerPool.close, pools))  # which ends what still waits
    stubs.close()
    return Routed(leaders, servers, max(rows) * servers / sum(rows), checks / passed / servers)
