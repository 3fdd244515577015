"""The family path_star: walks judged by hand."""

import pytest

from components.tasks import TASKS
from components.tasks.path_star import Difficulty
from components.text.templates import extract_answer

TASK = TASKS["path_star"]
# Three arms of two edges: 7-3-8, 7-9-4, 7-5-6; the goal is 4.
PROBLEM = {
    "task": "path_star",
    "question": "",
    "edges": [[3, 8], [7, 9], [9, 4], [7, 3], [7, 5], [5, 6]],
    "start": 7,
    "goal": 4,
    "moves": 5,
}
END = "9 4 \\boxed{ 4 }"


def walk(*moves):
    """(first error, whether the walk is accepted)."""
    thoughts = [f"{move} </thought>" for move in moves]
    return TASK.first_error(PROBLEM, thoughts), TASK.accepts(PROBLEM, thoughts, extract_answer(" ".join(thoughts)))


@pytest.mark.parametrize(
    ("moves", "error", "accepted"),
    [
        (("7 9", END), 0, True),
        (("7 3", "3 8", "back", "7 9", END), 1, True),  # a wrong arm, and five moves
        (("7 3", "back", "7 9", END), 1, True),  # left half-way
        (("7 9", "back", "7 9", END), 2, True),  # back from the right arm
        (("7 3", "3 8", "back", "7 5", "back", "7 9", END), 1, False),  # too many moves
        (("7 3", "3 8 \\boxed{ 8 }"), 1, False),  # a dead end is not the goal
        (("7 3", "3 8 \\boxed{ 4 }"), 1, False),
        (("7 9", "9 4"), 2, False),  # not boxed
        (("9 4 \\boxed{ 4 }",), 1, False),  # not where the policy is
        (("7 4 \\boxed{ 4 }",), 1, False),  # no edge
        (("back",), 1, False),  # already at the start
        (("7 9", END, "back"), 3, False),  # beyond the end
        (("7 9",), 2, False),  # unfinished
        (("7 9", "x y", END), 2, False),
        ((), 1, False),
    ],
)
def test_walks(moves, error, accepted):
    assert walk(*moves) == (error, accepted)


def test_moves_suffice_for_as_many_arms_as_tries():
    for tries, moves in ((1, 2), (2, 5), (3, 8)):
        problem = TASK.generate(0, 0, Difficulty(length=(2, 2), tries=tries))
        assert problem["moves"] == moves


def test_difficulty_bounds_arms_and_length():
    problems = TASK.problems(Difficulty(arms=(2, 3), length=(3, 4)))
    arms = {sum(a == p["start"] for a, _ in p["edges"]) for p in problems}
    assert arms == {2, 3}
    assert {len(p["edges"]) for p in problems} == {6, 8, 9, 12}


@pytest.mark.parametrize("node", ["²", "9" * 5000, "x"], ids=["superscript", "long", "word"])
def test_a_move_to_no_node_is_wrong_whatever_it_is(node):
    assert TASK.first_error(PROBLEM, [f"7 {node} </thought>"]) == 1
