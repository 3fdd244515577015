"""Requests of JSON to a server: retried after temporary failures, in batches, and several at a time."""

import asyncio
import json
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from creditgraph.pipeline.core.errors import extra
from creditgraph.pipeline.run.compose.secrets import public

LARGEST = float(2**127)
"""numbers of a server beyond it are none: rewards are float32"""
_MOST_BYTES = 64 << 20  # of a reply
_RETRIED = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses of failures that may pass
_MAX_WAIT = 30.0  # seconds


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Requests to a server, and their limits."""

    headers: dict[str, str] = field(default_factory=dict)
    """sent with every request"""
    batch: int = 32
    """responses per request"""
    concurrency: int = 8
    """requests at a time"""
    seconds: float = 60.0
    """limit of one request"""
    retries: int = 3
    """further tries after a temporary failure (no connection, time-out, HTTP 408, 425, 429, 5xx)"""
    wait: float = 0.5
    """seconds before the first further try; doubled each time, at most 30"""

    def __post_init__(self) -> None:
        if min(self.batch, self.concurrency) < 1 or self.seconds <= 0 or self.retries < 0 or self.wait < 0:
            raise ValueError("expected batch and concurrency ≥ 1, seconds > 0, retries and wait ≥ 0.")


def check_url(url: str) -> None:
    """Raises ValueError for a URL without http."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url: expected http://… or https://…, got '{url}'.")


class Client:
    """Sends JSON and reads JSON; each request has one deadline, from its connection to the last byte of its reply.

    Replies are asked for uncompressed, and refused when they are compressed or longer than 64 MiB.

    Args:
        what: needs the connections, for the sentence about a missing package.
        headers: sent with every request.
        connections: at a time; None is any number.
    """

    def __init__(self, what: str, headers: Mapping[str, str], connections: int | None = None) -> None:
        with extra("train", what):
            import httpx

        self._httpx = httpx
        # httpx limits single reads; only a task that is cancelled ends a server that sends a byte now and then.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="http")
        self._thread.start()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        limits = httpx.Limits(max_connections=connections)
        sent = {"Accept-Encoding": "identity", **headers}
        self._client = httpx.AsyncClient(headers=sent, limits=limits, timeout=None)

    def close(self) -> None:
        """Closes the connections. A request that another thread waits for has no reply then: `post` says so."""
        if self._thread.is_alive():
            with self._lock:  # what is sent before this is cancelled, and nothing is sent after it
                self._closed.set()
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def post(self, url: str, body: Any, *, seconds: float, retries: int = 0, wait: float = 0.5) -> tuple[Any, str]:
        """(value of the reply, ""), or (None, reason) where there is none.

        Args:
            url: of the request.
            body: of the request; None gets what is there.
            seconds: limit of one try.
            retries: further tries after a temporary failure (no connection, time-out, HTTP 408, 425, 429, 5xx).
            wait: seconds before the first further try; doubled each time, at most 30.
        """
        shown = public(url)  # without the password that it may have
        reason, closed = "", f"{shown}: the connections were closed before its reply"
        for attempt in range(retries + 1):
            if attempt:
                self._closed.wait(wait)
                wait = min(2 * wait, _MAX_WAIT)
            with self._lock:
                if self._closed.is_set():
                    return None, closed
                task = asyncio.run_coroutine_threadsafe(self._once(url, body, seconds), self._loop)
            try:
                status, raw = task.result()
            except CancelledError:
                return None, closed
            except TimeoutError:
                reason = f"no response from {shown} in {seconds:g} s"
                continue
            except self._httpx.HTTPError as error:
                reason = f"{shown}: {str(error) or type(error).__name__}"
                continue
            except ValueError as error:
                return None, f"{shown}: {error}"
            if status == 200:
                try:
                    return json.loads(raw), ""
                except (ValueError, RecursionError):
                    return None, f"{shown}: the response is not JSON that can be read: {raw[:60]!r}"
            reason = f"{shown}: HTTP {status} {raw[:80].decode(errors='replace')}".strip()
            if status not in _RETRIED:
                break
        return None, reason

    async def _end(self) -> None:
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await self._client.aclose()

    async def _once(self, url: str, body: Any, seconds: float) -> tuple[int, bytes]:
        method = "GET" if body is None else "POST"
        async with asyncio.timeout(seconds), self._client.stream(method, url, json=body) as response:
            if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
                raise ValueError(f"the response is compressed ({encoding}), though it was asked for as it is")
            raw = bytearray()
            async for chunk in response.aiter_raw():
                raw += chunk
                if len(raw) > _MOST_BYTES:
                    raise ValueError(f"the response is longer than {_MOST_BYTES >> 20} MiB")
            return response.status_code, bytes(raw)


class Server:
    """Sends {"items": […]} and reads {"results": […]}, of the same number and order.

    Args:
        url: for POST requests.
        settings: of the requests.
    """

    def __init__(self, url: str, settings: ServerSettings) -> None:
        self.url = url
        self.settings = settings
        self._client = Client(f"requests to {public(url)}", settings.headers, settings.concurrency)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def results(self, items: list[Any]) -> list[tuple[Any, str]]:
        """(result, "") of each item, or (None, reason) where its request failed after all tries."""
        size = self.settings.batch
        batches = [items[i : i + size] for i in range(0, len(items), size)]
        with ThreadPoolExecutor(max_workers=self.settings.concurrency) as pool:
            try:
                return [result for batch in pool.map(self._request, batches) for result in batch]
            except KeyboardInterrupt:
                self.close()  # ends the requests that the pool would wait for
                raise

    def _request(self, items: list[Any]) -> list[tuple[Any, str]]:
        s = self.settings
        reply, reason = self._client.post(self.url, {"items": items}, seconds=s.seconds, retries=s.retries, wait=s.wait)
        results = reply.get("results") if isinstance(reply, dict) else None
        if not reason and not isinstance(results, list):
            reason = f"{public(self.url)}: the response is not JSON with 'results'"
        if reason or results is None:
            return [(None, reason)] * len(items)
        if len(results) != len(items):
            return [(None, f"{public(self.url)}: {len(results)} results for {len(items)} items")] * len(items)
        return [(result, "") for result in results]


def number(value: Any) -> float | None:
    """A JSON value as a number that a float32 holds; None for any other value, true and "1" among them."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        return None
    return float(value)
