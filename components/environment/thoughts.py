"""Families whose steps can be checked, as environments: each thought is a turn, checked as it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from creditgraph.components.environment.base import EnvironmentComponent
from creditgraph.components.tasks import TASKS
from creditgraph.components.tasks.base import THOUGHT_END
from creditgraph.components.text.templates import extract_answer
from creditgraph.pipeline.core.handles import Step


class ThoughtEpisode:
    """One episode; see `ThoughtTurns`."""

    def __init__(self, config: ThoughtTurns.Config) -> None:
        self._config = config
        self._thoughts: list[str] = []
        self._right = True

    @property
    def state(self) -> str:
        """Number of thoughts, whether all were right, and what of them the next one starts from."""
        right = "right" if self._right else "wrong"
        return f"{len(self._thoughts)} {right} {self._task.state(self._thoughts)}".strip()

    def reset(self, problem: dict[str, Any]) -> str:
        """The prompt as the data section made it."""
        if problem.get("task") not in TASKS:
            raise ValueError(f"task {problem.get('task')!r} has no steps to check; expected one of {', '.join(TASKS)}")
        self._problem = problem
        self._task = TASKS[problem["task"]]
        self._count = len(self._task.solution(problem))
        self._most = int(problem.get("moves", self._count * (2 if self._task.recoverable else 1)))
        return str(problem["prompt"])

    def step(self, text: str) -> Step:
        """Checks a thought; there is no answer between thoughts."""
        self._thoughts.append(text)
        error = self._task.first_error(self._problem, self._thoughts)
        self._right = error == 0 or error > len(self._thoughts)
        answer = extract_answer(text)
        done = answer is not None or THOUGHT_END not in text or len(self._thoughts) == self._most
        if self._config.reward == "steps":
            reward = self._right / self._count
        else:
            reward = float(done and self._task.accepts(self._problem, self._thoughts, answer))
        return Step(observation="", reward=reward, done=done)

    def close(self) -> None:
        """Nothing to release."""


class ThoughtTurns(EnvironmentComponent):
    """A family with checkable steps, a thought per turn: the sampler stops at </thought>, and each thought is checked.

    An episode ends with a thought that boxes an answer, with one that is not closed, and when the problem's moves are
    used up; without such a budget, after as many thoughts as the solution has, twice as many where steps can be undone.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The reward."""

        reward: str = "answer"
        """answer: 1 for the right answer in its last turn; steps: 1/n for each step as long as all are right, where
        the reference solution has n"""

        def __post_init__(self) -> None:
            if self.reward not in ("answer", "steps"):
                raise ValueError(f"reward: expected answer or steps, got '{self.reward}'.")

    config: Config

    def make(self) -> ThoughtEpisode:
        """A new episode."""
        return ThoughtEpisode(self.config)
