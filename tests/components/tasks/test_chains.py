"""The embedded task: problems, solutions, and the oracle that finds the first error."""

import json

import pytest

from creditgraph.components.tasks import TASKS, chains
from creditgraph.components.tasks.base import SPLITS, split_thoughts
from creditgraph.components.tasks.chains import Chains, Difficulty
from creditgraph.pipeline.core.errors import DataError

CHAINS = TASKS["chains"]

# 7 * 4 = 28 = 2 (mod 13);  2 + 3 = 5;  5 - 9 = -4 = 9 (mod 13)
PROBLEM = {
    "task": "chains",
    "template": "chains",
    "question": "7 s1 * 4 s2 + 3 s3 - 9",
    "modulus": 13,
    "start": 7,
    "steps": [["*", 4], ["+", 3], ["-", 9]],
}
RIGHT = ["s1 7 * 4 2 </thought>", "s2 2 + 3 5 </thought>", "s3 5 - 9 9 \\boxed{ 9 } </thought>"]


def test_a_problem_by_hand():
    assert CHAINS.solution(PROBLEM) == RIGHT
    assert CHAINS.answer(PROBLEM) == "9"
    assert TASKS["chains"].solve_prompt(PROBLEM["question"]) == "<solve> 7 s1 * 4 s2 + 3 s3 - 9 </problem>"
    assert chains.true_facts(PROBLEM) == [(7, "*", 4), (2, "+", 3), (5, "-", 9)]


@pytest.mark.parametrize(
    ("thoughts", "error"),
    [
        (RIGHT, 0),
        (["s1 7 * 4 3 </thought>", *RIGHT[1:]], 1),  # wrong value
        (
            [RIGHT[0], "s2 2 + 3 6 </thought>", "s3 6 - 9 10 \\boxed{ 10 } </thought>"],
            2,
        ),  # a carried value does not hide the origin
        ([RIGHT[0], "s2 3 + 3 6 </thought>", RIGHT[2]], 2),  # wrong value before
        ([RIGHT[0], "s2 2 + 4 6 </thought>"], 2),  # another operand than the problem's
        ([RIGHT[0], RIGHT[2]], 2),  # a skipped step
        ([RIGHT[0], "s2 2 + 3 5 \\boxed{ 5 } </thought>"], 2),  # boxed too early
        ([*RIGHT[:2], "s3 5 - 9 9 </thought>"], 3),  # nothing boxed
        ([*RIGHT[:2], "s3 5 - 9 9 \\boxed{ 8 } </thought>"], 3),  # another value boxed
        ([*RIGHT[:2], "s3 5 - 9"], 3),  # cut short
        (RIGHT[:2], 3),  # the missing thought
        ([], 1),
        ([*RIGHT, "s4 9 + 2 11 </thought>"], 4),  # goes on after the end
        (["s1  7 * 4 2</thought>", " s2 2 + 3 5 </thought>", RIGHT[2] + " <eos>"], 0),  # white space does not matter
    ],
)
def test_first_error_by_hand(thoughts, error):
    assert CHAINS.first_error(PROBLEM, thoughts) == error


def test_split_thoughts_undoes_joining():
    assert split_thoughts(" ".join(RIGHT) + " <eos>") == RIGHT
    assert split_thoughts("s1 7 * 4 2 </thought> s2 2 +") == [RIGHT[0], "s2 2 +"]
    assert split_thoughts(" <eos>") == []


def test_every_corruption_of_a_generated_chain_is_found_where_it_was_made():
    for index in range(50):
        problem = CHAINS.generate(3, index, Difficulty(hard_facts=None))
        thoughts = CHAINS.solution(problem)
        place = index % (len(thoughts) - 1)
        words = thoughts[place].split()
        words[4] = str((int(words[4]) + 1) % 13)
        thoughts[place] = " ".join(words)
        assert CHAINS.first_error(problem, thoughts) == place + 1


def test_same_key_same_problem_and_json():
    first = [CHAINS.generate(1, i) for i in range(20)]
    assert first == [CHAINS.generate(1, i) for i in range(20)] == json.loads(json.dumps(first))
    assert first != [CHAINS.generate(2, i) for i in range(20)]
    # Problem 5 does not depend on the problems before it.
    assert CHAINS.generate(1, 5) == first[5]


def test_splits_never_share_a_question():
    easy = Difficulty(steps=(1, 2), hard_facts=None)  # so few problems exist that splits would collide
    drawn = {split: {CHAINS.generate(0, i, easy, split)["question"] for i in range(1500)} for split in SPLITS}
    assert all(len(questions) > 300 for questions in drawn.values())
    assert not drawn["train"] & drawn["eval"]
    assert not drawn["train"] & drawn["validation"]
    assert not drawn["eval"] & drawn["validation"]


@pytest.mark.parametrize("bounds", [(1, 1), (0, 0), (3, 5)])
def test_difficulty_bounds_hold(bounds):
    hard = chains.load_misconceptions()
    for index in range(30):
        problem = CHAINS.generate(0, index, Difficulty(steps=(6, 9), hard_facts=bounds))
        on_path = [fact in hard for fact in chains.true_facts(problem)]
        assert bounds[0] <= sum(on_path) <= bounds[1]
        assert problem["hard_steps"] == [i for i, h in enumerate(on_path, 1) if h]
        assert 6 <= len(problem["steps"]) <= 9


def test_hard_steps_can_be_kept_late():
    for index in range(20):
        problem = CHAINS.generate(0, index, Difficulty(hard_facts=(1, 2), hard_after=0.6))
        assert problem["hard_steps"]
        assert min(problem["hard_steps"]) > 0.6 * len(problem["steps"])


def test_operators_and_modulus_are_settings():
    problem = CHAINS.generate(0, 0, Difficulty(operators="-", modulus=7, hard_facts=None))
    assert {operator for operator, _ in problem["steps"]} == {"-"}
    assert int(CHAINS.answer(problem)) == (problem["start"] - sum(operand for _, operand in problem["steps"])) % 7


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"steps": (3, 13)}, "steps: expected 1 ≤ fewest ≤ most ≤ 12, got [3, 13]."),
        (
            {"steps": (4, 5), "hard_facts": (6, 7)},
            "hard_facts: expected [fewest, most] with fewest ≤ 4, the fewest steps, got [6, 7].",
        ),
        ({"operators": "+/"}, "operators: expected some of '+-*', got '+/'."),
        ({"hard_after": 1.0}, "hard_after: expected 0 ≤ hard_after < 1, and hard_facts with it, got 1.0"),
        ({"hard_facts": None, "hard_after": 0.5}, "and hard_facts with it, got 0.5"),
        ({"modulus": 17}, "expected 2 ≤ modulus ≤ 13, as the shipped model has no numbers above 12, got 17."),
    ],
)
def test_impossible_difficulty_is_refused(settings, text):
    with pytest.raises(ValueError, match="expected") as error:
        Difficulty(**settings)
    assert text in str(error.value)


def test_unknown_split_and_unmeetable_bounds():
    with pytest.raises(DataError, match=r"chains: split 'evla' does not exist. Did you mean 'eval'\?"):
        CHAINS.generate(0, 0, split="evla")
    with pytest.raises(DataError, match=r"no problem of Difficulty.* in 20000 draws"):
        Chains({}).generate(0, 0, Difficulty(steps=(2, 2), hard_facts=(1, 1)))


def test_missing_misconceptions_name_the_file(tmp_path):
    with pytest.raises(DataError, match=r"misconceptions.json: the list of misconceptions cannot be read"):
        chains.load_misconceptions(tmp_path)
