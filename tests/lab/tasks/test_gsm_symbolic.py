"""The family gsm_symbolic: statements judged by hand."""

import pytest

from creditgraph.components.tasks import TASKS
from creditgraph.lab.tasks.gsm_symbolic import Difficulty, misconceptions, number, operate, spaced, work_out

TASK = TASKS["gsm_symbolic"]
# Two kinds of puzzles: 12 times 3 minutes and 4 times 5 minutes; 36 + 20 = 56. Digits are written units first.
PROBLEM = {
    "task": "gsm_symbolic",
    "question": "t12 : 3 0 , 5 0 , 2 1 , 4 0",
    "kind": 12,
    "numbers": [3, 5, 12, 4],
    "statements": ["0*2", "1*3", "4+5"],
}
RIGHT = ["3 0 * 2 1 = 6 3", "5 0 * 4 0 = 0 2", "6 3 + 0 2 = 6 5 \\boxed{ 6 5 }"]


def judged(*statements):
    return TASK.first_error(PROBLEM, [f"{statement} </thought>" for statement in statements])


def test_the_solution_is_worked_out_by_hand():
    assert TASK.solution(PROBLEM) == [f"{statement} </thought>" for statement in RIGHT]
    assert TASK.answer(PROBLEM) == "6 5"
    assert judged(*RIGHT) == 0


def test_statements_may_come_in_another_order_and_sums_turned_round():
    assert judged("4 0 * 5 0 = 0 2", "2 1 * 3 0 = 6 3", "0 2 + 6 3 = 6 5 \\boxed{ 6 5 }") == 0


@pytest.mark.parametrize(
    ("place", "statement"),
    [
        (1, "3 0 + 2 1 = 5 1"),  # true, but not of the solution
        (1, "3 0 * 2 1 = 7 3"),  # false
        (2, "3 0 * 2 1 = 6 3"),  # made before
        (2, "5 0 * 4 0 = 0 2 \\boxed{ 0 2 }"),  # boxed too early
        (2, "5 * 4 = 20"),  # other words
        (3, "6 3 + 0 2 = 6 5"),  # not boxed
        (3, "6 3 + 0 2 = 6 5 \\boxed{ 5 6 }"),
    ],
)
def test_a_wrong_statement_is_the_first_error(place, statement):
    assert judged(*RIGHT[: place - 1], statement, *RIGHT[place:]) == place


def test_a_difference_is_not_turned_round():
    # 97 − 23 = 74, 74 − 66 = 8
    problem = PROBLEM | {"numbers": [97, 23, 66], "statements": ["0-1", "3-2"]}
    assert TASK.solution(problem)[0] == "7 9 - 3 2 = 4 7 </thought>"
    assert TASK.first_error(problem, ["3 2 - 7 9 = 4 7 </thought>"]) == 1


def test_results_are_whole_numbers_from_zero():
    assert [operate(7, "/", 0), operate(7, "/", 2), operate(2, "-", 3)] == [None, None, None]
    assert [operate(8, "/", 2), operate(0, "*", 3)] == [4, 0]
    assert work_out([7, 2], ["0/1"]) == []
    assert [number(spaced(n)) for n in range(100)] == list(range(100))


def test_every_template_leads_to_the_answer_of_its_text():
    """The answers of three texts were worked out by hand."""
    problems = TASK.problems(Difficulty())
    by_kind = {p["kind"]: p for p in problems}
    assert len(by_kind) == 8
    assert all(p["text"] and max(p["numbers"]) <= 99 for p in problems)
    for kind, numbers, result in ((43, [18, 2], 34), (54, [97, 23, 66], 8), (16, [5, 2, 65], 26)):
        assert number(TASK.answer({"numbers": numbers, "statements": by_kind[kind]["statements"]})) == result


def test_difficulty_bounds_statements_and_numbers():
    problems = TASK.problems(Difficulty(statements=(3, 3), largest=80))
    assert problems
    for problem in problems:
        worked = work_out(problem["numbers"], problem["statements"])
        assert len(worked) == 3
        assert max(*problem["numbers"], *(w[3] for w in worked)) <= 80


def test_misconceptions_are_other_operators():
    statements = {p["kind"]: p["statements"] for p in TASK.problems(Difficulty())}
    assert len(misconceptions()) > 8
    for (kind, i), (operator, rate) in misconceptions().items():
        assert operator not in statements[kind][i]
        assert 0.2 <= rate <= 0.7
