"""The family chains_reset: hard steps, repairs and first errors by hand, and what its teacher does."""

import random

import pytest

from components.tasks import TASKS
from components.tasks.chains import apply_step, true_facts
from components.tasks.chains_reset import ALL_FACTS, HARD, Difficulty, late_steps

TASK = TASKS["chains_reset"]
# 7 * 4 = 28 = 2 (mod 13);  2 + 3 = 5;  5 - 9 = -4 = 9 (mod 13)
PROBLEM = {
    "task": "chains_reset",
    "question": "7 s1 * 4 s2 + 3 s3 - 9",
    "modulus": 13,
    "start": 7,
    "steps": [["*", 4], ["+", 3], ["-", 9]],
}
FIRST, SECOND, LAST = ["s1 7 * 4 2 </thought>", "s2 2 + 3 5 </thought>", "s3 5 - 9 9 \\boxed{ 9 } </thought>"]
WRONG, REPAIR = "s2 2 + 3 6 </thought>", f"fix {SECOND}"


@pytest.mark.parametrize(
    ("thoughts", "error"),
    [
        ([FIRST, SECOND, LAST], 0),
        ([FIRST, WRONG, REPAIR, LAST], 0),
        ([FIRST, SECOND, REPAIR, LAST], 0),  # a check that finds nothing
        ([FIRST, WRONG, "s3 6 - 9 10 \\boxed{ 10 } </thought>"], 2),
        ([FIRST, WRONG, LAST], 2),  # the right value again, but step 2 was never repaired
        ([FIRST, WRONG, f"fix {WRONG}", LAST], 2),  # a repair that repairs nothing
        ([FIRST, WRONG], 2),
        ([FIRST, "s2 3 + 3 6 </thought>", REPAIR, LAST], 2),  # not the value after step 1
        ([FIRST, WRONG, REPAIR, REPAIR, LAST], 4),  # one repair per step
        ([FIRST, SECOND], 3),
        ([FIRST, SECOND, "s3 5 - 9 8 \\boxed{ 8 } </thought>"], 3),
        ([FIRST, SECOND, LAST, FIRST], 4),
        ([REPAIR, FIRST, SECOND, LAST], 1),
        ([], 1),
    ],
)
def test_first_errors_by_hand(thoughts, error):
    assert TASK.first_error(PROBLEM, thoughts) == error
    assert TASK.accepts(PROBLEM, thoughts, "9") == (error == 0)


def test_hard_steps_are_where_the_difficulty_says():
    for i in range(40):
        problem = TASK.generate(0, i)
        facts = true_facts(problem)
        assert problem["hard_steps"] == [k for k, fact in enumerate(facts, 1) if fact in HARD]
        assert 2 <= len(problem["hard_steps"]) <= 3
        assert all(12 < k < 16 for k in problem["hard_steps"])
    assert late_steps(16, 0.75) == [13, 14, 15]


def test_every_value_has_hard_and_easy_facts_and_hard_ones_a_wrong_value():
    for value in range(13):
        of_value = [fact in HARD for fact in ALL_FACTS if fact[0] == value]
        assert 0 < sum(of_value) < len(of_value)
    assert all(0 <= wrong < 13 and wrong != apply_step(*fact) for fact, wrong in HARD.items())


def test_the_teacher_solves_as_often_as_its_rates_say():
    """A hard step is passed with chance .3 + .7 · .1 = .37, so two are passed with .137 and three with .051."""
    for count, expected in ((2, 0.37**2), (3, 0.37**3)):
        draw, right, total = random.Random(count).random, 0, 3000
        problems = [TASK.generate(1, i, Difficulty(hard=(count, count))) for i in range(30)]
        for i in range(total):
            problem = problems[i % 30]
            right += TASK.first_error(problem, TASK.attempt(problem, draw)) == 0
        assert abs(right / total - expected) < 4 * (expected * (1 - expected) / total) ** 0.5


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"steps": (16, 17)}, "steps: expected 2 ≤ fewest ≤ most ≤ 16, got [16, 17]."),
        ({"hard_after": 1.0}, "expected 0 ≤ hard_after < 1, got 1.0."),
        ({"hard": (2, 4)}, "hard: expected [fewest, most] with most ≤ 3, the steps after the first 75% of 16"),
    ],
)
def test_impossible_difficulty_is_refused(settings, text):
    with pytest.raises(ValueError, match="expected") as error:
        Difficulty(**settings)
    assert text in str(error.value)
