"""Stop or continue: an environment whose values are known exactly, for tests of turn-level credit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from creditgraph.components.environment.base import EnvironmentComponent
from creditgraph.pipeline.core.handles import Step


class StopEpisode:
    """One episode; see `Stop`."""

    def __init__(self, config: Stop.Config) -> None:
        self._config = config
        self._turn = 0

    @property
    def state(self) -> str:
        """The number of the turn."""
        return str(self._turn)

    def reset(self, problem: dict[str, Any]) -> str:
        """The first offer; the same for every problem."""
        return self._offer()

    def step(self, text: str) -> Step:
        """Stops if the response has a word for it, and goes on to the next offer otherwise."""
        config = self._config
        if set(text.split()) & set(config.stop):
            return Step(observation="", reward=config.rewards[self._turn], done=True)
        self._turn += 1
        if self._turn == len(config.rewards):
            return Step(observation="", reward=config.end, done=True)
        return Step(observation=self._offer(), reward=0.0, done=False)

    def close(self) -> None:
        """Nothing to release."""

    def _offer(self) -> str:
        return self._config.observation.format(turn=self._turn, reward=self._config.rewards[self._turn])


class Stop(EnvironmentComponent):
    """Stop or continue: stopping in turn t ends the episode with reward t; every other response continues.

    The same for all problems. Its values are known in closed form, see `stop_values`: a test bed for turn-level credit.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Rewards, words and observations."""

        rewards: tuple[float, ...] = (0.2, 0.4, 1.0, 0.0)
        """reward of stopping in each turn"""
        end: float = 0.0
        """reward of an episode that never stopped"""
        stop: tuple[str, ...] = ("stop",)
        """words of which one in a response stops"""
        observation: str = "Turn {turn}: write stop to end with {reward:g} points, anything else to continue.\n"
        """text of each turn; {turn} is its number from 0, {reward} what stopping gives"""

        def __post_init__(self) -> None:
            if not self.rewards or not self.stop:
                raise ValueError("expected at least one reward and one word that stops.")
            self.observation.format(turn=0, reward=0.0)

    config: Config

    def make(self) -> StopEpisode:
        """A new episode."""
        return StopEpisode(self.config)

    def exact_values(self, chance: Callable[[str, Collection[str]], float]) -> dict[str, float]:
        """`stop_values` of the policy, by turn."""
        config = self.config
        offers = [config.observation.format(turn=turn, reward=r) for turn, r in enumerate(config.rewards)]
        stop = [chance(offer, config.stop) for offer in offers]
        return {str(turn): v for turn, v in enumerate(stop_values(stop, config.rewards, config.end)[:-1])}


def stop_values(stop: Sequence[float], rewards: Sequence[float], end: float = 0.0) -> list[float]:
    """V_t = p_t r_t + (1 − p_t) V_{t+1} for each turn, and V_T = end: the expected return from each turn on.

    Args:
        stop: probability p_t that the policy stops in turn t, [T].
        rewards: r_t, [T].
        end: return of an episode that never stopped.

    >>> stop_values([0.5, 0.5], [0.0, 1.0])
    [0.25, 0.5, 0.0]
    """
    values = [end]
    for p, reward in zip(reversed(stop), reversed(rewards), strict=True):
        values.append(p * reward + (1 - p) * values[-1])
    return values[::-1]
