"""Tests of environment.verifiers with the library itself; test_verifiers.py runs them in a Python that has it."""

import asyncio
import sys
import textwrap

import pytest

from creditgraph.components.environment.verifiers import Verifiers
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.handles import Step

# One response per episode: two rewards of different weights, the second of which fails for the answer "crash".
SUMS = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply.strip() == task.answer)

    @vf.reward(weight=0.5)
    async def short(self, task, trace) -> float:
        if "crash" in trace.last_reply:
            raise ValueError("cannot score this")
        return float(len(trace.last_reply) < 3)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for value in range(3):
            yield Sum(Data(prompt=f"{value} + 1?", system_prompt="A number.", answer=str(value + 1)), self.config.task)
"""

# A guessing game of several turns that its environment plays as the user.
GUESS = """
import verifiers.v1 as vf

__all__ = ["Guess", "GuessEnv"]


class Data(vf.TaskData):
    number: int


class Number(vf.Task[Data, vf.State, vf.TaskConfig]):
    pass


class Guess(vf.Taskset[Number, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield Number(Data(prompt="Guess.", number=number), self.config.task)
            number += 1


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        turns = 1
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and (guess := int(segment.last_reply)) != task.data.number:
                turns += 1
                segment = await interaction.turn("higher" if guess < task.data.number else "lower")
        interaction.trace.record_reward("found", 1 / turns)
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    components = []

    def make(name, source, **settings):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        component = Verifiers(Verifiers.Config(taskset=name, **settings))
        components.append(component)
        component.setup(Context(node="environment"))
        return component

    yield make
    for component in components:
        component.close()
    for name in ("sums", "guess"):
        sys.modules.pop(name, None)


def test_a_single_turn_is_rewarded_by_the_weighted_sum(made):
    component = made("sums", SUMS)

    async def play(index, text):
        episode = component.make()
        assert await episode.reset({"index": index}) == f"A number.\n\n{index} + 1?"
        step = await episode.step(text)
        await episode.close()
        return step

    async def all_at_once():
        return await asyncio.gather(play(0, "1"), play(2, "3"), play(1, "1"), play(0, "long"))

    # 2 · right + 0.5 · short
    rewards = [2.5, 2.5, 0.5, 0.0]
    assert asyncio.run(all_at_once()) == [Step(observation="", reward=reward, done=True) for reward in rewards]
    assert not component.episodes
    with pytest.raises(RuntimeError, match=r"cannot score this"):
        asyncio.run(play(0, "crash"))


def test_several_turns_with_an_environment_that_is_the_user(made):
    component = made("guess", GUESS)
    assert component.seat == "player"

    async def play():
        first, second, left = component.make(), component.make(), component.make()
        assert [await one.reset({"index": n}) for one, n in ((first, 5), (second, 2), (left, 1))] == ["Guess."] * 3
        assert await first.step("3") == Step(observation="higher", reward=0.0, done=False)
        assert await second.step("2") == Step(observation="", reward=1.0, done=True)
        assert await first.step("8") == Step(observation="lower", reward=0.0, done=False)
        assert await first.step("5") == Step(observation="", reward=pytest.approx(1 / 3), done=True)
        with pytest.raises(RuntimeError, match=r"invalid literal for int"):
            await left.step("seven")
        unfinished = component.make()
        await unfinished.reset({"index": 9})
        for one in (first, second, left, unfinished):
            await one.close()

    asyncio.run(play())
    assert not component.episodes


def test_limits_of_verifiers_end_the_episode(made):
    component = made("guess", GUESS, arguments={"player": {"max_turns": 1}})

    async def play():
        episode = component.make()
        await episode.reset({"index": 5})
        step = await episode.step("3")
        await episode.close()
        return step

    assert asyncio.run(play()).done


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ({}, r"problem with index None, expected the number of its task; set metadata=\{index: COLUMN\} in the data"),
        ({"index": 3}, r"problem with index 3, but the taskset ends after 3 tasks"),
    ],
)
def test_a_problem_names_its_task(made, problem, message):
    component = made("sums", SUMS)
    with pytest.raises(ValueError, match=message):
        asyncio.run(component.make().reset(problem))


def test_an_agent_that_is_not_there(made):
    with pytest.raises(
        ConfigError, match=r"node 'environment': agent 'judge', expected one of player; set environment"
    ):
        made("guess", GUESS, agent="judge")
