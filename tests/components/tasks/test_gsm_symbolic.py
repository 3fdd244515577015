"""The family gsm_symbolic: statements judged by hand."""

import pytest

from components.tasks import TASKS
from components.tasks.gsm_symbolic import Difficulty, misconceptions, number, operate, spaced, work_out

TASK = TASKS["gsm_symbolic"]
# 35 fruits and 3 times as many others, 93 more, 38 fewer than those of the others: 105 + 55 and 35 + 93, together 288.
PROBLEM = {
    "task": "gsm_symbolic",
    "question": "t11 : 3 , 3 5 , 9 3 , 3 8",
    "kind": 11,
    "numbers": [3, 35, 93, 38],
    "statements": ["1*0", "2-3", "4+5", "1+2", "6+7"],
}
RIGHT = [
    "3 5 * 3 = 1 0 5",
    "9 3 - 3 8 = 5 5",
    "1 0 5 + 5 5 = 1 6 0",
    "3 5 + 9 3 = 1 2 8",
    "1 6 0 + 1 2 8 = 2 8 8 \\boxed{ 2 8 8 }",
]


def judged(*statements):
    return TASK.first_error(PROBLEM, [f"{statement} </thought>" for statement in statements])


def test_the_solution_is_worked_out_by_hand():
    assert TASK.solution(PROBLEM) == [f"{statement} </thought>" for statement in RIGHT]
    assert TASK.answer(PROBLEM) == "2 8 8"
    assert judged(*RIGHT) == 0


def test_statements_may_come_in_another_order_and_sums_turned_round():
    assert judged("9 3 + 3 5 = 1 2 8", RIGHT[1], "3 * 3 5 = 1 0 5", RIGHT[2], RIGHT[4]) == 0


@pytest.mark.parametrize(
    ("place", "statement"),
    [
        (1, "3 5 + 3 = 3 8"),  # true, but not of the solution
        (1, "3 5 * 3 = 1 0 6"),  # false
        (2, "3 8 - 9 3 = 5 5"),  # a difference turned round
        (2, "3 5 * 3 = 1 0 5"),  # made before
        (3, "1 0 5 + 5 5 = 1 6 0 \\boxed{ 1 6 0 }"),  # boxed too early
        (4, "35 + 93 = 128"),  # other words
        (5, "1 6 0 + 1 2 8 = 2 8 8"),  # not boxed
        (5, "1 6 0 + 1 2 8 = 2 8 8 \\boxed{ 2 8 9 }"),
    ],
)
def test_a_wrong_statement_is_the_first_error(place, statement):
    assert judged(*RIGHT[: place - 1], statement, *RIGHT[place:]) == place


def test_results_are_whole_numbers_from_zero():
    assert [operate(7, "/", 0), operate(7, "/", 2), operate(2, "-", 3)] == [None, None, None]
    assert [operate(8, "/", 2), operate(0, "*", 3)] == [4, 0]
    assert work_out([7, 2], ["0/1"]) == []
    assert [number(spaced(n)) for n in (0, 7, 10, 105)] == [0, 7, 10, 105]


def test_every_row_has_the_answer_of_the_library():
    """The texts are the library's; three of their answers were worked out by hand."""
    problems = {p["question"]: p for p in TASK.problems(Difficulty(largest=499))}
    by_kind = {p["kind"]: p for p in problems.values()}
    assert len(by_kind) == 11
    assert all(p["text"] and max(p["numbers"]) <= 499 for p in problems.values())
    for kind, numbers, result in ((43, [18, 2], "3 4"), (54, [97, 23, 66], "8"), (16, [5, 2, 65], "2 6")):
        assert TASK.answer({"numbers": numbers, "statements": by_kind[kind]["statements"]}) == result


def test_difficulty_bounds_statements_and_numbers():
    problems = TASK.problems(Difficulty(statements=(3, 7), largest=150))
    assert problems
    for problem in problems:
        worked = work_out(problem["numbers"], problem["statements"])
        assert 3 <= len(worked) <= 7
        assert max(*problem["numbers"], *(w[3] for w in worked)) <= 150


def test_misconceptions_are_other_operators():
    statements = {p["kind"]: p["statements"] for p in TASK.problems(Difficulty(largest=499))}
    assert len(misconceptions()) > 10
    for (kind, i), (operator, rate) in misconceptions().items():
        assert operator not in statements[kind][i]
        assert 0.2 <= rate <= 0.7
