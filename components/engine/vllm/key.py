"""A vLLM server's key: without it, every path is refused.

vLLM's own key protects only paths that begin with /v1, /v2, /inference and /cohere, so not those of its development
mode (/collective_rpc, /pause, /update_weights, /sleep, …), by which weights are loaded.
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

from creditgraph.components.engine.served.process import KEY_VARIABLE

_Receive = Callable[[], Awaitable[dict[str, Any]]]
_Send = Callable[[dict[str, Any]], Awaitable[None]]


def server_key() -> str:
    """The key in this process's environment; ends the process without one."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise SystemExit(f"creditgraph: expected the server's key in the variable {KEY_VARIABLE}, got none.")
    return key


class KeyMiddleware:
    """ASGI middleware: status 401 for every request, health checks and WebSockets included, without the key.

    Args:
        app: the application that gets the other requests.
    """

    def __init__(self, app: Callable[[dict[str, Any], _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {server_key()}".encode()

    async def __call__(self, scope: dict[str, Any], receive: _Receive, send: _Send) -> None:
        """Passes a request on or refuses it; what is no request (the server's start and end) passes."""
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        sent = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if len(sent) == 1 and hmac.compare_digest(sent[0], self._expected):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        body = b'{"error": "this server requires its key"}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return None
