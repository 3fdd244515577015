"""Long chains with few hard steps near their end, where resets should pay: most of a failure is sound.

A problem is a start value and 24 steps modulo 13. Easy steps add or subtract 1 or 2; two or three late ones are hard:
they multiply. For every product the teacher of the small model prefers one fixed wrong value, 7 times of 10, so a hard
step succeeds with chance .3 and is learned fact by fact. It checks one hard step of ten, right or wrong, at once and
rightly: the next thought states the step again. So a tenth of errors is repaired.

    question   7 s1 +2 s2 *3 s3 -1
    response   s1 +2 9 </thought> s2 *3 5 </thought> check s2 *3 1 </thought> s3 -1 0 \\boxed{ 0 } </thought>

The whole chain is judged, so that an error stays one even if a second one cancels it. The first error is the first
wrong step that is not repaired by the next thought (our reading: it is where the value is lost, although one more
thought could have saved it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from creditgraph.components.tasks.base import THOUGHT_END, Draw, Problem, Task, step_labels, words_of
from creditgraph.pipeline.core.streams import key_of

MODULUS = 13
MAX_STEPS = 24
EASY = ("+1", "+2", "-1", "-2")
HARD = tuple(f"*{operand}" for operand in range(2, 10))
CHECKED = 0.1  # how often it checks one
CHECK = "check"


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """Difficulty of the problems.

    Attributes:
        steps: fewest and most steps of a chain, at most 24.
        hard: fewest and most hard steps.
        hard_after: hard steps come only after this share of the chain, and never last, where no check could follow.
    """

    steps: tuple[int, int] = (24, 24)
    hard: tuple[int, int] = (2, 3)
    hard_after: float = 0.75

    def __post_init__(self) -> None:
        low, high = self.steps
        if not 2 <= low <= high <= MAX_STEPS:
            raise ValueError(f"steps: expected 2 ≤ fewest ≤ most ≤ {MAX_STEPS}, got [{low}, {high}].")
        if not 0 <= self.hard_after < 1:
            raise ValueError(f"expected 0 ≤ hard_after < 1, got {self.hard_after}.")
        room = len(late_steps(low, self.hard_after))
        if not 0 <= self.hard[0] <= self.hard[1] <= room:
            raise ValueError(
                f"hard: expected [fewest, most] with most ≤ {room}, the steps after the first {self.hard_after:.0%} of "
                f"{low} without the last, got {list(self.hard)}."
            )


def late_steps(count: int, hard_after: float) -> list[int]:
    """1-based steps that may be hard, in a chain of `count` steps."""
    return [i for i in range(1, count) if i > hard_after * count]


def apply_step(before: int, step: str) -> int:
    """The value after a step such as ``+2``.

    >>> apply_step(7, "*3"), apply_step(1, "-2")
    (8, 12)
    """
    operand = int(step[1:])
    return (before * operand if step[0] == "*" else before + (operand if step[0] == "+" else -operand)) % MODULUS


def preferred(before: int, step: str) -> int:
    """The wrong value that the teacher prefers for a hard step."""
    return (apply_step(before, step) + 1 + key_of("chains_reset", before, step) % (MODULUS - 1)) % MODULUS


def thought(problem: Problem, i: int, after: int) -> str:
    """Step `i` (1-based) of a chain as text; the last one boxes the value."""
    box = f" \\boxed{{ {after} }}" if i == len(problem["steps"]) else ""
    return f"s{i} {problem['steps'][i - 1]} {after}{box} {THOUGHT_END}"


class ChainsReset(Task):
    """Chains of which only a few late steps are hard, and a tenth of those are checked."""

    name = "chains_reset"
    model = "tiny_chains_reset"
    answer_kind = "steps"
    recoverable = True
    difficulty = Difficulty
    sure = 0.3
    # Shorter chains with hard steps anywhere come first: they teach the products at a lower cost.
    warm_up = (
        Difficulty(steps=(4, 8), hard=(1, 3), hard_after=0.0),
        Difficulty(steps=(8, 24), hard=(1, 3), hard_after=0.4),
        Difficulty(),
    )

    def draw(self, draw: Draw, difficulty: Any) -> Problem:
        """Draws the places of the hard steps, then every step among those of its kind."""
        count = _between(draw, difficulty.steps)
        places = late_steps(count, difficulty.hard_after)
        hard = sorted(places.pop(int(draw() * len(places))) for _ in range(_between(draw, difficulty.hard)))
        start = int(draw() * MODULUS)
        kinds = [HARD if i in hard else EASY for i in range(1, count + 1)]
        steps = [kind[int(draw() * len(kind))] for kind in kinds]
        question = " ".join([str(start), *(f"s{i} {step}" for i, step in enumerate(steps, 1))])
        return {"task": self.name, "question": question, "start": start, "steps": steps, "hard_steps": hard}

    def solution(self, problem: Problem) -> list[str]:
        """The right steps, without checks."""
        return [thought(problem, i, value) for i, value in enumerate(_values(problem), 1)]

    def answer(self, problem: Problem) -> str:
        """The final value."""
        return str(_values(problem)[-1])

    def first_error(self, problem: Problem, thoughts: Sequence[str]) -> int:
        """The first wrong step that the next thought does not repair; 0 for a complete, right or repaired chain.

        A check of a right step is not wrong if it follows at once; the box has to be in the last step.
        """
        said = [words_of(text) for text in thoughts]
        right = [text.split() for text in self.solution(problem)]
        place = 0  # of the next thought
        for step in right:
            if place == len(said):
                return place + 1
            repaired = place + 1 < len(said) and said[place + 1] == [CHECK, *step]
            sound = said[place] == step or (repaired and _same_but_value(said[place], step))
            if not sound:
                return place + 1
            place += 2 if repaired else 1
        return 0 if place == len(said) else place + 1

    def accepts(self, problem: Problem, thoughts: Sequence[str], boxed: str | None) -> bool:
        """Whether every step is right or repaired."""
        return self.first_error(problem, thoughts) == 0

    def attempt(self, problem: Problem, draw: Draw) -> list[str]:
        """Gets a hard step right with chance `sure`, checks it with chance `CHECKED`, carries the value along."""
        value = int(problem["start"])
        thoughts = []
        for i, step in enumerate(problem["steps"], 1):
            hard = step in HARD
            before = value
            value = preferred(before, step) if hard and draw() >= self.sure else apply_step(before, step)
            thoughts.append(thought(problem, i, value))
            if hard and draw() < CHECKED:
                value = apply_step(before, step)
                thoughts.append(f"{CHECK} {thought(problem, i, value)}")
        return thoughts

    def words(self) -> list[str]:
        """Numbers, steps and their labels."""
        labels = [f"s{i}" for i in range(1, MAX_STEPS + 1)]
        return ["0", *EASY, *HARD, *labels, CHECK, *step_labels(MAX_STEPS + 3)]


def _values(problem: Problem) -> list[int]:
    """The value after each step."""
    values = [int(problem["start"])]
    for step in problem["steps"]:
        values.append(apply_step(values[-1], step))
    return values[1:]


def _between(draw: Draw, bounds: tuple[int, int]) -> int:
    low, high = bounds
    return low + int(draw() * (high - low + 1))


def _same_but_value(said: Sequence[str], step: Sequence[str]) -> bool:
    """Whether a thought is this step with another value; "s2 *3 1 </thought>" has the value at index 2."""
    return len(said) == len(step) and all(a == b for i, (a, b) in enumerate(zip(said, step, strict=True)) if i != 2)
