"""The protocol that hides differences between inference servers: a `Dialect` starts one kind and speaks its HTTP API.

The pool, the processes and the weight channel use servers only through this protocol, so supporting a new kind of
server takes one class.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from components.engine.channel import Update
from components.engine.messages import RowRequest, RowResponse, ScoreRequest, ScoreResponse
from components.engine.served.process import Launch
from pipeline.core.errors import CreditgraphError

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
InFlight = Literal["finish", "abort"]

Take = Callable[[RowResponse, bool], bool]
"""Takes the next part of a response, and whether it is the last; returns True when it needs no more."""


class ServerError(CreditgraphError):
    """A server that returned an error, a malformed response, or nothing."""


class RefusedError(ServerError):
    """A request that the server refuses (status 4xx): the request is wrong, not the server."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model that an engine samples from.

    Attributes:
        path: folder or hub name.
        dtype: torch's name of the dtype of the weights.
        context_length: most tokens in prompt plus response.
        vocab_size: number of logit columns.
        forbidden: ids of columns without a token in the tokenizer, which are never drawn.
        eos: ids that end a response.
        device: "cpu" or "cuda".
        trust_remote_code: passed to the engine.
    """

    path: str
    dtype: str
    context_length: int
    vocab_size: int
    forbidden: Sequence[int] = ()
    eos: Sequence[int] = ()
    device: str = "cpu"
    trust_remote_code: bool = False


class Dialect(Protocol):
    """One kind of server. The `httpx.AsyncClient` that methods receive has the server's address as base URL.

    Every method may raise `ServerError` (an error status, no JSON, a missing field) or `httpx.HTTPError` (no response);
    the pool handles both. `take` may raise `BadResponse`, which is propagated.
    """

    @property
    def sockets(self) -> bool:
        """Whether its servers can listen on Unix sockets."""
        ...

    def launch(self, port: int, identity: str) -> Launch:
        """Command and environment of a server that reports `identity` (its served model name) and refuses requests
        without its key; it listens on `port` of "{host}", or with 0 on the Unix socket "{scratch}/http"."""
        ...

    async def ready(self, client: httpx.AsyncClient, identity: str) -> bool:
        """Whether the server responds. `identity` "" takes any; raises ServerError for another server there."""
        ...

    async def generate(self, client: httpx.AsyncClient, request: RowRequest, request_id: str, take: Take) -> str | None:
        """Samples one row and passes it to `take`; with `request.stream` in parts, until `take` needs no more.

        Closing the connection ends the request at the server.

        Returns:
            The label of the weights that sampled all tokens, or None when the server does not report it.
        """
        ...

    async def score(self, client: httpx.AsyncClient, request: ScoreRequest, request_id: str) -> ScoreResponse:
        """Teacher-forced log-probs."""
        ...

    async def pause(self, client: httpx.AsyncClient, in_flight: InFlight) -> None:
        """Pauses sampling: "finish" returns when running requests have ended, "abort" ends them with that reason."""
        ...

    async def resume(self, client: httpx.AsyncClient) -> None:
        """Resumes sampling after `pause`; does nothing without one."""
        ...

    async def update(self, client: httpx.AsyncClient, update: Update) -> None:
        """Loads the weights into a paused server, drops its caches, and sets the label that responses carry."""
        ...

    async def reported(self, client: httpx.AsyncClient, update: Update) -> tuple[str | None, str | None]:
        """Label (None: none was set) and checksum (None: unknown) of the weights that the server holds."""
        ...

    async def progress(self, client: httpx.AsyncClient) -> float | None:
        """A number that grows while the server samples (tokens so far), or None if it reports none."""
        ...

    async def abort(self, client: httpx.AsyncClient, request_ids: Sequence[str]) -> None:
        """Ends these requests, if they are running."""
        ...

    def close(self) -> None:
        """Releases the resources that this process holds for the servers."""
        ...


def as_arguments(options: Mapping[str, Any], negate: bool = False) -> list[str]:
    """Command-line arguments: "--name" "value"; "--name" for True; for False nothing, or "--no-name" with `negate`."""
    arguments = []
    for option, value in options.items():
        name = option.replace("_", "-")
        if isinstance(value, bool):
            arguments += [f"--{name}"] if value else [f"--no-{name}"] if negate else []
        else:
            arguments += [f"--{name}", str(value)]
    return arguments


async def call(
    client: httpx.AsyncClient, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None
) -> Any:
    """Sends a JSON request; returns the JSON of a 200 response ({} for an empty one), otherwise raises ServerError."""
    response = await client.request(method, path, json=body, params=query)
    check_status(f"{method} {path}", response)
    if not response.content:
        return {}
    try:
        return response.json()
    except ValueError:
        raise ServerError(f"{method} {path}: expected JSON, got: {_short(response.text)}") from None


def check_status(what: str, response: httpx.Response) -> None:
    """Raises RefusedError or ServerError, with its text, for a response (read) whose status is not 200."""
    if response.status_code != 200:
        refused = 400 <= response.status_code < 500 and response.status_code not in (408, 429)
        raise (RefusedError if refused else ServerError)(
            f"{what}: status {response.status_code}: {_short(response.text)}"
        )


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """Converts exceptions from reading a malformed response to a ServerError."""
    try:
        yield
    except CreditgraphError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ServerError(
            f"{what}: a response without the expected fields ({type(error).__name__}: {error})."
        ) from error


async def read_stream(
    client: httpx.AsyncClient,
    path: str,
    body: Mapping[str, Any],
    read: Callable[[str], tuple[RowResponse, bool, str | None]],
    take: Take,
    end: Callable[[], Awaitable[None]],
) -> str | None:
    """Posts a request and passes the parts of its response, which are server-sent events, to `take`.

    A response that is ended early is still read to its last event, because only that shows that it was not cut off.

    Args:
        client, path, body: client, path and JSON body of the request.
        read: an event (JSON text) as a part, whether it is the last, and the label of the weights.
        take: see `Take`.
        end: ends the request at the server.

    Returns:
        The label in the last event.
    """
    more = True  # whether `take` needs more parts
    last = False
    version: str | None = None
    async with aclosing(_events(client, path, body)) as events:
        async for event in events:
            part, last, version = read(event)
            if more and take(part, last):
                more = False
                if not last:
                    await end()
    if not last:
        raise ServerError(f"POST {path}: the response was cut off.")
    return version


async def _events(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> AsyncGenerator[str]:
    async with client.stream("POST", path, json=dict(body)) as response:
        if response.status_code != 200:
            await response.aread()
            check_status(f"POST {path}", response)
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield line.removeprefix("data: ")


async def result_of(future: Future[T]) -> T:
    """Awaits work in a thread; the work continues if this task is cancelled."""
    return await asyncio.shield(asyncio.wrap_future(future))


def _short(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + " …"
