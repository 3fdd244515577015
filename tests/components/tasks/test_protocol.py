"""What every task family promises: keyed problems, disjoint splits, truthful solutions, words, and a difficulty."""

import json
import random

import pytest

from creditgraph.components.data.loading import load_data
from creditgraph.components.tasks import TASKS, known_tasks
from creditgraph.components.tasks.base import COMMON_WORDS, SPECIAL_WORDS, THOUGHT_END, split_thoughts
from creditgraph.components.text.templates import extract_answer
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import ConfigError, DataError

NAMES = list(known_tasks())


def attempts(task, count=60):
    for i in range(count):
        problem = task.generate(7, i, task.warm_up[-1])
        yield problem, task.attempt(problem, random.Random(i).random)


def accepted(task, problem, thoughts):
    return task.accepts(problem, thoughts, extract_answer(" ".join(thoughts)))


@pytest.mark.parametrize("name", NAMES)
def test_a_problem_is_a_function_of_its_key_and_json(name):
    task = TASKS[name]
    assert task.name == name
    first = [task.generate(1, i) for i in range(10)]
    assert first == [task.generate(1, i) for i in range(10)] == json.loads(json.dumps(first))
    assert first != [task.generate(2, i) for i in range(10)]
    assert all(p["task"] == name and p["question"] for p in first)
    with pytest.raises(DataError, match=rf"{name}: split 'evla' does not exist. Did you mean 'eval'\?"):
        task.generate(0, 0, split="evla")


@pytest.mark.parametrize("name", NAMES)
def test_splits_share_no_question(name):
    drawn = {s: {TASKS[name].generate(0, i, None, s)["question"] for i in range(80)} for s in ("train", "eval")}
    assert all(len(questions) > 20 for questions in drawn.values())
    assert not drawn["train"] & drawn["eval"]


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_has_no_error_and_its_text_is_accepted(name):
    task = TASKS[name]
    for i in range(30):
        problem = task.generate(3, i)
        thoughts = task.solution(problem)
        assert split_thoughts(" ".join(thoughts) + " <eos>") == thoughts
        assert task.first_error(problem, thoughts) == 0
        assert accepted(task, problem, thoughts)
        assert extract_answer(thoughts[-1]) == task.answer(problem)
        assert not any("\\boxed{" in t for t in thoughts[:-1])
        # A part of a solution is neither accepted nor wrong before the thought that is missing.
        assert task.first_error(problem, thoughts[:-1]) == len(thoughts)
        assert not accepted(task, problem, thoughts[:-1])
        assert 1 <= task.first_error(problem, [*thoughts[:-1], f"nonsense {THOUGHT_END}"]) <= len(thoughts)


@pytest.mark.parametrize("name", NAMES)
def test_attempts_are_flawed_and_judged_without_contradiction(name):
    task = TASKS[name]
    right = []
    for problem, thoughts in attempts(task):
        error = task.first_error(problem, thoughts)
        assert 0 <= error <= len(thoughts) + 1
        right.append(accepted(task, problem, thoughts))
        assert right[-1] or error > 0
    assert 0 < sum(right) < len(right)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_responses_are_in_the_words_of_the_vocabulary(name):
    task = TASKS[name]
    words = {*SPECIAL_WORDS, *task.words(), *COMMON_WORDS}
    for problem, thoughts in attempts(task, 20):
        prompts = [
            task.solve_prompt(problem["question"]),
            task.localize_prompt(problem["question"], thoughts),
            task.revise_prompt(problem["question"], thoughts, task.solution(problem)),
        ]
        assert not {word for text in [*prompts, *thoughts] for word in text.split()} - words


@pytest.mark.parametrize("name", NAMES)
def test_the_first_error_is_where_solutions_become_impossible(name):
    """The thoughts before it are sound: with the rest of some right response they are accepted."""
    task = TASKS[name]
    if name in ("hanoi", "jugs", "path_star", "chains", "chains_reset"):
        for problem, thoughts in attempts(task, 40):
            error = task.first_error(problem, thoughts)
            prefix = thoughts[: error - 1] if error else thoughts
            assert task.first_error(problem, prefix) in (0, len(prefix) + 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_writes_the_card_of_its_problems(name, tmp_path):
    task = TASKS[name]
    entry = {"source": name, "size": 3, "answer_kind": task.answer_kind}
    rows = load_data(entry, Context(run_dir=tmp_path)).rows
    assert [row.metadata["task"] for row in rows] == [name] * 3
    assert json.loads((tmp_path / "data_card.json").read_text())["data"]["source"] == f"task '{name}'"


def test_answers_of_another_kind_are_refused():
    with pytest.raises(ConfigError, match=r"set answer_kind: steps and verifier: verifier\.steps\."):
        load_data({"source": "hanoi"}, Context())
