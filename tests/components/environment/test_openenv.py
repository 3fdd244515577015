"""Environments on a real OpenEnv server, made with the server classes of the package openenv."""

import asyncio
import importlib.util
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from creditgraph.components.environment.openenv import OpenEnv
from creditgraph.components.rollouts.episodes import read_step
from creditgraph.components.rollouts.timed_calls import Fault, TimedCalls
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.handles import Step

ROOT = Path(__file__).resolve().parents[3]
OWN = ROOT / ".venv-openenv/bin/python"
PYTHON = sys.executable if importlib.util.find_spec("openenv") else str(OWN)
pytestmark = [
    pytest.mark.skipif(
        not Path(PYTHON).exists(),
        reason="openenv's environment is missing; make it with tools/other_environment openenv",
    ),
    pytest.mark.skipif(importlib.util.find_spec("websockets") is None, reason="pip install 'creditgraph[openenv]'"),
    pytest.mark.xdist_group("openenv"),
]

SERVER = """
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Said(Action):
    message: str


class Seen(Observation):
    text: str = ""
    turn: int = 0


class Countdown(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, turns: int = 3, **kwargs: Any):
        self.left = turns
        return Seen(text=f"{turns} turns, seed {seed}", turn=turns, done=turns == 0)

    def step(self, action, timeout_s=None, **kwargs: Any):
        if action.message == "raise":
            raise ValueError("no such word")
        self.left -= 1
        last = self.left == 0
        return Seen(text=action.message[::-1], turn=self.left, done=last, reward=0.5 if last else None)

    @property
    def state(self):
        return State(step_count=0)


uvicorn.run(create_fastapi_app(Countdown, Said, Seen, max_concurrent_envs=2), port=int(sys.argv[1]), log_level="error")
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("openenv")
    (folder / "server.py").write_text(SERVER)
    with open(folder / "log", "w") as log:
        server = subprocess.Popen([PYTHON, "server.py", str(port)], cwd=folder, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    while True:
        assert server.poll() is None, (folder / "log").read_text()
        try:
            httpx.get(f"{address}/health", trust_env=False).raise_for_status()
            break
        except httpx.HTTPError:
            time.sleep(0.2)
    yield address
    server.terminate()
    server.wait()


def made(**settings):
    component = OpenEnv(OpenEnv.Config(**settings))
    component.setup(Context(node="environment"))
    return component


def test_two_episodes_side_by_side(url):
    component = made(url=url, observation="text", state="turn", reset={"seed": "seed", "turns": "length"})

    async def play():
        first, second = component.make(), component.make()
        assert await first.reset({"seed": 7, "length": 2}) == "2 turns, seed 7"
        assert await second.reset({"seed": 8, "length": 3}) == "3 turns, seed 8"
        assert await first.step("abc") == Step(observation="cba", reward=0.0, done=False)
        assert (first.state, second.state) == ("1", "3")
        assert await second.step("x") == Step(observation="x", reward=0.0, done=False)
        assert await first.step("de") == Step(observation="ed", reward=0.5, done=True)
        await first.close()
        with pytest.raises(RuntimeError, match=r"step: the server replied EXECUTION_ERROR no such word"):
            await second.step("raise")
        await second.close()
        # Closed sessions have left their places on the server, which has two.
        again = [component.make(), component.make()]
        for one in again:
            await one.reset({"seed": 0, "length": 1})
        with pytest.raises(RuntimeError, match=r"CAPACITY_REACHED"):
            await component.make().reset({"seed": 0, "length": 1})
        for one in again:
            await one.close()

    asyncio.run(play())


def test_observations_and_actions_as_json(url):
    async def play():
        episode = made(url=url, action="").make()
        assert json.loads(await episode.reset({"seed": 3})) == {"text": "3 turns, seed 3", "turn": 3, "metadata": {}}
        assert json.loads((await episode.step('{"message": "ab"}')).observation)["text"] == "ba"
        with pytest.raises(TypeError, match=r"the response is no JSON object"):
            await episode.step("[1]")
        with pytest.raises(RuntimeError, match=r"VALIDATION_ERROR"):
            await episode.step('{"massage": "ab"}')
        await episode.close()

    asyncio.run(play())


def test_faults_cost_their_episode_alone(url):
    calls = TimedCalls(seconds=10, at_once=4)
    component = made(url=url, reset={"turns": "length"})
    over, missing, nobody = component.make(), component.make(), made(url="http://127.0.0.1:9").make()
    replies = calls.run([lambda: over.reset({"length": 0}), lambda: missing.reset({}), lambda: nobody.reset({})])
    assert read_step(replies[0]).done  # which the sampler takes as the fault "reset"
    assert isinstance(replies[1], Fault)
    assert "problem without 'length', which environment.reset names" in str(replies[1])
    assert str(replies[2]).startswith("raised: ")
    calls.run([over.close, missing.close, nobody.close])
    calls.close()


def test_the_address_is_checked():
    with pytest.raises(ValueError, match=r"url: expected http://… or https://…, got 'localhost:8000'"):
        OpenEnv.Config(url="localhost:8000")
