"""Long chains with few hard steps near their end, where resets should pay: most of a failure is sound.

A problem is a chain as in `chains` (value modulo 13, one thought per step) of 16 steps, of which two or three late ones
are hard: their fact is a misconception of the model `tiny`, with which the training of this family's model begins. Its
teacher gets it wrong 7 times of 10. (16 steps and three repairs fit in the 128 tokens of the toy recipes.) The whole
chain is judged, so that an error stays one even if a second one cancels it. A wrong step can be repaired at once, and
only then, by a thought that states it again:

    question   7 s1 * 4 s2 + 3 s3 - 9
    response   s1 7 * 4 2 </thought> s2 2 + 3 6 </thought> fix s2 2 + 3 5 </thought> s3 5 - 9 9 \\boxed{ 9 } </thought>

The first error is the first wrong step that is not repaired by the next thought (our reading: it is where the value is
lost, although one more thought could have saved it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from components.tasks.base import Draw, Problem, Task, step_labels, words_of
from components.tasks.chains import OPERANDS, OPERATORS, Fact, apply_step, load_misconceptions, thought, true_facts

MODULUS = 13
MAX_STEPS = 16
WRONG = 0.7  # how often the teacher gets a hard fact wrong, so q ≈ .3
REPAIRED = 0.1  # how often it repairs such a step
FIX = "fix"
ALL_FACTS = [(before, operator, operand) for before in range(MODULUS) for operator in OPERATORS for operand in OPERANDS]
# Fact → the wrong value that the teacher prefers.
HARD: dict[Fact, int] = {fact: wrong for fact, (wrong, _) in load_misconceptions().items()}


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """Difficulty of the problems.

    Attributes:
        steps: fewest and most steps of a chain, at most 16.
        hard: fewest and most hard steps.
        hard_after: hard steps come only after this share of the chain, and never last, where no repair could follow.
    """

    steps: tuple[int, int] = (16, 16)
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


class ChainsReset(Task):
    """Chains of which only a few late steps are hard, and a tenth of wrong ones are repaired."""

    name = "chains_reset"
    model = "tiny_chains_reset"
    answer_kind = "steps"
    recoverable = True
    difficulty = Difficulty
    # Shorter chains first: they teach the facts and the repairs at a lower cost.
    warm_up = (Difficulty(steps=(8, 16), hard=(0, 3), hard_after=0.5), Difficulty(hard=(1, 3), hard_after=0.5))

    def draw(self, draw: Draw, difficulty: Any) -> Problem:
        """Draws the places of the hard steps, then at every step a fact of its kind for the value at hand."""
        count = _between(draw, difficulty.steps)
        places = late_steps(count, difficulty.hard_after)
        hard = sorted(places.pop(int(draw() * len(places))) for _ in range(_between(draw, difficulty.hard)))
        start = value = int(draw() * MODULUS)
        steps = []
        for i in range(1, count + 1):
            facts = [fact for fact in ALL_FACTS if fact[0] == value and (fact in HARD) == (i in hard)]
            fact = facts[int(draw() * len(facts))]
            steps.append([fact[1], fact[2]])
            value = apply_step(*fact)
        question = " ".join([str(start), *(f"s{i} {step[0]} {step[1]}" for i, step in enumerate(steps, 1))])
        entries = {"question": question, "modulus": MODULUS, "start": start, "steps": steps, "hard_steps": hard}
        return {"task": self.name, **entries}

    def solution(self, problem: Problem) -> list[str]:
        """The right steps, without repairs."""
        facts = true_facts(problem)
        return [thought(i, fact, apply_step(*fact), i == len(facts)) for i, fact in enumerate(facts, 1)]

    def answer(self, problem: Problem) -> str:
        """The final value."""
        return str(apply_step(*true_facts(problem)[-1]))

    def first_error(self, problem: Problem, thoughts: Sequence[str]) -> int:
        """The first wrong step that the next thought does not repair; 0 for a complete, right or repaired chain.

        A check of a right step (a repair that states it again) is not wrong if it follows at once; the box has to be in
        the last step.
        """
        said = [words_of(text) for text in thoughts]
        right = [text.split() for text in self.solution(problem)]
        place = 0  # of the next thought
        for step in right:
            if place == len(said):
                return place + 1
            repaired = place + 1 < len(said) and said[place + 1] == [FIX, *step]
            sound = said[place] == step or (repaired and _same_but_value(said[place], step))
            if not sound:
                return place + 1
            place += 2 if repaired else 1
        return 0 if place == len(said) else place + 1

    def accepts(self, problem: Problem, thoughts: Sequence[str], boxed: str | None) -> bool:
        """Whether every step is right or repaired."""
        return self.first_error(problem, thoughts) == 0

    def attempt(self, problem: Problem, draw: Draw) -> list[str]:
        """Gets hard facts wrong with chance `WRONG`, repairs with chance `REPAIRED`, else carries the value along."""
        value = int(problem["start"])
        thoughts = []
        for i, (operator, operand) in enumerate(problem["steps"], 1):
            fact = (value, operator, operand)
            last = i == len(problem["steps"])
            wrong = fact in HARD and draw() < WRONG
            value = HARD[fact] if wrong else apply_step(*fact)
            thoughts.append(thought(i, fact, value, last))
            if wrong and not last and draw() < REPAIRED:
                value = apply_step(*fact)
                thoughts.append(f"{FIX} {thought(i, fact, value, last)}")
        return thoughts

    def words(self) -> list[str]:
        """Numbers, operators and labels of steps."""
        labels = [f"s{i}" for i in range(1, MAX_STEPS + 1)]
        return ["0", *OPERATORS, *labels, FIX, *step_labels(MAX_STEPS + 3)]


def _between(draw: Draw, bounds: tuple[int, int]) -> int:
    low, high = bounds
    return low + int(draw() * (high - low + 1))


def _same_but_value(said: Sequence[str], step: Sequence[str]) -> bool:
    """Whether a thought is this step with another value; "s2 2 + 3 5 </thought>" has the value at index 4."""
    return len(said) == len(step) and all(a == b for i, (a, b) in enumerate(zip(said, step, strict=True)) if i != 4)
