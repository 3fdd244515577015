"""The family path_star: first errors and exact values by hand, and what its graphs are."""

import random

import pytest

from creditgraph.components.tasks import TASKS
from creditgraph.lab.tasks.exact import markov_values
from creditgraph.lab.tasks.moves import distances
from creditgraph.lab.tasks.path_star import Difficulty

TASK = TASKS["path_star"]
# Two arms of two edges: 3-7-1 with the goal, and 3-5-2.
PROBLEM = {
    "task": "path_star",
    "question": "3-7 5-2 3-5 7-1 : n3 to n1 in 4",
    "start": [3],
    "goal": [1],
    "edges": [3, 7, 5, 2, 3, 5, 7, 1],
    "moves": 4,
}
RIGHT, BACK, OTHER, LEFT = (f"{edge} </thought>" for edge in ("3-7", "7-3", "3-5", "5-3"))
GOAL = "7-1 \\boxed{ done } </thought>"


@pytest.mark.parametrize(
    ("thoughts", "error"),
    [
        ([RIGHT, GOAL], 0),
        ([OTHER, LEFT, RIGHT, GOAL], 0),  # a wrong arm, left at once
        ([RIGHT, BACK, RIGHT, GOAL], 0),
        (
            [OTHER, "5-2 </thought>", "2-5 </thought>", LEFT],
            2,
        ),  # from the end of the dead end, four moves are needed and two remain
        ([RIGHT, OTHER], 2),  # not from where the walk is
        (["3-2 </thought>"], 1),  # no edge
        ([GOAL], 1),
        ([RIGHT, "7-1 </thought>"], 2),  # not boxed at the goal
        ([OTHER, LEFT], 3),
    ],
)
def test_first_errors_by_hand(thoughts, error):
    assert TASK.solution(PROBLEM) == [RIGHT, GOAL]
    assert TASK.first_error(PROBLEM, thoughts) == error
    assert TASK.accepts(PROBLEM, thoughts, "done") == (error == 0)


def test_exact_values_by_hand():
    """A uniform walk: from 7 with one move left 1/2; with three left 1/2 + 1/2 · V(3, 2); V(3, 2) = 1/2 · 1/2.

    From 5 with three moves left it has to go back: 1/2 · V(3, 2) = 1/8. So V(3, 4) = (5/8 + 1/8) / 2.
    """

    def policy(state, left):
        thoughts = TASK.thoughts_from(PROBLEM, state)
        return dict.fromkeys(thoughts, 1 / len(thoughts))

    values = markov_values(TASK, PROBLEM, policy)
    assert (values[(7,), 1], values[(3,), 2], values[(7,), 3], values[(5,), 3]) == (0.5, 0.25, 0.625, 0.125)
    assert values[(3,), 4] == 0.375


def test_graphs_are_stars_whose_arms_are_as_long_as_the_way_to_the_goal():
    for i in range(60):
        problem = TASK.generate(0, i)
        edges = list(zip(problem["edges"][::2], problem["edges"][1::2], strict=True))
        nodes = {node for edge in edges for node in edge}
        centre = problem["start"][0]
        length, degree = distances(TASK, problem)[(centre,)], sum(inner == centre for inner, _ in edges)
        assert len(nodes) == len(edges) + 1 == degree * length + 1
        outwards = [inner for inner, _ in edges if inner != centre]
        assert len(outwards) == len(set(outwards))  # no node but the centre branches
        assert all(2 <= number <= 3 for number in (length, degree))
        assert 0 <= problem["moves"] - length <= 2


def test_the_first_node_does_not_tell_the_arm():
    """Edges and numbers are in any order: the right first node is the first edge's as often as any other arm's."""
    difficulty, first, total = Difficulty(distance=(2, 2), degree=(3, 3)), 0, 400
    for i in range(total):
        problem = TASK.generate(0, i, difficulty)
        starts = [
            o for c, o in zip(problem["edges"][::2], problem["edges"][1::2], strict=True) if [c] == problem["start"]
        ]
        first += TASK.solution(problem)[0].split()[0] == f"{problem['start'][0]}-{starts[0]}"
    assert abs(first / total - 1 / 3) < 4 * (2 / 9 / total) ** 0.5


def test_a_teacher_without_certainty_is_seldom_right(monkeypatch):
    rates = {}
    for sure in (0.0, 1.0):
        monkeypatch.setattr(type(TASK), "sure", sure)
        draw = random.Random(0).random
        problems = [TASK.generate(0, i) for i in range(200)]
        rates[sure] = sum(TASK.first_error(p, TASK.attempt(p, draw)) == 0 for p in problems) / 200
    assert rates[0.0] < 0.25 < rates[1.0] == 1


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"degree": (1, 3)}, "degree: expected 2 ≤ fewest ≤ most, got [1, 3]."),
        ({"degree": (4, 6)}, "degree and distance: expected at most 13 nodes, got 19."),
    ],
)
def test_impossible_difficulty_is_refused(settings, text):
    with pytest.raises(ValueError, match="expected") as error:
        Difficulty(**settings)
    assert text in str(error.value)
