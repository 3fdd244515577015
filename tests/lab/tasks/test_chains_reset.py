"""The family chains_reset: hard steps, checks and first errors by hand, and what its teacher does."""

import random

import pytest

from creditgraph.components.tasks import TASKS
from creditgraph.lab.tasks.chains_reset import EASY, HARD, Difficulty, apply_step, late_steps, preferred

TASK = TASKS["chains_reset"]
# 7 + 2 = 9;  9 · 3 = 27 = 1 (mod 13);  1 − 1 = 0
PROBLEM = {
    "task": "chains_reset",
    "question": "7 s1 +2 s2 *3 s3 -1",
    "start": 7,
    "steps": ["+2", "*3", "-1"],
}
FIRST, SECOND, LAST = ["s1 +2 9 </thought>", "s2 *3 1 </thought>", "s3 -1 0 \\boxed{ 0 } </thought>"]
WRONG, REPAIR = "s2 *3 5 </thought>", f"check {SECOND}"


@pytest.mark.parametrize(
    ("thoughts", "error"),
    [
        ([FIRST, SECOND, LAST], 0),
        ([FIRST, WRONG, REPAIR, LAST], 0),
        ([FIRST, SECOND, REPAIR, LAST], 0),  # a check that finds nothing
        ([FIRST, WRONG, "s3 -1 4 \\boxed{ 4 } </thought>"], 2),
        ([FIRST, WRONG, LAST], 2),  # the right value again, but step 2 was never repaired
        ([FIRST, WRONG, f"check {WRONG}", LAST], 2),  # a check that repairs nothing
        ([FIRST, WRONG], 2),
        ([FIRST, "s2 *4 5 </thought>", REPAIR, LAST], 2),  # another step
        ([FIRST, WRONG, REPAIR, REPAIR, LAST], 4),  # one check per step
        ([FIRST, SECOND], 3),
        ([FIRST, SECOND, "s3 -1 8 \\boxed{ 8 } </thought>"], 3),
        ([FIRST, SECOND, LAST, FIRST], 4),
        ([REPAIR, FIRST, SECOND, LAST], 1),
        ([], 1),
    ],
)
def test_first_errors_by_hand(thoughts, error):
    assert TASK.solution(PROBLEM) == [FIRST, SECOND, LAST]
    assert TASK.first_error(PROBLEM, thoughts) == error
    assert TASK.accepts(PROBLEM, thoughts, "0") == (error == 0)


def test_hard_steps_are_where_the_difficulty_says():
    for i in range(40):
        problem = TASK.generate(0, i)
        assert len(problem["steps"]) == 24
        assert problem["hard_steps"] == [k for k, step in enumerate(problem["steps"], 1) if step in HARD]
        assert 2 <= len(problem["hard_steps"]) <= 3
        assert all(18 < k < 24 for k in problem["hard_steps"])
    assert late_steps(24, 0.75) == [19, 20, 21, 22, 23]


def test_the_preferred_value_of_a_product_is_wrong():
    assert all(
        0 <= preferred(v, step) < 13 and preferred(v, step) != apply_step(v, step) for v in range(13) for step in HARD
    )


def test_the_teacher_errs_at_hard_steps_alone_and_solves_as_often_as_its_rates_say():
    """A hard step is passed with chance .3 + .7 · .1 = .37, so two are passed with .137 and three with .051."""
    for count, expected in ((2, 0.37**2), (3, 0.37**3)):
        draw, right, total = random.Random(count).random, 0, 3000
        problems = [TASK.generate(1, i, Difficulty(hard=(count, count))) for i in range(30)]
        for i in range(total):
            problem = problems[i % 30]
            thoughts = TASK.attempt(problem, draw)
            error = TASK.first_error(problem, thoughts)
            assert error == 0 or not any(f" {step} " in thoughts[error - 1] for step in EASY)
            right += error == 0
        assert abs(right / total - expected) < 4 * (expected * (1 - expected) / total) ** 0.5


def test_the_longest_response_fits_in_the_tokens_of_the_toy_recipes():
    """24 steps of 4 words, a box of 3, the end, and 3 checks of 5: 96 + 3 + 1 + 15 = 115 of 128."""
    problem = TASK.generate(0, 0, Difficulty(hard=(3, 3)))
    thoughts = TASK.attempt(problem, lambda: 0.0)  # every hard step wrong and checked
    assert len([word for thought in thoughts for word in thought.split()]) + 1 == 115


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"steps": (24, 25)}, "steps: expected 2 ≤ fewest ≤ most ≤ 24, got [24, 25]."),
        ({"hard_after": 1.0}, "expected 0 ≤ hard_after < 1, got 1.0."),
        ({"hard": (2, 6)}, "hard: expected [fewest, most] with most ≤ 5, the steps after the first 75% of 24"),
    ],
)
def test_impossible_difficulty_is_refused(settings, text):
    with pytest.raises(ValueError, match="expected") as error:
        Difficulty(**settings)
    assert text in str(error.value)
