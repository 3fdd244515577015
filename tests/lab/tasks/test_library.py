"""The families with problems of reasoning-gym: rows, splits, and what they share."""

import pytest

from creditgraph.components.tasks import TASKS
from creditgraph.components.tasks.base import in_split, split_thoughts
from creditgraph.components.text.templates import extract_answer
from creditgraph.lab.tasks.library import ROWS, LibraryTask, load_rows
from creditgraph.pipeline.core.errors import DataError
from tests.lab.tasks.streams import uniform

NAMES = ("gsm_symbolic", "mini_sudoku")


def test_the_shipped_rows_are_small():
    assert sum(path.stat().st_size for path in ROWS.glob("*.parquet")) <= 300_000


@pytest.mark.parametrize("name", NAMES)
def test_no_problem_is_in_two_splits_or_twice_in_one(name):
    task = TASKS[name]
    questions = [
        task.generate(0, i, split=split)["question"] for split in ("train", "validation", "eval") for i in range(100)
    ]
    assert len(set(questions)) == 300
    assert sorted(questions[:100]) != sorted(task.generate(1, i)["question"] for i in range(100))


@pytest.mark.parametrize("name", NAMES)
def test_every_row_has_a_right_solution_which_boxes_the_answer(name):
    task = TASKS[name]
    assert isinstance(task, LibraryTask)
    problems = task.problems(task.difficulty())
    assert len(problems) > 1000
    for problem in problems[::7]:
        thoughts = task.solution(problem)
        text = " ".join(thoughts)
        assert split_thoughts(text) == thoughts
        assert task.first_error(problem, thoughts) == 0
        assert task.accepts(problem, thoughts, extract_answer(text))
        assert extract_answer(text) == task.answer(problem)
        # A thought less, one more, and no text are wrong, each at its place.
        assert task.first_error(problem, thoughts[:-1]) == len(thoughts)
        assert task.first_error(problem, [*thoughts, thoughts[-1]]) == len(thoughts) + 1
        assert task.first_error(problem, ["</thought>", *thoughts]) == 1
        assert not task.accepts(problem, ["", "x \\boxed{ y"], None)


@pytest.mark.parametrize("name", NAMES)
def test_varied_rows_are_new_problems_with_a_right_solution(name):
    task = TASKS[name]
    draw = uniform(name)
    drawn = [task.draw(draw, task.difficulty()) for _ in range(300)]
    problems = [problem for problem in drawn if problem is not None]
    assert len(problems) > 100
    rows = {problem["question"] for problem in task.problems(task.difficulty())}
    assert sum(problem["question"] not in rows for problem in problems) > 100
    for problem in problems:
        assert task.first_error(problem, task.solution(problem)) == 0
    assert {True, False} == {in_split(problem["question"], "train") for problem in problems}


@pytest.mark.parametrize("name", NAMES)
def test_the_teacher_is_wrong_at_times_and_the_checker_finds_it(name):
    task = TASKS[name]
    draw = uniform(name, "attempt")
    right = 0
    for i in range(200):
        problem = task.generate(0, i)
        thoughts = task.attempt(problem, draw)
        error = task.first_error(problem, thoughts)
        accepted = task.accepts(problem, thoughts, extract_answer(" ".join(thoughts)))
        assert accepted or error
        assert 0 <= error <= len(thoughts) + 1
        right += accepted
    assert 20 <= right <= 120


@pytest.mark.parametrize("name", NAMES)
def test_questions_and_thoughts_are_in_the_words_of_the_family(name):
    task = TASKS[name]
    words = {*task.words(), "</thought>", "\\boxed{", "}"}
    draw = uniform(name, "words")
    for i in range(50):
        problem = task.generate(0, i, split="eval")
        assert words >= {*problem["question"].split(), *" ".join(task.attempt(problem, draw)).split()}


def test_more_problems_than_there_are_rows_name_the_number_to_set():
    with pytest.raises(DataError, match=r"gsm_symbolic: .*Set size: 327, or widen the difficulty"):
        TASKS["gsm_symbolic"].generate(0, 327, split="eval")
    with pytest.raises(DataError, match=r"split 'evil' does not exist\. Did you mean 'eval'"):
        TASKS["gsm_symbolic"].generate(0, 0, split="evil")


def test_a_missing_file_is_named():
    with pytest.raises(DataError, match=r"no_family\.parquet: .* tools/task_rows"):
        load_rows("no_family")


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("gsm_symbolic", {"statements": (3, 2)}, "2 ≤ fewest ≤ most ≤ 3, got"),
        ("gsm_symbolic", {"largest": 100}, "largest ≤ 99"),
        ("mini_sudoku", {"empty": (4, 12)}, "4 ≤ fewest ≤ most ≤ 11"),
        ("mini_sudoku", {"hard_cells": (2, 1)}, "0 ≤ fewest ≤ most"),
    ],
)
def test_a_difficulty_that_cannot_be_had_is_refused(name, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        TASKS[name].difficulty(**settings)
