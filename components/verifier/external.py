"""A verifier on a server: a reward model, a language model that grades proofs, a cluster of sandboxes."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from components.verifier.base import Item, Outputs, Verdict, VerifierComponent, undecided
from pipeline.core.component import Context
from pipeline.core.metric import Metric

_RETRIED = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses of failures that may pass
_MAX_WAIT = 30.0  # seconds


class External(VerifierComponent):
    """Verifies through requests to a server, in batches and several at a time.

    Request: {"items": [{"response", "extracted", "answer", "metadata"}]}. Response, in the same order: {"results":
    [{"value": number, "correct": bool, "valid": bool, "detail": text}]}; correct defaults to value ≥ 1, valid to true.
    A batch that fails after all retries is invalid (zero credit) with the reason; it is requested again the next time
    its rows are verified.
    """

    metrics = (Metric("failures", "items", "verdicts the server did not return since the run began"),)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The server, its requests and their limits."""

        url: str = "http://127.0.0.1:8080/verify"
        """URL for POST requests"""
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
            if not self.url.startswith(("http://", "https://")):
                raise ValueError(f"url: expected http://… or https://…, got '{self.url}'.")
            if min(self.batch, self.concurrency) < 1 or self.seconds <= 0 or self.retries < 0 or self.wait < 0:
                raise ValueError("expected batch and concurrency ≥ 1, seconds > 0, retries and wait ≥ 0.")

    config: Config
    _client: httpx.Client

    def setup(self, context: Context) -> None:
        """Makes the client; nothing is sent yet."""
        super().setup(context)
        self.failures = 0
        self._client = httpx.Client(limits=httpx.Limits(max_connections=self.config.concurrency))

    def run(self) -> Outputs:
        """Returns the verifier and logs the number of failures so far."""
        self.context.log(failures=self.failures)
        return super().run()

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def verdicts(self, items: list[Item]) -> list[Verdict]:
        """One verdict per item, also if the server fails."""
        size = self.config.batch
        batches = [items[i : i + size] for i in range(0, len(items), size)]
        with ThreadPoolExecutor(max_workers=self.config.concurrency) as pool:
            return [verdict for batch in pool.map(self._request, batches) for verdict in batch]

    def _request(self, items: list[Item]) -> list[Verdict]:
        body = {
            "items": [
                {"response": i.text, "extracted": i.extracted(), "answer": i.answer, "metadata": i.metadata}
                for i in items
            ]
        }
        config = self.config
        response = post(
            self._client,
            config.url,
            body,
            headers=config.headers,
            seconds=config.seconds,
            retries=config.retries,
            wait=config.wait,
        )
        return self._failed(response, len(items)) if isinstance(response, str) else self._read(response, len(items))

    def _read(self, response: httpx.Response, count: int) -> list[Verdict]:
        try:
            results = response.json()["results"]
        except (ValueError, KeyError, TypeError):
            return self._failed(f"{self.config.url}: the response is not JSON with 'results'", count)
        if not isinstance(results, list) or len(results) != count:
            returned = len(results) if isinstance(results, list) else type(results).__name__
            return self._failed(f"{self.config.url}: {returned} results for {count} items", count)
        return [_verdict(result) for result in results]

    def _failed(self, reason: str, count: int) -> list[Verdict]:
        self.failures += count
        return [Verdict(value=0.0, correct=False, valid=False, detail=reason, keep=False)] * count


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


def _verdict(result: Any) -> Verdict:
    value = result.get("value") if isinstance(result, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return undecided(f"the server's result has no number as value: {str(result)[:60]}")
    value = float(value)
    if not math.isfinite(value):
        return undecided(f"the server's value is {value}")
    return Verdict(
        value=value,
        correct=bool(result.get("correct", value >= 1.0)),
        valid=bool(result.get("valid", True)),
        detail=str(result.get("detail") or "")[:500],
    )
