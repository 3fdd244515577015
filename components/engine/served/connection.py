"""Connections to a server, over TCP or over a Unix socket, with the server's key."""

from __future__ import annotations

import hashlib
import logging
import ssl
from functools import cache
from typing import TYPE_CHECKING, Any

from creditgraph.components.engine.served.addresses import UNIX, Address
from creditgraph.components.engine.served.process import KEY_VARIABLE
from creditgraph.pipeline.core.errors import RunError, extra

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("creditgraph")

LANE_REQUESTS = 8  # in one connection pool of httpx, whose work per request grows with its number of connections
CONNECT_SECONDS = 10.0


def new_client(address: Address) -> httpx.AsyncClient:
    """A client that sends the server's key; the host in its base URL differs between servers on Unix sockets too."""
    with extra("train", "a connection to a server"):
        import httpx

    # Servers close idle connections after 5 s by default, counted from when they responded, which may be long before we
    # read it.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=2 * LANE_REQUESTS, keepalive_expiry=1.0)
    options: dict[str, Any] = {"base_url": address.url, "limits": limits}
    if address.url.startswith(UNIX):
        path = address.url.removeprefix(UNIX)
        options["base_url"] = f"http://{hashlib.sha256(path.encode()).hexdigest()[:16]}"
        options["transport"] = httpx.AsyncHTTPTransport(
            uds=path, limits=limits, verify=_certificates(), trust_env=False
        )
    return httpx.AsyncClient(
        **options,
        headers={"Authorization": f"Bearer {address.key}"} if address.key else {},
        # No read timeout: a long response is no fault, and health checks detect servers that hang.
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        trust_env=False,  # no proxy between us and our servers
        verify=_certificates(),
    )


async def check_closed(address: Address, name: str, own: bool) -> None:
    """Warns of a server that serves those without its key too; raises RunError if this process has started it.

    A Unix socket is protected by its folder and is not tried.
    """
    if address.url.startswith(UNIX):
        return
    import httpx

    try:
        async with new_client(Address(url=address.url)) as stranger:
            response = await stranger.get("/v1/models", timeout=CONNECT_SECONDS)
    except httpx.HTTPError:
        return
    if response.status_code != 200:
        return
    reason = f"{name}: it responds without a key, so whoever reaches it can change its weights"
    if own:
        raise RunError(f"{reason}; expected one that refuses. Leave out engine arguments that change its keys.")
    logger.warning("%s. Start it with a key in %s and name the key's file in engine.key_file.", reason, KEY_VARIABLE)


@cache
def _certificates() -> ssl.SSLContext:
    import httpx

    # Shared: making one takes 20 ms, and a server has a client per lane.
    return httpx.create_ssl_context(trust_env=False)
