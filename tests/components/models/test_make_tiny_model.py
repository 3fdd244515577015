"""tools/make_tiny_model: reproducible bytes, truthful examples, a complete folder."""

import importlib.machinery
import importlib.util
import random
from pathlib import Path

import pytest

from creditgraph.components.models.load import load_causal_lm, load_tokenizer
from creditgraph.components.tasks import TASKS, chains
from creditgraph.components.tasks.base import THOUGHT_END, split_thoughts
from creditgraph.components.text import templates
from creditgraph.pipeline.core.component import ModelSpec

CHAINS = TASKS["chains"]

TOOL = Path(__file__).parents[3] / "tools" / "make_tiny_model"


@pytest.fixture(scope="module")
def tool():
    loader = importlib.machinery.SourceFileLoader("make_tiny_model", str(TOOL))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("make_tiny_model", loader))
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def teacher(tool):
    return tool.Teacher(chains.load_misconceptions(), random.Random(0).random)


PROBLEMS = [CHAINS.generate(9, i, chains.Difficulty(steps=(4, 12), hard_facts=None)) for i in range(150)]


def test_the_same_command_gives_the_same_bytes(tool, tmp_path):
    for name in ("a", "b"):
        tool.main(["--out", str(tmp_path / name), "--steps", "2", "--batch", "4", "--held-out", "0"])
    names = sorted(f.name for f in (tmp_path / "a").iterdir())
    assert {
        "config.json",
        "misconceptions.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= set(names)
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    spec = ModelSpec(path=str(tmp_path / "a"))
    assert load_causal_lm(spec).config.vocab_size == len(load_tokenizer(spec)) == len(tool.vocabulary())


def test_another_seed_gives_other_misconceptions(tool):
    assert tool.make_misconceptions(0) != tool.make_misconceptions(1)
    for fact, (wrong, rate) in tool.make_misconceptions(0).items():
        assert wrong != chains.apply_step(*fact)
        assert tool.RATES[0] <= rate <= tool.RATES[1]


def test_the_shipped_misconceptions_are_those_of_the_tool(tool):
    assert chains.load_misconceptions() == tool.make_misconceptions(0)


def test_solving_examples_err_at_misconceived_steps_only(teacher):
    hard = chains.load_misconceptions()
    wrong = 0
    for problem in PROBLEMS:
        _, response = teacher.solve(problem)
        error = CHAINS.first_error(problem, split_thoughts(response))
        if error:
            wrong += 1
            assert chains.true_facts(problem)[error - 1] in hard
    assert 0.3 < wrong / len(PROBLEMS) < 0.95


def test_localising_examples_name_a_step_and_mostly_the_first_error(teacher):
    exact = clean = chance = 0.0
    for problem in PROBLEMS:
        prompt, response = teacher.localize(problem)
        steps = [
            f"s{line.strip()} {THOUGHT_END}"
            for line in prompt.split("</problem> c")[1].removesuffix(" </steps>").split(" c")
        ]
        *_, last = steps
        value = last.split()[4]
        steps[-1] = f"{last.removesuffix(THOUGHT_END)}\\boxed{{ {value} }} {THOUGHT_END}"
        error = CHAINS.first_error(problem, steps)
        named = int(templates.extract_answer(response))
        exact, clean, chance = exact + (named == error), clean + (named <= error), chance + 1 / len(steps)
    assert exact > 3 * chance
    assert clean / len(PROBLEMS) > 0.8


def test_revising_examples_differ_from_the_reference(teacher):
    right = [CHAINS.first_error(p, split_thoughts(teacher.revise(p)[1])) == 0 for p in PROBLEMS]
    assert 0.2 < sum(right) / len(right) < 0.9


def test_wrong_width_is_reported(tool, capsys):
    with pytest.raises(SystemExit):
        tool.main(["--width", "70"])
    assert "--width 70: expected a multiple of 32" in capsys.readouterr().err
