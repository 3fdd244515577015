"""Environments on an OpenEnv server."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

from creditgraph.components.environment.base import EnvironmentComponent
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import extra
from creditgraph.pipeline.core.handles import Step


class OpenEnvEpisode:
    """One episode, which is one session; see `OpenEnv`."""

    def __init__(self, config: OpenEnv.Config, websockets: Any) -> None:
        self._config = config
        self._websockets = websockets
        self._socket: Any = None
        self.state = ""

    async def reset(self, problem: dict[str, Any]) -> str | Step:
        """Opens the session; the first observation, or a step if the server says that the episode is over."""
        missing = [name for name in self._config.reset.values() if name not in problem]
        if missing:
            raise ValueError(
                f"problem without '{missing[0]}', which environment.reset names; expected a field of the data"
            )
        url = f"ws{self._config.url.rstrip('/').removeprefix('http')}/ws"
        self._socket = await self._websockets.connect(url, max_size=None, additional_headers=self._config.headers)
        step = await self._ask("reset", {name: problem[source] for name, source in self._config.reset.items()})
        return step if step.done else step.observation

    async def step(self, text: str) -> Step:
        """The response as an action."""
        name = self._config.action
        action = json.loads(text) if not name else {name: text}
        if not isinstance(action, dict):
            raise TypeError("the response is no JSON object")
        return await self._ask("step", action)

    async def close(self) -> None:
        """Ends the session, and with it the environment; returns when its place on the server is free."""
        if self._socket is None:
            return
        try:
            with contextlib.suppress(self._websockets.ConnectionClosed):
                await self._socket.send('{"type": "close"}')
                while True:  # the server ends the connection after the session; a step cut off may still reply before
                    await self._socket.recv()
        finally:
            await self._socket.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> Step:
        with contextlib.suppress(self._websockets.ConnectionClosed):  # a server without room has sent why, and closed
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(await self._socket.recv())
        found = reply.get("data", {})
        if reply.get("type") != "observation":
            raise RuntimeError(f"{kind}: the server replied {found.get('code', '')} {found.get('message', reply)}")
        seen = found["observation"]
        self.state = str(seen[self._config.state]) if self._config.state else ""
        name = self._config.observation
        text = seen[name] if name else json.dumps(seen)
        reward = found.get("reward")
        return Step(observation=text, reward=0.0 if reward is None else float(reward), done=bool(found.get("done")))


class OpenEnv(EnvironmentComponent):
    """Environments on an OpenEnv server, a session per episode (extra `openenv`).

    The sessions are those of the server's WebSocket /ws, as its POST /reset and /step make an environment per request.
    The server needs max_concurrent_envs of at least the episodes of a batch. The package openenv is needed there alone.
    A step without a reward gives 0. Not mapped: the server's own state, metadata, tools (MCP) and observations that are
    not texts. A request that fails is not repeated: it ends its episode by a fault.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The server, and what of its action and its observation is the text."""

        url: str = "http://127.0.0.1:8000"
        """what /ws is appended to"""
        action: str = "message"
        """field of the action that takes the response; "" reads the response as the action, a JSON object"""
        observation: str = ""
        """field of the observation that is shown; "" shows all of it as JSON"""
        state: str = ""
        """field of the observation that is the state, equal for equal states; "" for none"""
        reset: dict[str, str] = field(default_factory=lambda: {"seed": "seed"})
        """arguments of reset, each with the field of the problem that it takes; `seed` differs between episodes"""
        headers: dict[str, str] = field(default_factory=dict)
        """sent when a session is opened"""

        def __post_init__(self) -> None:
            if not self.url.startswith(("http://", "https://")):
                raise ValueError(f"url: expected http://… or https://…, got '{self.url}'.")

    config: Config

    @classmethod
    def states_of(cls, config: Any) -> bool:
        """Whether a field of the observation is the state."""
        return bool(config.state)

    def setup(self, context: Context) -> None:
        """Imports the client; nothing is sent yet."""
        super().setup(context)
        with extra("openenv", "environment.openenv"):
            import websockets
        self._websockets = websockets

    def make(self) -> OpenEnvEpisode:
        """A new episode."""
        return OpenEnvEpisode(self.config, self._websockets)
