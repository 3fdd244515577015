"""The embedded task "chains": follow a running value through arithmetic steps, modulo 13; every step can be checked.

A problem is a start value and steps such as ``* 4``; a solution has one thought per step: step label, value before,
operator, operand, value after. The last thought boxes its value:

    question   7 s1 * 4 s2 + 3
    solution   s1 7 * 4 2 </thought> s2 2 + 3 5 \\boxed{ 5 } </thought>

A wrong value is carried along by every later step, so the first error of a wrong chain is well defined.

Difficulty is a setting. The shipped model holds *misconceptions*: step facts such as ``7 * 4`` for which it prefers one
fixed wrong value. A problem's hard steps are the steps whose right solution uses such a fact; `Difficulty.hard_facts`
bounds their number, so that chains with about one hard decision and chains with many can both be had.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from creditgraph.components.tasks.base import THOUGHT_END, Draw, Problem, Task, compare_with, step_body
from creditgraph.pipeline.core.errors import DataError

OPERATORS = ("+", "-", "*")
OPERANDS = range(2, 10)
MAX_STEPS = 12
TINY_MODEL = Path(__file__).parent.parent / "models" / "tiny"

Fact = tuple[int, str, int]  # value before, operator, operand


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """Difficulty of the problems.

    Attributes:
        steps: fewest and most steps of a chain, both at most 12.
        hard_facts: fewest and most steps that use a fact the shipped model gets wrong; None sets no limits.
        hard_after: such steps come only after this share of the chain; 0.6 makes chains that begin easily and fail
            late.
        operators: operators to draw from.
        modulus: values are computed modulo this number, at most 13 (the shipped model was trained with 13 only).
    """

    steps: tuple[int, int] = (8, 10)
    hard_facts: tuple[int, int] | None = (3, 3)
    hard_after: float = 0.0
    operators: str = "+-*"
    modulus: int = 13

    def __post_init__(self) -> None:
        low, high = self.steps
        if not 1 <= low <= high <= MAX_STEPS:
            raise ValueError(f"steps: expected 1 ≤ fewest ≤ most ≤ {MAX_STEPS}, got [{low}, {high}].")
        if self.hard_facts is not None and not 0 <= self.hard_facts[0] <= min(self.hard_facts[1], low):
            raise ValueError(
                f"hard_facts: expected [fewest, most] with fewest ≤ {low}, the fewest steps, got "
                f"{list(self.hard_facts)}."
            )
        if not 0 <= self.hard_after < 1 or (self.hard_after and self.hard_facts is None):
            raise ValueError(f"hard_after: expected 0 ≤ hard_after < 1, and hard_facts with it, got {self.hard_after}.")
        unknown = [c for c in self.operators if c not in OPERATORS]
        if unknown or not self.operators:
            raise ValueError(f"operators: expected some of '{''.join(OPERATORS)}', got '{self.operators}'.")
        if not 2 <= self.modulus <= 13:
            raise ValueError(
                f"expected 2 ≤ modulus ≤ 13, as the shipped model has no numbers above 12, got {self.modulus}."
            )


def apply_step(before: int, operator: str, operand: int, modulus: int = 13) -> int:
    """The value after one step."""
    if operator == "+":
        return (before + operand) % modulus
    if operator == "-":
        return (before - operand) % modulus
    return (before * operand) % modulus


@cache
def load_misconceptions(folder: Path = TINY_MODEL) -> dict[Fact, tuple[int, float]]:
    """Fact → (wrong value, how often the model's teacher gave it), from the model's `misconceptions.json`."""
    path = folder / "misconceptions.json"
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["facts"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path}: the list of misconceptions cannot be read ({error}), expected the file that "
            "tools/make_tiny_model writes. Set hard_facts to null or make the model again."
        ) from None
    return {(row["before"], row["operator"], row["operand"]): (row["wrong"], row["rate"]) for row in rows}


def true_facts(problem: Problem) -> list[Fact]:
    """The fact each step of the right solution uses."""
    value = int(problem["start"])
    facts = []
    for operator, operand in problem["steps"]:
        facts.append((value, operator, operand))
        value = apply_step(value, operator, operand, problem["modulus"])
    return facts


def thought(index: int, fact: Fact, after: int, last: bool) -> str:
    """Thought `index` (1-based) as text, closed by its stop string; the last one boxes the value."""
    value, operator, operand = fact
    box = f" \\boxed{{ {after} }}" if last else ""
    return f"s{index} {value} {operator} {operand} {after}{box} {THOUGHT_END}"


def shown_values(reference_steps: Sequence[str]) -> dict[int, str]:
    """Step → value after it, for the first half of a reference chain, rounded up; malformed steps show nothing."""
    values = {}
    for i, step in enumerate(reference_steps[: (len(reference_steps) + 1) // 2], 1):
        match = re.match(r"s\d+ \d+ [-+*] \d+ (\d+)", step.strip())
        if match:
            values[i] = match.group(1)
    return values


def _label(steps: Sequence[str], shown: Mapping[int, str]) -> str:
    # "Step i:" is one label word, c1 … c12, in place of the thought's own, so that a step costs five tokens.
    lines = []
    for i, step in enumerate(steps, 1):
        body = re.sub(r"^s\d+ ", "", step_body(step))
        reference = f" ref {shown[i]}" if i in shown else ""
        lines.append(" ".join(f"c{i} {body}{reference}".split()))
    return " ".join(lines)


class Chains(Task):
    """The running value of a chain of arithmetic steps; one wrong step makes every later value wrong."""

    name = "chains"
    model = "tiny"
    difficulty = Difficulty

    def __init__(self, hard: Mapping[Fact, Any] | None = None) -> None:
        """`hard`: facts that count as hard; those of the shipped model when None."""
        self._hard = hard

    def draw(self, draw: Draw, difficulty: Difficulty) -> Problem | None:
        """A chain of random steps; None where its hard steps are too few, too many or too early."""
        low, high = difficulty.steps
        count = low + int(draw() * (high - low + 1))
        operators = difficulty.operators
        steps = [[operators[int(draw() * len(operators))], OPERANDS[int(draw() * len(OPERANDS))]] for _ in range(count)]
        start = int(draw() * difficulty.modulus)
        problem: Problem = {"modulus": difficulty.modulus, "start": start, "steps": steps, "hard_steps": []}
        if difficulty.hard_facts is not None:
            hard = load_misconceptions() if self._hard is None else self._hard
            problem["hard_steps"] = found = [i for i, fact in enumerate(true_facts(problem), 1) if fact in hard]
            fewest, most = difficulty.hard_facts
            if not fewest <= len(found) <= most or any(i <= difficulty.hard_after * count for i in found):
                return None
        words = [str(start), *(f"s{i} {operator} {operand}" for i, (operator, operand) in enumerate(steps, 1))]
        return {"task": "chains", "template": "chains", "question": " ".join(words)} | problem

    def solution(self, problem: Problem) -> list[str]:
        """The right thoughts, in order."""
        facts, modulus = true_facts(problem), problem["modulus"]
        return [thought(i, fact, apply_step(*fact, modulus), i == len(facts)) for i, fact in enumerate(facts, 1)]

    def answer(self, problem: Problem) -> str:
        """The right final value, as text."""
        return str(apply_step(*true_facts(problem)[-1], problem["modulus"]))

    def first_error(self, problem: Problem, thoughts: Sequence[str]) -> int:
        """1-based index of the first wrong thought, 0 when the chain is right and complete.

        A malformed thought is wrong. A chain that ends before the last step has its error at the thought that is
        missing, so the result may be ``len(thoughts) + 1``; a thought after the last step is wrong too.
        """
        return compare_with(self.solution(problem), thoughts)

    def words(self) -> list[str]:
        """Numbers, operators, and labels of steps."""
        labels = [f"{letter}{i}" for letter in "sc" for i in range(1, MAX_STEPS + 1)]
        return [*map(str, range(13)), *OPERATORS, *labels]

    def attempt(self, problem: Problem, draw: Draw) -> list[str]:
        """Believes each misconception at its rate, and carries the value along."""
        facts = load_misconceptions()
        value = int(problem["start"])
        thoughts = []
        for i, (operator, operand) in enumerate(problem["steps"], 1):
            fact = (value, operator, operand)
            wrong, rate = facts.get(fact, (0, 0.0))
            value = wrong if draw() < rate else apply_step(*fact, problem["modulus"])
            thoughts.append(thought(i, fact, value, i == len(problem["steps"])))
        return thoughts

    def localize_prompt(self, question: str, steps: Sequence[str]) -> str:
        """The failed chain; each step's own label is replaced by c1, c2, …"""
        return f"<localize> {question} </problem> {_label(steps, {})} </steps>"

    def revise_prompt(self, question: str, wrong_steps: Sequence[str], reference_steps: Sequence[str]) -> str:
        """The wrong chain, and beside the first half of its steps only the reference's value after them."""
        return f"<revise> {question} </problem> {_label(wrong_steps, shown_values(reference_steps))} </steps>"
