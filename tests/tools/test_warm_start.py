"""tools/warm_start.py: reproducible bytes, truthful examples, and a skill that is a setting."""

import argparse
import random

import pytest
import warm_start

from creditgraph.components.models.load import EMBEDDED, load_causal_lm, load_tokenizer
from creditgraph.components.tasks import TASKS
from creditgraph.components.tasks.base import labelled, split_thoughts
from creditgraph.components.text.templates import extract_answer
from creditgraph.pipeline.core.component import ModelSpec

JUGS = TASKS["jugs"]
PROBLEMS = [JUGS.generate(9, i) for i in range(200)]


def teacher(skill):
    return warm_start.Teacher(JUGS, random.Random(0).random, skill)


def settings(out):
    return argparse.Namespace(
        task="jugs", out=out, steps=2, batch=8, lr=1e-3, width=32, layers=1, seed=0, skill=0.9, sure=None, held_out=0,
        report_only=False, command="", start=None,
    )  # fmt: skip


def test_the_same_settings_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        warm_start.make(settings(tmp_path / name))
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    spec = ModelSpec(path=str(tmp_path / "a"))
    assert load_causal_lm(spec).config.vocab_size == len(load_tokenizer(spec)) == len(warm_start.vocabulary(JUGS))


@pytest.mark.parametrize("skill", [1.0, 0.6])
def test_the_share_of_right_verdicts_is_the_skill(skill):
    made = teacher(skill)
    right = total = 0
    for problem in PROBLEMS:
        failed = made.failed(problem)
        if failed is None or len(failed[0]) < 2:
            continue
        thoughts, error = failed
        made.failed = lambda _, failed=failed: failed
        prompt, response = made.localize(problem)
        del made.failed
        assert labelled(thoughts) in prompt
        named = int(extract_answer(response))
        said = [word for word in response.partition(" \\boxed")[0].split() if not word.isdigit()]
        assert " ".join(said) == " ".join([*(f"c{i} ok" for i in range(1, named)), f"c{named} bad"])
        right, total = right + (named == error), total + 1
    assert total > 100
    assert abs(right / total - skill) <= 4 * (skill * (1 - skill) / total) ** 0.5


def test_revisions_of_a_perfect_teacher_are_right_and_show_half_of_the_solution():
    for problem in PROBLEMS[:50]:
        prompt, response = teacher(1.0).revise(problem)
        assert JUGS.first_error(problem, split_thoughts(response)) == 0
        assert prompt.count(" ref ") == (len(JUGS.solution(problem)) + 1) // 2


@pytest.mark.parametrize("name", [name for name in TASKS if TASKS[name].model in EMBEDDED])
def test_shipped_models_are_small_and_of_their_family(name):
    folder = EMBEDDED[TASKS[name].model]
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4 << 20
    assert name in (folder / "README.md").read_text()
    if name != "chains":
        tokenizer = load_tokenizer(ModelSpec(path=TASKS[name].model))
        assert len(tokenizer) == len(warm_start.vocabulary(TASKS[name]))
