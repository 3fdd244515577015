"""Requests of JSON to a server: retried after temporary failures, in batches, and several at a time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from creditgraph.pipeline.core.errors import extra

if TYPE_CHECKING:
    import httpx

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


class Server:
    """Sends {"items": […]} and reads {"results": […]}, of the same number and order.

    Args:
        url: for POST requests.
        settings: of the requests.
    """

    def __init__(self, url: str, settings: ServerSettings) -> None:
        self.url = url
        self.settings = settings
        with extra("train", f"requests to {url}"):
            import httpx

        self._client = httpx.Client(limits=httpx.Limits(max_connections=settings.concurrency))

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def results(self, items: list[Any]) -> list[tuple[Any, str]]:
        """(result, "") of each item, or (None, reason) where its request failed after all tries."""
        size = self.settings.batch
        batches = [items[i : i + size] for i in range(0, len(items), size)]
        with ThreadPoolExecutor(max_workers=self.settings.concurrency) as pool:
            return [result for batch in pool.map(self._request, batches) for result in batch]

    def _request(self, items: list[Any]) -> list[tuple[Any, str]]:
        s = self.settings
        response = post(
            self._client,
            self.url,
            {"items": items},
            headers=s.headers,
            seconds=s.seconds,
            retries=s.retries,
            wait=s.wait,
        )
        if isinstance(response, str):
            return [(None, response)] * len(items)
        try:
            results = response.json()["results"]
        except (ValueError, KeyError, TypeError):
            return [(None, f"{self.url}: the response is not JSON with 'results'")] * len(items)
        if not isinstance(results, list) or len(results) != len(items):
            returned = len(results) if isinstance(results, list) else type(results).__name__
            return [(None, f"{self.url}: {returned} results for {len(items)} items")] * len(items)
        return [(result, "") for result in results]


def post(
    client: httpx.Client,
    url: str,
    body: dict[str, Any],
    *,
    headers: dict[str, str],
    seconds: float,
    retries: int = 3,
    wait: float = 0.5,
) -> httpx.Response | str:
    """The response with status 200 to a POST request of JSON, or the reason why there is none.

    Args:
        client: holds the connections.
        url: of the request.
        body: of the request.
        headers: of the request.
        seconds: limit of one try.
        retries: further tries after a temporary failure (no connection, time-out, HTTP 408, 425, 429, 5xx).
        wait: seconds before the first further try; doubled each time, at most 30.
    """
    import httpx

    reason = ""
    for attempt in range(retries + 1):
        if attempt:
            time.sleep(wait)
            wait = min(2 * wait, _MAX_WAIT)
        try:
            response = client.post(url, json=body, headers=headers, timeout=seconds)
        except httpx.TimeoutException:
            reason = f"no response from {url} in {seconds:g} s"
            continue
        except httpx.HTTPError as error:
            reason = f"{url}: {str(error) or type(error).__name__}"
            continue
        if response.status_code == 200:
            return response
        reason = f"{url}: HTTP {response.status_code} {response.text[:80]}".strip()
        if response.status_code not in _RETRIED:
            break
    return reason
