"""A verifier behind HTTP: a reward model, a judge of proofs, a cluster of sandboxes."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from components.verifier.base import Item, MemoVerifier, Verdict, unjudged
from pipeline.core.component import Component
from pipeline.core.metric import Metric
from pipeline.core.payloads import Verifier

_AGAIN = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The verifier."""

    verifier: Verifier


@dataclass(frozen=True, kw_only=True)
class ExternalSettings:
    """Where to ask, and how patiently."""

    url: str = ""
    """address that takes POST requests"""
    headers: dict[str, str] = field(default_factory=dict)
    """sent with every request"""
    batch: int = 32
    """responses per request"""
    concurrency: int = 8
    """requests at a time"""
    seconds: float = 60.0
    """limit of one request"""
    retries: int = 3
    """further tries after a failure that may pass (no connection, time-out, HTTP 408, 425, 429, 5xx)"""
    wait: float = 0.5
    """seconds before the first further try; doubled each time, at most 30"""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: found '{self.url}'; wanted http://… or https://….")
        if min(self.batch, self.concurrency) < 1 or self.seconds <= 0 or self.retries < 0 or self.wait < 0:
            raise ValueError("batch and concurrency must be 1 or more, seconds above 0, retries and wait 0 or more.")


class ExternalVerifier(MemoVerifier):
    """Sends batches and reads verdicts; a batch that fails for good is unjudged with the reason, and asked again when it comes again."""

    def __init__(self, settings: ExternalSettings, client: httpx.Client) -> None:
        super().__init__()
        self._settings, self._client = settings, client
        self.failures = 0

    def verdicts(self, items: list[Item]) -> list[Verdict]:
        """One verdict per item, whatever the server does."""
        size = self._settings.batch
        batches = [items[i : i + size] for i in range(0, len(items), size)]
        with ThreadPoolExecutor(max_workers=self._settings.concurrency) as pool:
            return [verdict for batch in pool.map(self._ask, batches) for verdict in batch]

    def _ask(self, items: list[Item]) -> list[Verdict]:
        body = {
            "items": [
                {"response": i.text, "extracted": i.extracted(), "answer": i.answer, "metadata": i.metadata}
                for i in items
            ]
        }
        wait, reason = self._settings.wait, ""
        for attempt in range(self._settings.retries + 1):
            if attempt:
                time.sleep(wait)
                wait = min(2 * wait, 30.0)
            try:
                reply = self._client.post(
                    self._settings.url, json=body, headers=self._settings.headers, timeout=self._settings.seconds
                )
            except httpx.TimeoutException:
                reason = f"no answer from {self._settings.url} in {self._settings.seconds:g} s"
                continue
            except httpx.HTTPError as error:
                reason = f"{self._settings.url}: {str(error) or type(error).__name__}"
                continue
            if reply.status_code == 200:
                return self._read(reply, len(items))
            reason = f"{self._settings.url}: HTTP {reply.status_code} {reply.text[:80]}".strip()
            if reply.status_code not in _AGAIN:
                break
        return self._failed(reason, len(items))

    def _read(self, reply: httpx.Response, count: int) -> list[Verdict]:
        try:
            results = reply.json()["results"]
        except (ValueError, KeyError, TypeError):
            return self._failed(f"{self._settings.url}: the reply is not JSON with 'results'", count)
        if not isinstance(results, list) or len(results) != count:
            found = len(results) if isinstance(results, list) else type(results).__name__
            return self._failed(f"{self._settings.url}: {found} results for {count} items", count)
        return [_verdict(result) for result in results]

    def _failed(self, reason: str, count: int) -> list[Verdict]:
        self.failures += count
        return [Verdict(value=0.0, correct=False, valid=False, detail=reason, keep=False)] * count


def _verdict(result: Any) -> Verdict:
    if (
        not isinstance(result, dict)
        or isinstance(result.get("value"), bool)
        or not isinstance(result.get("value"), int | float)
    ):
        return unjudged(f"the verifier's result has no number as value: {str(result)[:60]}")
    value = float(result["value"])
    if not math.isfinite(value):
        return unjudged(f"the verifier's value is {value}")
    correct = result.get("correct", value >= 1.0)
    return Verdict(
        value=value,
        correct=bool(correct),
        valid=bool(result.get("valid", True)),
        detail=str(result.get("detail") or "")[:500],
    )


class External(Component):
    """Verifies by asking a server, in batches and several at a time.

    Request: {"items": [{"response", "extracted", "answer", "metadata"}]}. Reply, in the same order: {"results":
    [{"value": number, "correct": bool, "valid": bool, "detail": text}]}; correct defaults to value ≥ 1, valid to true.
    What cannot be judged after all tries is invalid (zero credit) with the reason, and is asked again the next time it
    comes.
    """

    metrics = (Metric("failures", "items", "verdicts the server did not give since the run began"),)

    @dataclass(frozen=True, kw_only=True)
    class Config(ExternalSettings):
        """Where to ask, and how patiently."""

        url: str = "http://127.0.0.1:8080/verify"
        """address that takes POST requests"""

    config: Config
    _judge: ExternalVerifier | None = None
    _client: httpx.Client | None = None

    def run(self) -> Outputs:
        """Returns the verifier, the same one every iteration."""
        if self._judge is None:
            self._client = httpx.Client(limits=httpx.Limits(max_connections=self.config.concurrency))
            self._judge = ExternalVerifier(self.config, self._client)
        self.context.log(failures=self._judge.failures)
        return Outputs(verifier=self._judge)

    def close(self) -> None:
        """Closes the connections."""
        if self._client is not None:
            self._client.close()
