"""Plays scripted episodes in an environment of the user's own and compares them; part of `creditgraph check`."""

import copy
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from creditgraph.components.rollouts.replies import read_step, shown, state_of
from creditgraph.components.rollouts.timed_calls import Fault, TimedCalls
from creditgraph.components.tasks import TASKS
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.handles import Step

_TURNS = 24
_SLOW = 1.0  # seconds of one call beyond which training waits for the environment
Transcript = list[tuple[str, float, bool, str]]
"""Observation, reward, done and state after reset and after each step."""


class _Episode:
    """One scripted episode; `transcript` grows with each call until `fault` or the end."""

    def __init__(self, make: Callable[[], Any], problem: dict[str, Any], calls: TimedCalls) -> None:
        self._calls = calls
        self._problem = problem
        self._texts = scripted_texts(problem)
        self._make = make
        self.transcript: Transcript = []
        self.fault: Fault | None = None
        self.slowest = 0.0
        self.changed = False

    @property
    def over(self) -> bool:
        """Whether there is nothing left to do."""
        done = bool(self.transcript) and self.transcript[-1][2]
        return done or self.fault is not None or len(self.transcript) > _TURNS

    def advance(self) -> None:
        """The next call: reset, then the steps."""
        if not self.transcript:
            given = copy.deepcopy(self._problem)
            environment = self._timed(self._make)
            if not isinstance(environment, Fault):
                self._environment = environment
                reply = self._timed(partial(environment.reset, given))
                self.changed = given != self._problem
                if isinstance(reply, str) and reply:
                    reply = Step(observation=reply, reward=0.0, done=False)
                elif not isinstance(reply, Fault):
                    reply = Fault("reply", f"reset returned {shown(reply)}, expected a text, the first observation")
            else:
                reply = environment
        else:
            text = self._texts[(len(self.transcript) - 1) % len(self._texts)]
            reply = read_step(self._timed(partial(self._environment.step, text)))
        if isinstance(reply, Fault):
            self.fault = reply
            return
        state = state_of(self._environment)
        if isinstance(state, Fault):
            self.fault = state
        else:
            self.transcript.append((reply.observation, reply.reward, reply.done, state))

    def close(self) -> None:
        """Closes it."""
        if hasattr(self, "_environment") and (self.fault is None or self.fault.kind != "time"):
            reply = self._timed(self._environment.close)
            if isinstance(reply, Fault) and self.fault is None:
                self.fault = Fault(reply.kind, f"close: {reply.reason}")

    def _timed(self, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        (reply,) = self._calls.run([call])
        self.slowest = max(self.slowest, time.perf_counter() - start)
        return reply


def scripted_texts(problem: dict[str, Any]) -> list[str]:
    """What the scripted policy writes: nothing, words, other alphabets, a very long text, and the right answer."""
    answer = str(problem.get("answer", ""))
    return ["", "1", "stop", "é 漢字 🙂 \\boxed{7}", "7 " * 5000, answer, f"\\boxed{{{answer}}}"]


def embedded_problems() -> list[dict[str, Any]]:
    """Three problems of the embedded task, as a sampler would give them."""
    task = TASKS["chains"]
    problems = [task.generate(0, i) for i in range(3)]
    return [
        {**p, "prompt": task.solve_prompt(p["question"]), "answer": task.answer(p), "seed": 11 * i + 5}
        for i, p in enumerate(problems)
    ]


def read_problems(path: Path) -> list[dict[str, Any]]:
    """Problems of a file of JSON lines; "prompt", "question", "answer" and "seed" are added where they are missing."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--problems {path}: cannot be read ({error}), expected one JSON object per line.") from None
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"--problems {path}: expected one JSON object per line, at least one.")
    filled = []
    for i, row in enumerate(rows[:8]):
        question = str(row.get("question") or row.get("prompt") or "")
        filled.append({"question": question, "prompt": question, "answer": "", "seed": 11 * i + 5, **row})
    return filled


def check_environment(
    make: Callable[[], Any], problems: Sequence[dict[str, Any]], seconds: float = 10.0
) -> tuple[list[str], str]:
    """Findings on an environment, one sentence each, and a note on what was played.

    Each problem is played twice alone, and once more with all others in between: same transcripts, or it draws random
    numbers that its seed does not give, or its episodes share something.

    Args:
        make: a new environment.
        problems: what `reset` receives.
        seconds: limit of one call.
    """
    calls = TimedCalls(seconds, 8)
    try:
        alone = [[_played([_Episode(make, problem, calls)])[0] for problem in problems] for _ in range(2)]
        mixed = _played([_Episode(make, problem, calls) for problem in problems])
    finally:
        calls.close()
    findings: list[str] = []
    for first, second, among in zip(*alone, mixed, strict=True):
        if first.fault is not None:
            findings.append(f": {first.fault.reason} (call {len(first.transcript) + 1} of its episode).")
        elif first.changed:
            findings.append(".reset changes the problem that it receives, which other episodes share; copy it.")
        elif second.fault is not None or (place := _difference(first, second)):
            said = second.fault.reason if second.fault else place
            findings.append(f": two episodes of one problem differ: {said}; draw from problem['seed'] only.")
        elif among.fault is not None or (place := _difference(first, among)):
            said = among.fault.reason if among.fault else place
            findings.append(f": an episode differs with others in between: {said}; keep all state in the object.")
    played = [*alone[0], *mixed]
    slowest = max(episode.slowest for episode in played)
    if slowest > _SLOW and not findings:
        findings.append(f": a call took {slowest:.1f} s; every turn of all episodes waits for the slowest.")
    ended = sum(bool(e.transcript) and e.transcript[-1][2] for e in alone[0])
    plural = "s" if len(problems) > 1 else ""
    note = f"{len(problems)} problem{plural}, 3 episodes each, of which {ended} ended within {_TURNS} scripted turns"
    return list(dict.fromkeys(findings)), f"{note}; slowest call {slowest * 1000:.0f} ms"


def _played(episodes: list[_Episode]) -> list[_Episode]:
    """Plays them side by side, a call each in turn."""
    while any(not episode.over for episode in episodes):
        for episode in episodes:
            if not episode.over:
                episode.advance()
    for episode in episodes:
        episode.close()
    return episodes


def _difference(first: _Episode, second: _Episode) -> str:
    """The first call in which two transcripts differ, "" if none."""
    names = ("observation", "reward", "done", "state")
    for number, (a, b) in enumerate(zip(first.transcript, second.transcript, strict=False)):
        for name, x, y in zip(names, a, b, strict=True):
            if x != y:
                call = f"step {number}" if number else "reset"
                return f"{name} after {call} is {shown(x)} and {shown(y)}"
    return "" if len(first.transcript) == len(second.transcript) else "one ends earlier"
