"""Environments on a server."""

from dataclasses import dataclass, field
from typing import Any

from creditgraph.components.environment.base import EnvironmentComponent
from creditgraph.components.http import Client, check_url
from creditgraph.pipeline.core.component import Context

_LONGEST = 3600.0  # seconds of a request


class RemoteEpisode:
    """One episode; see `Remote`."""

    def __init__(self, client: Client, url: str) -> None:
        self._client = client
        self._url = url
        self._id: Any = None
        self.state: Any = None

    def reset(self, problem: dict[str, Any]) -> Any:
        """The first observation."""
        reply = self._post("reset", {"problem": problem})
        self._id = reply.get("id")
        return reply.get("observation")

    def step(self, text: str) -> Any:
        """(observation, reward, done)."""
        reply = self._post("step", {"id": self._id, "text": text})
        return reply.get("observation"), reply.get("reward"), reply.get("done")

    def close(self) -> None:
        """Tells the server that the episode is over."""
        if self._id is not None:
            self._post("close", {"id": self._id})

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        # Longer than any sampler waits; a request that it has given up ends with it.
        reply, reason = self._client.post(f"{self._url}/{path}", body, seconds=_LONGEST)
        if reason:
            raise RuntimeError(reason)
        if not isinstance(reply, dict):
            raise TypeError(f"{self._url}/{path}: the reply is no JSON object")
        self.state = reply.get("state")
        return reply


class Remote(EnvironmentComponent):
    """Environments on a server: POST url/reset, url/step and url/close, with JSON.

    reset: {"problem"} → {"id", "observation"}; step: {"id", "text"} → {"observation", "reward", "done"}; close: {"id"}
    → {}. The first two may add "state". A request that fails is not repeated, as the server may have taken the step: it
    ends its episode by a fault.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The server; the limit of a request is the sampler's `seconds`."""

        url: str = "http://127.0.0.1:8080"
        """what the paths are appended to"""
        headers: dict[str, str] = field(default_factory=dict)
        """sent with every request"""

        def __post_init__(self) -> None:
            check_url(self.url)

    config: Config

    def setup(self, context: Context) -> None:
        """Makes the client; nothing is sent yet."""
        super().setup(context)
        self._client = Client("environment.http", self.config.headers)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def make(self) -> RemoteEpisode:
        """A new episode."""
        return RemoteEpisode(self._client, self.config.url.rstrip("/"))
