"""Environments of the library verifiers."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from creditgraph.components.environment.base import EnvironmentComponent
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import ConfigError, extra
from creditgraph.pipeline.core.handles import Step

if TYPE_CHECKING:
    from aiohttp import web

_HARNESS = "creditgraph_single_call"  # the name by which verifiers finds our harness
_SESSION = "X-Session-ID"  # header of a model call: the id of its trace


class VerifiersEpisode:
    """One episode; see `Verifiers`. A rollout on the owner's event loop, whose model calls wait for `step`."""

    def __init__(self, owner: Verifiers) -> None:
        self._owner = owner
        self._events: asyncio.Queue[str | Step | Exception] = asyncio.Queue()
        self._reply: asyncio.Future[str] | None = None
        self._seen = 0
        self._rollout: asyncio.Task[None] | None = None
        self._trace: Any = None

    async def reset(self, problem: dict[str, Any]) -> str | Step:
        """Starts the rollout; what it says before the first response."""
        event: str | Step = await self._owner.call(self._begin(problem))
        return event

    async def step(self, text: str) -> Step:
        """Answers the model call; the next one, or the end with the reward of the trace."""
        event = await self._owner.call(self._answer(text))
        return event if isinstance(event, Step) else Step(observation=event, reward=0.0, done=False)

    async def close(self) -> None:
        """Cancels a rollout that has not ended."""
        await self._owner.call(self._stop())

    async def called(self, messages: list[dict[str, Any]]) -> str:
        """A model call: what is new in the conversation becomes the observation, and the response is awaited."""
        changed = self._seen and (len(messages) <= self._seen or messages[self._seen - 1]["role"] != "assistant")
        if changed:
            raise TypeError("the environment changed the conversation so far, which is not mapped")
        event = "\n\n".join(_text(message) for message in messages[self._seen :])
        self._seen = len(messages) + 1  # the response follows
        self._reply = asyncio.get_running_loop().create_future()
        self._events.put_nowait(event)
        return await self._reply

    async def _begin(self, problem: dict[str, Any]) -> Any:
        self._rollout = asyncio.create_task(self._play(self._owner.task(problem)))
        return await self._next()

    async def _answer(self, text: str) -> Any:
        assert self._reply is not None
        self._reply.set_result(text)
        return await self._next()

    async def _stop(self) -> None:
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.gather(self._rollout, return_exceptions=True)
        if self._trace is not None:
            self._owner.episodes.pop(self._trace.id, None)

    async def _play(self, task: Any) -> None:
        try:
            episode = await self._owner.played.run_episode(task, self._owner.model, on_trace=self._started)
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            if errors or not episode.ok:
                raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode is not ok")
            self._events.put_nowait(Step(observation="", reward=float(self._trace.reward), done=True))
        except Exception as error:
            self._events.put_nowait(error)

    def _started(self, trace: Any) -> None:
        if trace.agent.name != self._owner.seat:
            return
        if self._trace is not None:
            raise RuntimeError(f"agent '{self._owner.seat}' ran twice in an episode, expected one conversation")
        self._trace = trace
        self._owner.episodes[trace.id] = self

    async def _next(self) -> str | Step:
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    other = [part["type"] for part in parts if part["type"] != "text"]
    if other:
        raise TypeError(f"a message has a part of type {other[0]}, expected texts alone")
    return "".join(part["text"] for part in parts)


class Verifiers(EnvironmentComponent):
    """Environments of the library verifiers (0.4, API v1), single-turn and multi-turn (extra `verifiers`).

    An episode is one `run_episode` of the environment for the task whose number in the taskset is the field `index` of
    the problem. Each model call of the rollout is a turn: the texts of its new messages are the observation, the
    response is the assistant's message; the last turn is rewarded with the reward of the trace (rubric, weights and
    judges included). An error of the episode is a fault. Hooks, stops and limits of verifiers hold as they do there.

    Not mapped: roles (a system prompt is text of the first observation), tools, images, rewards per turn, states,
    group rewards, conversations that verifiers rewrites, and agents other than one: further agents of an environment
    need a model, a client and a harness of their own in `arguments`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The taskset, its environment and which agent the policy is."""

        taskset: str = ""
        """id of an installed taskset, or the name of a module"""
        arguments: dict[str, Any] = field(default_factory=dict)
        """of the environment, such as {taskset: {split: train}}: what verifiers reads below [env]"""
        agent: str = ""
        """name of the agent that the policy is; "" if there is one alone"""
        index: str = "index"
        """field of the problem: number of its task in the taskset, from 0"""

    config: Config

    def setup(self, context: Context) -> None:
        """Loads the taskset and starts what serves the rollouts, on an event loop of its own."""
        super().setup(context)
        if not self.config.taskset:
            raise ConfigError(f"node '{context.node}': no taskset; set {context.node}.taskset to its id or module.")
        with extra("verifiers", "environment.verifiers"):
            import aiohttp  # noqa: F401  # serves the model calls
            import verifiers.v1 as vf
            from verifiers.v1.configs.agent import agent_config_fields
        from creditgraph.components.environment import verifiers_harness

        sys.modules[_HARNESS] = verifiers_harness
        logging.getLogger("verifiers").setLevel(logging.WARNING)  # else two lines per episode
        given = {**self.config.arguments, "taskset": {**self.config.arguments.get("taskset", {})}}
        given["taskset"]["id"] = self.config.taskset
        agents = list(agent_config_fields(vf.resolve_env_config(given)))
        self.seat = self.config.agent or agents[0]
        if self.seat not in agents or (len(agents) > 1 and not self.config.agent):
            raise ConfigError(
                f"node '{context.node}': agent '{self.config.agent}', expected one of {', '.join(agents)}; "
                f"set {context.node}.agent."
            )
        given[self.seat] = {"runtime": {"type": "subprocess"}, **given.get(self.seat, {}), "harness": {"id": _HARNESS}}
        self.played = vf.load_environment(vf.resolve_env_config(given))
        self.episodes: dict[str, VerifiersEpisode] = {}
        self._tasks: list[Any] = []
        self._further = iter(self.played.taskset)
        self._open = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="verifiers").start()
        port = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()
        client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="CREDITGRAPH_NO_KEY")
        self.model = vf.ModelContext(model="policy", client=client)

    def close(self) -> None:
        """Ends what serves the rollouts, and the event loop."""
        if hasattr(self, "_loop"):
            asyncio.run_coroutine_threadsafe(self._open.aclose(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)

    def make(self) -> VerifiersEpisode:
        """A new episode."""
        return VerifiersEpisode(self)

    async def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs on the loop of the rollouts; cancelled there if it is cancelled here."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def task(self, problem: dict[str, Any]) -> Any:
        """The task of a problem; an infinite taskset is read as far as it is needed."""
        name = self.config.index
        index = problem.get(name)
        if not isinstance(index, int) or index < 0:
            raise ValueError(
                f"problem with {name} {index!r}, expected the number of its task; set metadata={{{name}: COLUMN}} "
                "in the data"
            )
        while len(self._tasks) <= index:
            task = next(self._further, None)
            if task is None:
                raise ValueError(f"problem with {name} {index}, but the taskset ends after {len(self._tasks)} tasks")
            self._tasks.append(task)
        return self._tasks[index]

    async def _serve(self) -> int:
        from aiohttp import web

        application = web.Application(client_max_size=1 << 30)
        application.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(application, shutdown_timeout=1)
        await runner.setup()
        self._open.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await self._open.enter_async_context(self.played.serving())
        return int(runner.addresses[0][1])

    async def _complete(self, request: web.Request) -> web.Response:
        from aiohttp import web

        try:
            text = await self.episodes[request.headers[_SESSION]].called((await request.json())["messages"])
        except TypeError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return web.json_response(
            {"id": "0", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        )
