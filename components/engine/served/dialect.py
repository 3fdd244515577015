"""What differs between kinds of inference server: a `Dialect` starts one kind and speaks to it.

The pool, the processes and the weight channel know servers only through this protocol, so a new kind of server is one
class.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from components.engine.served.rows import Answer, Ask, BadAnswer
from pipeline.core.errors import CreditgraphError

if TYPE_CHECKING:
    import httpx

InFlight = Literal["finish", "abort"]


class ServerError(CreditgraphError):
    """A server that answered with an error, with something that is no answer, or not at all."""


class RefusedError(ServerError):
    """A request that the server understood and refuses (status 4xx): the request is at fault, not the server."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a server process is started.

    Attributes:
        command: argument list; a part "{host}" becomes the address to listen on.
        environment: variables added to this process's own; None removes one. "{scratch}" in a value becomes a folder
            with a short path that is removed with the server.
    """

    command: list[str]
    environment: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreAsk:
    """Log-probs of `tokens` given `context` are wanted at `temperature`; `group` as in `Ask`."""

    row: int
    group: int
    context: list[int]
    tokens: list[int]
    temperature: float


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a server with the right weights answers to a fixed `ask`: `logprobs`, which may still be computed, up to `tolerance` nats."""

    ask: ScoreAsk
    logprobs: Future[tuple[float, ...]]
    tolerance: float

    async def wanted(self) -> tuple[float, ...]:
        """The log-probs, when they are computed."""
        return await asyncio.shield(asyncio.wrap_future(self.logprobs))


@dataclass(frozen=True, kw_only=True)
class Update:
    """Weights that a server shall load.

    Attributes:
        version: number of learner iterations behind them.
        path: folder that holds `files`, readable by the server; "" when they do not travel through files.
        files: paths of safetensors files with Hugging Face names, in order, each a bucket of whole tensors.
        sample: names of the tensors behind `checksum`, in order.
        checksum: see `components.engine.served.channel.sample_checksum`.
        probe: a question whose answer shows whether the weights took effect, or None.
        loaded: another process has had the servers load it; it is only verified here.
        written: done when all files are there, or with the error that kept them from it; they appear one by one. None:
            they are there.
        adapter: the name under which requests ask for the LoRA adapter that `path` holds in PEFT's layout; "" for whole
            weights.
    """

    version: int
    path: str
    files: tuple[str, ...]
    sample: tuple[str, ...]
    checksum: str
    probe: Probe | None = None
    loaded: bool = False
    written: Future[None] | None = None
    adapter: str = ""

    async def complete(self) -> None:
        """Returns when all files are there; raises what kept them from it."""
        if self.written is not None:
            await asyncio.shield(asyncio.wrap_future(self.written))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreAnswer:
    """Log-probs [nats], one per token, and entropies or None where the server gives none; version as in `Answer`."""

    logprobs: list[float]
    entropies: list[float] | None
    version: int | None = None


Take = Callable[[Answer, bool], bool]
"""Takes the next part of an answer and whether it is the last; whether no more is wanted."""


class Dialect(Protocol):
    """One kind of server. Methods take an `httpx.AsyncClient` whose base URL is the server's address.

    Every method may raise `ServerError` (an error status, no JSON, a missing field) or `httpx.HTTPError` (no answer);
    the pool decides what follows. `BadAnswer` is raised by who checks an answer, not here.
    """

    name: str
    """of the kind, in messages and file names"""
    streams: bool
    """whether answers come in parts (`stream`), so that one request may serve a row that its text ends"""

    def launch(self, port: int, identity: str) -> Launch:
        """Command and environment of a server on `port` of "{host}" that later tells `identity` (its served model name)."""
        ...

    async def ready(self, client: httpx.AsyncClient, identity: str) -> bool:
        """Whether the server answers requests. `identity` "" takes any; raises ServerError when another server holds the address."""
        ...

    async def generate(self, client: httpx.AsyncClient, ask: Ask, request_id: str) -> Answer:
        """One completion. Closing the connection ends the request at the server."""
        ...

    async def stream(self, client: httpx.AsyncClient, ask: Ask, request_id: str, take: Take) -> int | None:
        """One completion, handed over as it comes and ended as soon as `take` wants no more; its version as in `Answer`."""
        ...

    async def score(self, client: httpx.AsyncClient, ask: ScoreAsk, request_id: str) -> ScoreAnswer:
        """Teacher-forced log-probs."""
        ...

    async def pause(self, client: httpx.AsyncClient, in_flight: InFlight) -> None:
        """Stops sampling: "finish" returns after running requests have ended, "abort" ends them (answers with reason "abort")."""
        ...

    async def resume(self, client: httpx.AsyncClient) -> None:
        """Samples again after `pause`; harmless without one."""
        ...

    async def update(self, client: httpx.AsyncClient, update: Update) -> None:
        """Loads the weights of a paused server, drops what its caches hold of older ones, and sets its version."""
        ...

    async def loaded(self, client: httpx.AsyncClient, update: Update) -> tuple[int | None, str | None]:
        """Version (None: none was set) and checksum (None: this kind cannot tell) of the weights that the server holds."""
        ...

    async def progress(self, client: httpx.AsyncClient) -> float | None:
        """A number that grows while the server samples (tokens so far), or None where it tells none."""
        ...

    async def abort(self, client: httpx.AsyncClient, request_ids: Sequence[str]) -> None:
        """Ends these requests, if they run."""
        ...


async def call(
    client: httpx.AsyncClient,
    method: str,
    path: str,
    body: Any = None,
    *,
    query: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> Any:
    """One request; the decoded JSON of a 200 answer ({} for an empty one). Raises ServerError for anything else that came back.

    Args:
        client: of the server.
        method, path, query: of the request.
        body: sent as JSON unless None.
        timeout: seconds; None takes the client's.
    """
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    response = await client.request(method, path, json=body, params=query, **options)
    check_status(f"{method} {path}", response)
    if not response.content:
        return {}
    try:
        return response.json()
    except ValueError:
        raise ServerError(f"{method} {path}: an answer that is no JSON: {_short(response.text)}") from None


def check_status(what: str, response: httpx.Response) -> None:
    """Raises RefusedError or ServerError, with its text, for a response (read) whose status is not 200."""
    if response.status_code != 200:
        refused = 400 <= response.status_code < 500 and response.status_code not in (408, 429)
        raise (RefusedError if refused else ServerError)(
            f"{what}: status {response.status_code}: {_short(response.text)}"
        )


def _short(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + " …"


__all__ = [
    "Answer",
    "Ask",
    "BadAnswer",
    "Dialect",
    "InFlight",
    "Launch",
    "Probe",
    "RefusedError",
    "ScoreAnswer",
    "ScoreAsk",
    "ServerError",
    "Take",
    "Update",
    "call",
    "check_status",
]
