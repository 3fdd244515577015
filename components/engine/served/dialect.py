"""The protocol that hides differences between inference servers: a `Dialect` starts one kind and speaks its HTTP API.

The pool, the processes and the weight channel use servers only through this protocol, so supporting a new kind of
server takes one class.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from creditgraph.components.engine.channel import Update
from creditgraph.components.engine.messages import BadResponse, RowRequest, RowResponse, ScoreRequest, ScoreResponse
from creditgraph.components.engine.served.process import Launch
from creditgraph.pipeline.core.errors import CreditgraphError

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
LARGEST_RESPONSE = 1 << 30  # bytes; the log-probs of whole vocabularies are some hundred MB
InFlight = Literal["finish", "abort"]

Take = Callable[[RowResponse, bool], bool]
"""Takes the next part of a response, and whether it is the last; returns True when it needs no more."""


class ServerError(CreditgraphError):
    """A server that returned an error, a malformed response, or nothing."""


@cache
def failures() -> tuple[type[Exception], ...]:
    """What a request raises that the server refuses, answers wrongly, or does not respond to."""
    import httpx

    return (httpx.HTTPError, httpx.InvalidURL, ServerError, BadResponse, OSError)


class RefusedError(ServerError):
    """A request that the server refuses (status 4xx): the request is wrong, not the server."""


class WrongKeyError(RefusedError):
    """A request that the server refuses for its key (status 401)."""


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
        sleeps: whether the engine gives its memory back while the learner learns.
        trust_remote_code: passed to the engine.
    """

    path: str
    dtype: str
    context_length: int
    vocab_size: int
    forbidden: Sequence[int] = ()
    eos: Sequence[int] = ()
    device: str = "cpu"
    sleeps: bool = False
    trust_remote_code: bool = False


class Dialect(Protocol):
    """One kind of server. The `httpx.AsyncClient` that methods receive has the server's address as base URL.

    Every method may raise `ServerError` (an error status, no JSON, a missing field) or `httpx.HTTPError` (no response);
    the pool handles both. `take` may raise `BadResponse`, which is propagated.
    """

    @property
    def sockets(self) -> bool:
        """Whether its servers can listen on Unix sockets."""

    def launch(self, port: int, identity: str) -> Launch:
        """Command and environment of a server that reports `identity` (its served model name) and refuses requests
        without its key; it listens on `port` of "{host}", or with 0 on the Unix socket "{scratch}/http"."""

    async def ready(self, client: httpx.AsyncClient, identity: str) -> bool:
        """Whether the server responds. `identity` "" takes any; raises ServerError for another server there."""

    async def generate(self, client: httpx.AsyncClient, request: RowRequest, request_id: str, take: Take) -> str | None:
        """Samples one row and passes it to `take`; with `request.stream` in parts, until `take` needs no more.

        Closing the connection ends the request at the server.

        Returns:
            The label of the weights that sampled all tokens, or None when the server does not report it.
        """

    async def score(self, client: httpx.AsyncClient, request: ScoreRequest, request_id: str) -> ScoreResponse:
        """Teacher-forced log-probs."""

    async def pause(self, client: httpx.AsyncClient, in_flight: InFlight) -> None:
        """Pauses sampling: "finish" returns when running requests have ended, "abort" ends them with that reason."""

    async def resume(self, client: httpx.AsyncClient) -> None:
        """Resumes sampling after `pause`; does nothing without one."""

    async def sleep(self, client: httpx.AsyncClient) -> None:
        """Gives the memory of weights and cache back, without requests running; ServerError if it has freed none."""

    async def wake(self, client: httpx.AsyncClient, weights: bool) -> None:
        """Takes memory back after `sleep`: for the weights, which are loaded next, then (False) for all else."""

    async def update(self, client: httpx.AsyncClient, update: Update) -> None:
        """Loads the weights into a paused server, drops caches unless they are kept, sets the label of responses."""

    async def reported(self, client: httpx.AsyncClient, update: Update) -> tuple[str | None, str | None]:
        """Label (None: none was set) and checksum (None: unknown) of the weights that the server holds."""

    async def progress(self, client: httpx.AsyncClient) -> float | None:
        """A number that grows while the server samples (tokens so far), or None if it reports none."""

    async def abort(self, client: httpx.AsyncClient, request_ids: Sequence[str]) -> None:
        """Ends these requests, if they are running."""

    def close(self) -> None:
        """Releases the resources that this process holds for the servers."""


def as_arguments(options: Mapping[str, Any], negate: bool = False) -> list[str]:
    """Command-line arguments: "--name" "value"; "--name" for True; for False nothing, or "--no-name" with `negate`.

    Mappings are JSON.
    """
    arguments = []
    for option, value in options.items():
        name = option.replace("_", "-")
        if isinstance(value, bool):
            arguments += [f"--{name}"] if value else [f"--no-{name}"] if negate else []
        else:
            arguments += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return arguments


async def call(
    client: httpx.AsyncClient, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None
) -> Any:
    """Sends a JSON request; returns the JSON of a 200 response ({} for an empty one), otherwise raises ServerError."""
    what = f"{method} {path}"
    async with client.stream(method, path, json=body, params=query) as response:
        content = b"".join([part async for part in _limited(what, response)])
    if response.status_code != 200:
        raise _status_error(what, response.status_code, content.decode(errors="replace"))
    if not content:
        return {}
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise ServerError(f"{what}: expected JSON, got: {_short(content.decode(errors='replace'))}") from None


def check_status(what: str, response: httpx.Response) -> None:
    """Raises RefusedError or ServerError, with its text, for a response (read) whose status is not 200."""
    if response.status_code != 200:
        raise _status_error(what, response.status_code, response.text)


def _status_error(what: str, status: int, text: str) -> ServerError:
    refused = 400 <= status < 500 and status not in (408, 429)
    kind = WrongKeyError if status == 401 else RefusedError if refused else ServerError
    return kind(f"{what}: status {status}: {_short(text)}")


async def _limited(what: str, response: httpx.Response) -> AsyncIterator[bytes]:
    """The parts of a response's body; raises ServerError for one that would fill the memory."""
    size = 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > LARGEST_RESPONSE:
            raise ServerError(f"{what}: expected at most {LARGEST_RESPONSE} bytes, got more.")
        yield part


def check_id(reported: object, request_id: str) -> None:
    """Raises ServerError for a response to another request."""
    if reported != request_id:
        raise ServerError(f"expected the response to request '{request_id}', got that to '{str(reported)[:80]}'.")


def token_id(value: object) -> int:
    """A token id in a response; TypeError for anything but an integer, which `parsing` converts."""
    if type(value) is not int:
        raise TypeError(f"expected a token id, got {str(value)[:80]!r}")
    return value


def number(value: object) -> float:
    """A number in a response; TypeError for a text or a truth value, which `parsing` converts."""
    if type(value) is not float and type(value) is not int:
        raise TypeError(f"expected a number, got {str(value)[:80]!r}")
    return float(value)


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """Converts exceptions from reading a malformed response to a ServerError."""
    try:
        yield
    except CreditgraphError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
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
            if last:
                raise ServerError(f"POST {path}: expected no event after the last, got: {_short(event)}")
            part, last, version = read(event)
            if more and take(part, last):
                more = False
                if not last:
                    await end()
            elif not more and part.routed_experts is not None:
                take(replace(part, tokens=[], logprobs=[], entropies=None), last)
    if not last:
        raise ServerError(f"POST {path}: the response was cut off.")
    return version


async def _events(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> AsyncGenerator[str]:
    async with client.stream("POST", path, json=dict(body)) as response:
        if response.status_code != 200:
            await response.aread()
            check_status(f"POST {path}", response)
        rest = b""
        async for chunk in _limited(f"POST {path}", response):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield line.removeprefix(b"data: ").decode(errors="replace")


async def result_of(future: Future[T]) -> T:
    """Awaits work in a thread; the work continues if this task is cancelled."""
    return await asyncio.shield(asyncio.wrap_future(future))


def _short(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + " …"
