"""How the requests of one kind are sent to a server, and when a row needs no other one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from creditgraph.components.engine.messages import RowRequest, RowResponse, ScoreRequest, ScoreResponse, check_score
from creditgraph.components.engine.served.dialect import Dialect

if TYPE_CHECKING:
    import httpx

Feed = Callable[[int, RowResponse, bool], bool]
"""(row, the next part of its response, whether it is the last) → whether the row has ended; or raises BadResponse"""
Reset = Callable[[int], None]
"""called with a row of a response that does not count"""


@dataclass(frozen=True, kw_only=True)
class Task:
    """How requests of one kind are sent and checked.

    Attributes:
        send: sends a request; returns the weights version of its response, raises BadResponse for an invalid one.
        done: whether the row needs no further request.
        undo: called with the row of a response that does not count.
    """

    send: Callable[[httpx.AsyncClient, Any, str], Coroutine[Any, Any, str | None]]
    done: Callable[[int], bool]
    undo: Reset = lambda row: None


def sampling(dialect: Dialect, feed: Feed, reset: Reset) -> Task:
    """Requests whose rows end when `feed` returns True."""
    ended: set[int] = set()

    def take(row: int, part: RowResponse, last: bool) -> bool:
        if feed(row, part, last):
            ended.add(row)
        return row in ended

    async def send(client: httpx.AsyncClient, request: RowRequest, request_id: str) -> str | None:
        return await dialect.generate(client, request, request_id, partial(take, request.row))

    def undo(row: int) -> None:
        ended.discard(row)
        reset(row)

    return Task(send=send, done=ended.__contains__, undo=undo)


def scoring(dialect: Dialect, responses: dict[int, ScoreResponse]) -> Task:
    """Requests whose responses come into `responses`, by row."""

    async def send(client: httpx.AsyncClient, request: ScoreRequest, request_id: str) -> str | None:
        response = await dialect.score(client, request, request_id)
        responses[request.row] = check_score(request, response)
        return response.version

    return Task(send=send, done=responses.__contains__)
