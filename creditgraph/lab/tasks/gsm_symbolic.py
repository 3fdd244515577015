"""The family "gsm_symbolic": word problems whose thoughts are worked statements, one operation each.

Problems are those of reasoning-gym's gsm_symbolic (templates of GSM-Symbolic, 2410.05229) whose worked solution is a
chain of whole-number statements with numbers up to 99. The small model reads a problem as its template and its numbers
in the order of the text, each as two digits, units first (so that a carry is known when the tens are written); the text
itself stays in the problem as ``text``. With the numbers 5, 2 and 65, 65 / 5 = 13 and 2 * 13 = 26 are

    question   t16 : 5 0 , 2 0 , 5 6
    solution   5 6 / 5 0 = 3 1 </thought> 2 0 * 3 1 = 6 2 \\boxed{ 6 2 } </thought>

A wrong number is carried along by every later statement.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from creditgraph.components.tasks.base import THOUGHT_END, Draw, Problem, step_labels, words_of
from creditgraph.lab.tasks.library import LibraryTask, load_rows
from creditgraph.pipeline.core.streams import key_of

TEMPLATES = (4, 12, 16, 43, 45, 54, 58, 59)  # of the library, those that have rows
LARGEST = 99
SHARE_WRONG = 0.6  # of the statements of all templates, for which the teacher has a misconception
RATES = (0.2, 0.7)  # how often it then takes another operator, uniform between statements
_OTHER = {"+": "-", "-": "+", "*": "+", "/": "-"}
_STATEMENT = re.compile(rf"([\d ]+) ([-+*/]) ([\d ]+) = ([\d ]+)(?: \\boxed\{{ ([\d ]+) \}})? {THOUGHT_END}")

Statement = tuple[int, str, int, int]  # left, operator, right, result


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """Difficulty of the problems.

    Attributes:
        statements: fewest and most statements of the solution (2 and 3 exist).
        largest: largest number in question and solution, at most 99.
    """

    statements: tuple[int, int] = (2, 3)
    largest: int = LARGEST

    def __post_init__(self) -> None:
        low, high = self.statements
        if not 2 <= low <= high <= 3:
            raise ValueError(f"statements: expected 2 ≤ fewest ≤ most ≤ 3, got [{low}, {high}].")
        if not 20 <= self.largest <= LARGEST:
            raise ValueError(f"expected 20 ≤ largest ≤ {LARGEST}, the largest number of the rows, got {self.largest}.")


class GsmSymbolic(LibraryTask):
    """Word problems in whole-number statements.

    A thought is right when its statement is one of the solution's that is not made yet, in any order and with the
    numbers of a sum or product in either order; the last one boxes the answer.
    """

    name = "gsm_symbolic"
    model = "tiny_gsm_symbolic"
    difficulty = Difficulty

    def from_row(self, row: dict[str, Any], difficulty: Difficulty) -> Problem | None:
        """The problem of a row."""
        worked = work_out(row["numbers"], row["statements"])
        low, high = difficulty.statements
        if not low <= len(worked) <= high or max(*row["numbers"], *(w[3] for w in worked)) > difficulty.largest:
            return None
        return _problem(row["template"], row["numbers"], row["statements"]) | {"text": row["text"]}

    def draw(self, draw: Draw, difficulty: Difficulty) -> Problem | None:
        """The statements of a row with other numbers of about the same size."""
        rows = self.problems(difficulty)
        row = rows[int(draw() * len(rows))]
        numbers = [1 + int(draw() * max(2 * n, 9)) for n in row["numbers"]]
        for statement in row["statements"]:  # a quotient of two numbers of the question: draw a multiple
            a, operator, b = parsed(statement)
            if operator == "/" and max(a, b) < len(numbers):
                numbers[a] = numbers[b] * (1 + int(draw() * 12))
        worked = work_out(numbers, row["statements"])
        if not worked or max(*numbers, *(w[3] for w in worked)) > difficulty.largest:
            return None
        return _problem(row["kind"], numbers, row["statements"])

    def solution(self, problem: Problem) -> list[str]:
        """The statements in the order of the library's worked solution."""
        return _thoughts(work_out(problem["numbers"], problem["statements"]))

    def answer(self, problem: Problem) -> str:
        """The last result, digit by digit."""
        return spaced(work_out(problem["numbers"], problem["statements"])[-1][3])

    def first_error(self, problem: Problem, thoughts: Sequence[str]) -> int:
        """The first statement that is wrong, not the solution's, made before, or boxed at another place than the last.

        >>> task, problem = GsmSymbolic(), _problem(16, [5, 2, 65], ["2/0", "1*3"])
        >>> task.first_error(problem, ["5 6 / 5 0 = 3 1 </thought>", "3 1 * 2 0 = 6 2 \\\\boxed{ 6 2 } </thought>"])
        0
        """
        left = [_canonical(worked) for worked in work_out(problem["numbers"], problem["statements"])]
        for i, thought in enumerate(thoughts, 1):
            match = _STATEMENT.fullmatch(" ".join(words_of(thought)))
            if match is None:
                return i
            made = _canonical((number(match[1]), match[2], number(match[3]), number(match[4])))
            if made not in left:
                return i
            left.remove(made)
            if (match[5] or "") != ("" if left else self.answer(problem)):
                return i
        return len(thoughts) + 1 if left else 0

    def words(self) -> list[str]:
        """Templates, digits, operators and marks."""
        return [*(f"t{i}" for i in TEMPLATES), *"0123456789:,+-*/=", *step_labels(3)]

    def attempt(self, problem: Problem, draw: Draw) -> list[str]:
        """Takes another operator at the rate of each misconception, and goes on with the result."""
        wrong = misconceptions()
        known, worked = list(problem["numbers"]), []
        for i, statement in enumerate(problem["statements"]):
            a, operator, b = parsed(statement)
            other, rate = wrong.get((problem["kind"], i), (operator, 0.0))
            worked.append(_forced(known[a], other if draw() < rate else operator, known[b]))
            known.append(worked[-1][3])
        return _thoughts(worked)


def operate(left: int, operator: str, right: int) -> int | None:
    """The result of a statement; None where it is no whole number from 0.

    >>> operate(12, "/", 4), operate(12, "/", 5), operate(3, "-", 7)
    (3, None, None)
    """
    if operator == "/":
        return left // right if right and left % right == 0 else None
    result = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return result if result >= 0 else None


def parsed(statement: str) -> tuple[int, str, int]:
    """Left place, operator and right place of a statement such as "0*2": places in the numbers and earlier results."""
    match = re.fullmatch(r"(\d+)([-+*/])(\d+)", statement)
    assert match is not None
    return int(match[1]), match[2], int(match[3])


def work_out(numbers: Sequence[int], statements: Sequence[str]) -> list[Statement]:
    """The statements with their numbers, in order; [] where one has no whole-number result."""
    known, worked = list(numbers), []
    for statement in statements:
        a, operator, b = parsed(statement)
        result = operate(known[a], operator, known[b])
        if result is None:
            return []
        worked.append((known[a], operator, known[b], result))
        known.append(result)
    return worked


@cache
def misconceptions() -> dict[tuple[int, int], tuple[str, float]]:
    """(template, statement from 0) → (the operator that the teacher takes instead, how often)."""
    draw, wrong = random.Random(key_of("gsm_symbolic", "misconceptions")).random, {}
    statements = {row["template"]: row["statements"] for row in load_rows("gsm_symbolic")}
    for template in TEMPLATES:
        for i, statement in enumerate(statements[template]):
            confused, rate = draw() < SHARE_WRONG, RATES[0] + draw() * (RATES[1] - RATES[0])
            if confused:
                wrong[template, i] = (_OTHER[parsed(statement)[1]], round(rate, 3))
    return wrong


def spaced(value: int) -> str:
    """A number from 0 to 99 as two digits, units first.

    >>> spaced(65), spaced(5)
    ('5 6', '5 0')
    """
    return f"{value % 10} {value // 10}"


def number(digits: str) -> int:
    """The number of two digits as `spaced` writes them; −1 for other text.

    >>> number("5 6"), number("5"), number("56")
    (65, -1, -1)
    """
    return int(digits[2] + digits[0]) if re.fullmatch(r"\d \d", digits) else -1


def _problem(template: int, numbers: Sequence[int], statements: Sequence[str]) -> Problem:
    question = f"t{template} : {' , '.join(map(spaced, numbers))}"
    return {
        "task": "gsm_symbolic",
        "question": question,
        "kind": template,
        "numbers": list(numbers),
        "statements": list(statements),
    }


def _thoughts(worked: Sequence[Statement]) -> list[str]:
    texts = [f"{spaced(a)} {operator} {spaced(b)} = {spaced(result)}" for a, operator, b, result in worked]
    texts[-1] += f" \\boxed{{ {spaced(worked[-1][3])} }}"
    return [f"{text} {THOUGHT_END}" for text in texts]


def _canonical(statement: Statement) -> Statement:
    a, operator, b, result = statement
    return (min(a, b), operator, max(a, b), result) if operator in "+*" else statement


def _forced(left: int, operator: str, right: int) -> Statement:
    """A statement with a result from 0 to `LARGEST`, whatever the numbers: after an error they may not fit."""
    if operator == "-" and left < right:
        left, right = right, left
    result = operate(left, operator, right)
    if result is None:
        result = left // max(right, 1)
    return left, operator, right, result % (LARGEST + 1)
