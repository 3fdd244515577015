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

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.core.errors import DataError, did_you_mean
from pipeline.core.streams import key_of

THOUGHT_END = "</thought>"
OPERATORS = ("+", "-", "*")
OPERANDS = range(2, 10)
MAX_STEPS = 12
MAX_DRAWS = 20_000
# Share of all problems, in eighths, of each split; a problem's text determines its split, so splits are disjoint.
SPLITS: dict[str, range] = {"train": range(6), "validation": range(6, 7), "eval": range(7, 8)}
TINY_MODEL = Path(__file__).parent.parent / "models" / "tiny"

Fact = tuple[int, str, int]  # value before, operator, operand
Problem = dict[str, Any]


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


def generate(
    seed: int,
    index: int,
    difficulty: Difficulty | None = None,
    split: str = "train",
    hard: Mapping[Fact, Any] | None = None,
) -> Problem:
    """Draws problem `index` of a split: a JSON-able dict, the same for the same arguments everywhere.

    Args:
        seed: names an endless list of problems.
        index: position in that list, from 0.
        difficulty: the defaults of `Difficulty` when None.
        split: "train", "validation" or "eval"; no question belongs to two of them.
        hard: facts that count as hard; those of the shipped model when None.
    """
    difficulty = difficulty or Difficulty()
    if split not in SPLITS:
        raise DataError(f"chains: split '{split}' does not exist.{did_you_mean(split, SPLITS)}")
    if difficulty.hard_facts is None:
        hard = {}
        low, high = 0, MAX_STEPS
    else:
        hard = load_misconceptions() if hard is None else hard
        low, high = difficulty.hard_facts
    # random() is the one method whose sequence Python guarantees across versions.
    draw = random.Random(key_of("chains", seed, split, index)).random
    for _ in range(MAX_DRAWS):
        problem = _draw_problem(draw, difficulty)
        if key_of("split", problem["question"]) % 8 not in SPLITS[split]:
            continue
        problem["hard_steps"] = [i for i, fact in enumerate(true_facts(problem), 1) if fact in hard]
        late = all(i > difficulty.hard_after * len(problem["steps"]) for i in problem["hard_steps"])
        if late and low <= len(problem["hard_steps"]) <= high:
            return problem
    raise DataError(
        f"chains: no problem with steps {list(difficulty.steps)} and {low} to {high} hard facts in {MAX_DRAWS} draws. "
        "Widen hard_facts or steps."
    )


def _draw_problem(draw: Any, difficulty: Difficulty) -> Problem:
    low, high = difficulty.steps
    count = low + int(draw() * (high - low + 1))
    operators = difficulty.operators
    steps = [[operators[int(draw() * len(operators))], OPERANDS[int(draw() * len(OPERANDS))]] for _ in range(count)]
    start = int(draw() * difficulty.modulus)
    question = " ".join([str(start), *(f"s{i} {operator} {operand}" for i, (operator, operand) in enumerate(steps, 1))])
    return {
        "task": "chains",
        "template": "chains",
        "question": question,
        "modulus": difficulty.modulus,
        "start": start,
        "steps": steps,
    }


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


def solution(problem: Problem) -> list[str]:
    """The right thoughts, in order."""
    facts = true_facts(problem)
    return [thought(i, fact, apply_step(*fact, problem["modulus"]), i == len(facts)) for i, fact in enumerate(facts, 1)]


def answer(problem: Problem) -> str:
    """The right final value, as text."""
    return str(apply_step(*true_facts(problem)[-1], problem["modulus"]))


def split_thoughts(text: str) -> list[str]:
    """Cuts a response after each `</thought>`; end-of-text tokens and white space alone are no thought."""
    parts = text.replace("<eos>", " ").replace("<pad>", " ").split(THOUGHT_END)
    closed = [f"{part.strip()} {THOUGHT_END}" for part in parts[:-1]]
    return closed + ([parts[-1].strip()] if parts[-1].strip() else [])


def first_error(problem: Problem, thoughts: Sequence[str]) -> int:
    """1-based index of the first wrong thought, 0 when the chain is right and complete.

    A malformed thought is wrong. A chain that ends before the last step has its error at the thought that is missing,
    so the result may be ``len(thoughts) + 1``; a thought after the last step is wrong too.
    """
    right = solution(problem)
    for i, (thought_text, expected) in enumerate(zip(thoughts, right, strict=False), 1):
        if _words(thought_text) != _words(expected):
            return i
    return 0 if len(thoughts) == len(right) else min(len(thoughts), len(right)) + 1


def _words(text: str) -> list[str]:
    return text.replace("<eos>", " ").replace(THOUGHT_END, f" {THOUGHT_END}").split()


# Prompts in the words of the embedded model's vocabulary. "Step i:" is one label word, c1 … c12, so that a step costs
# five tokens.


def solve_prompt(question: str) -> str:
    """Prompt for a solution."""
    return f"<solve> {question} </problem>"


def localize_prompt(question: str, steps: Sequence[str]) -> str:
    """Prompt for the first wrong step of a failed attempt."""
    return f"<localize> {question} </problem> {_label(steps, {})} </steps>"


def revise_prompt(question: str, wrong_steps: Sequence[str], reference_steps: Sequence[str]) -> str:
    """Prompt for a repaired attempt.

    Only the values in the first half of the reference are shown, so that revising means repairing and not copying.
    """
    return f"<revise> {question} </problem> {_label(wrong_steps, shown_values(reference_steps))} </steps>"


def shown_values(reference_steps: Sequence[str]) -> dict[int, str]:
    """Step → value after it, for the first half of a reference chain, rounded up; malformed steps show nothing."""
    values = {}
    for i, step in enumerate(reference_steps[: (len(reference_steps) + 1) // 2], 1):
        match = re.match(r"s\d+ \d+ [-+*] \d+ (\d+)", step.strip())
        if match:
            values[i] = match.group(1)
    return values


def bare_step(step: str) -> str:
    """A step without its stop string; white space is collapsed where it is a single line."""
    if "\n" in step.strip():
        return step.replace(THOUGHT_END, "").strip()
    return " ".join(step.replace(THOUGHT_END, " ").split())


def _label(steps: Sequence[str], shown: Mapping[int, str]) -> str:
    lines = []
    for i, step in enumerate(steps, 1):
        body = re.sub(r"^s\d+ ", "", re.sub(r"\\boxed\{[^}]*\}?|<eos>", " ", bare_step(step)).strip())
        reference = f" ref {shown[i]}" if i in shown else ""
        lines.append(" ".join(f"c{i} {body}{reference}".split()))
    return " ".join(lines)
