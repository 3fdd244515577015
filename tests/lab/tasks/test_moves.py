"""Tasks with moves: rules and first errors by hand, distances against a slow search, exact values."""

import itertools
import math
import random

import pytest
import torch

from creditgraph.components.tasks import TASKS
from creditgraph.components.tasks.base import THOUGHT_END, split_thoughts
from creditgraph.components.verifier.base import Item
from creditgraph.components.verifier.steps import Steps
from creditgraph.lab.tasks.exact import history_values, markov_values
from creditgraph.lab.tasks.hanoi import Difficulty as HanoiDifficulty
from creditgraph.lab.tasks.jugs import Difficulty as JugsDifficulty
from creditgraph.lab.tasks.moves import MoveDifficulty, distances
from creditgraph.pipeline.core.handles import Scores
from creditgraph.pipeline.core.jagged import Jagged

HANOI, JUGS = TASKS["hanoi"], TASKS["jugs"]
# Two disks from peg x to peg y: z1, y2, y1 is the only way in three moves; four are allowed, so one may be lost.
TOWER = {"task": "hanoi", "question": "x1 x2 to y1 y2 in 4", "start": [0, 0], "goal": [1, 1], "moves": 4}
RIGHT = ["z1 : z1 x2 </thought>", "y2 : z1 y2 </thought>", "y1 : y1 y2 \\boxed{ done } </thought>"]
WASTED = "y1 : y1 x2 </thought>"
# 3 and 5 litres to 4: fill b, pour b a, empty a, pour b a, fill b, pour b a.
DIE_HARD = {"task": "jugs", "question": "3 5 : 0 0 to 4 in 6", "capacity": [3, 5], "start": [0, 0], "target": 4} | {
    "moves": 6
}


def test_solutions_by_hand():
    assert HANOI.solution(TOWER) == RIGHT
    assert [t.removesuffix(f" {THOUGHT_END}") for t in JUGS.solution(DIE_HARD)] == [
        "fill b : 0 5",
        "pour b a : 3 2",
        "empty a : 0 2",
        "pour b a : 2 0",
        "fill b : 2 5",
        "pour b a : 3 4 \\boxed{ done }",
    ]


@pytest.mark.parametrize(
    ("thoughts", "error"),
    [
        (RIGHT, 0),
        ([WASTED, "z1 : z1 x2 </thought>", *RIGHT[1:]], 0),  # one useless move, undone within the budget
        ([WASTED, "x1 : x1 x2 </thought>", *RIGHT], 2),  # after the second one, three moves are needed and two remain
        (["y2 : x1 y2 </thought>"], 1),  # the small disk lies on it
        ([RIGHT[0], "z2 : z1 z2 </thought>"], 2),  # onto a smaller disk
        ([RIGHT[0], "y2 : z1 x2 </thought>"], 2),  # the state is misreported
        ([RIGHT[0], "y2 : z1 y2 \\boxed{ done } </thought>"], 2),  # boxed before the goal
        ([*RIGHT[:2], "y1 : y1 y2 </thought>"], 3),  # not boxed at the goal
        (RIGHT[:2], 3),  # ends too early
        ([], 1),
        ([*RIGHT, WASTED], 4),  # goes on
        (["z1  : z1 x2</thought>", *RIGHT[1:2], RIGHT[2] + " <eos>"], 0),  # white space does not matter
    ],
)
def test_first_errors_by_hand(thoughts, error):
    assert HANOI.first_error(TOWER, thoughts) == error
    assert HANOI.accepts(TOWER, thoughts, "done") == (error == 0)


def test_remarks_by_hand():
    """The way to the goal after each thought: of three moves two are left, then one; a useless one leaves three."""
    assert [HANOI.remark(TOWER, RIGHT[:i]) for i in range(4)] == ["3", "2", "1", "0"]
    assert HANOI.remark(TOWER, [WASTED]) == "3"
    assert HANOI.remark(TOWER, ["y2 : x1 y2 </thought>"]) == ""
    assert HANOI.remark(TOWER, ["y2 : x1 y2 </thought>", RIGHT[0]]) == ""


def test_jugs_moves_by_hand():
    following = JUGS.legal(DIE_HARD, (3, 2))
    assert following == {"fill b": (3, 5), "empty a": (0, 2), "empty b": (3, 0), "pour a b": (0, 5)}


@pytest.mark.parametrize("task", [HANOI, JUGS])
def test_distances_equal_a_slow_search(task):
    """Iterative deepening over all sequences of moves."""

    def reachable(problem, state, depth):
        if task.is_goal(problem, state):
            return True
        return depth > 0 and any(reachable(problem, s, depth - 1) for s in task.legal(problem, state).values())

    for i in range(6):
        problem = task.generate(5, i)
        far = distances(task, problem)
        for state in list(far)[:6]:
            assert next(d for d in itertools.count() if reachable(problem, state, d)) == far[state]


def test_the_tower_needs_two_to_the_n_minus_one_moves():
    for disks in (1, 2, 3, 4):
        problem = {"start": [0] * disks, "goal": [2] * disks}
        assert distances(HANOI, problem)[(0,) * disks] == 2**disks - 1


@pytest.mark.parametrize("task", [HANOI, JUGS])
def test_difficulty_bounds_hold(task):
    difficulty = task.difficulty(distance=(2, 3), slack=(1, 2))
    for i in range(40):
        problem = task.generate(0, i, difficulty)
        steps = len(task.solution(problem))
        assert 2 <= steps <= 3
        assert 1 <= problem["moves"] - steps <= 2
        assert problem["question"].endswith(f" in {problem['moves']}")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: MoveDifficulty(distance=(3, 2)), "distance: expected 1 ≤ fewest ≤ most, got [3, 2]."),
        (lambda: MoveDifficulty(slack=(-1, 2)), "slack: expected 0 ≤ fewest ≤ most, got [-1, 2]."),
        (lambda: MoveDifficulty(distance=(3, 10)), "distance and slack: expected at most 12 moves in all, got 13."),
        (lambda: HanoiDifficulty(disks=5), "disks: expected 1 to 4, got 5."),
        (lambda: HanoiDifficulty(disks=2, distance=(4, 5)), "no two positions of 2 disks are 4 moves apart"),
        (lambda: JugsDifficulty(capacity=(6, 2)), "capacity: expected 1 ≤ smallest < largest ≤ 9, got [6, 2]."),
    ],
)
def test_impossible_difficulty_is_refused(make, text):
    with pytest.raises(ValueError, match="expected") as error:
        make()
    assert text in str(error.value)


def test_the_verifier_runs_the_simulator():
    def verdict(text, metadata):
        return Steps().verdict(Item(text=text, answer="done", metadata=metadata))

    assert verdict(" ".join(RIGHT), TOWER).correct
    claimed = verdict("\\boxed{ done } </thought>", TOWER)
    assert not claimed.correct
    assert claimed.detail == "step 1 of 1 is the first wrong one"
    unknown = verdict(" ".join(RIGHT), {"task": "gsm8k"})
    assert not unknown.valid
    assert "the prompt is of no task family" in unknown.detail


def uniform_policy(task, problem, share=0.9):
    """Every legal thought is equally likely, and a tenth of all thoughts is nonsense."""

    def policy(state, left):
        thoughts = task.thoughts_from(problem, state)
        return dict.fromkeys(thoughts, share / len(thoughts))

    return policy


def test_markov_values_by_hand():
    """One disk from x to y in two moves: directly (1/2), or over z and then to y (1/2 · 1/2)."""
    problem = {"task": "hanoi", "question": "x1 to y1 in 2", "start": [0], "goal": [1], "moves": 2}
    values = markov_values(HANOI, problem, uniform_policy(HANOI, problem, 1.0))
    assert values == {((0,), 2): 0.75, ((2,), 1): 0.5}


@pytest.mark.parametrize("task", [HANOI, JUGS])
def test_exact_values_equal_monte_carlo_within_four_standard_errors(task):
    problem = task.generate(0, 1, task.difficulty(distance=(2, 2), slack=(2, 3)))
    policy = uniform_policy(task, problem)
    exact = markov_values(task, problem, policy)[tuple(problem["start"]), problem["moves"]]
    draw = torch.Generator().manual_seed(0)
    count, solved = 2000, 0
    for _ in range(count):
        state, thoughts = tuple(problem["start"]), []
        for left in range(problem["moves"], 0, -1):
            chances = policy(state, left)
            named = [*chances, f"nonsense {THOUGHT_END}"]
            weights = torch.tensor([*chances.values(), 1 - sum(chances.values())])
            thoughts.append(named[int(torch.multinomial(weights, 1, generator=draw))])
            state = task.thoughts_from(problem, state).get(thoughts[-1])
            if state is None or task.is_goal(problem, state):
                break
        solved += task.accepts(problem, split_thoughts(" ".join(thoughts)), None)
    error = math.sqrt(exact * (1 - exact) / count)
    assert 0.01 < exact < 0.99
    assert abs(solved / count - exact) < 4 * error


class WordPolicy:
    """Scores every word alike, as the n-th root of one over the number of thoughts: a uniform policy over thoughts."""

    class tokenizer:
        @staticmethod
        def encode(text, add_special_tokens):
            return [len(word) for word in text.split()]

    def __init__(self, chance):
        self.chance = chance

    def score(self, context, tokens, temperature=1.0):
        rows = [[math.log(self.chance) / len(row)] * len(row) for row in tokens.to_lists()]
        scores = Jagged.from_rows(rows, torch.float32)
        return Scores(logprobs=scores, entropies=scores)


def test_values_over_histories_equal_values_over_states_for_a_policy_without_memory():
    problem = TOWER
    values = history_values(HANOI, problem, WordPolicy(0.2))

    def policy(state, left):
        return dict.fromkeys(HANOI.thoughts_from(problem, state), 0.2)

    expected = markov_values(HANOI, problem, policy)
    assert values[()] == pytest.approx(expected[(0, 0), 4], rel=1e-5)
    # After one useless move the small disk is on y and three moves are left.
    assert values[(WASTED,)] == pytest.approx(expected[(1, 0), 3], rel=1e-5)
    assert 0 < values[()] < values[(RIGHT[0],)] < values[tuple(RIGHT[:2])] < 1


@pytest.mark.parametrize("task", [HANOI, JUGS])
def test_a_teacher_that_always_slips_reports_states_after_legal_moves_and_goes_on_from_them(task, monkeypatch):
    monkeypatch.setattr(type(task), "slip", 1.0)
    draw, wrong = random.Random(0).random, 0
    for i in range(20):
        problem = task.generate(0, i)
        state = tuple(problem["start"])
        for thought in task.attempt(problem, draw):
            following = task.legal(problem, state)
            wrong += thought not in task.thoughts_from(problem, state)
            (state,) = {s for s in following.values() if f": {task.state_words(s)} " in thought}
    assert wrong > 20
