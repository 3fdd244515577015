"""A user's mistake gets one sentence, quickly, and leaves no file."""

import re
import time

import pytest
from settings_cases import FILES, MISTAKES

from pipeline.app.cli import main
from pipeline.app.sweep import build_all
from pipeline.core.errors import CreditgraphError

SECONDS = 2.0  # of CPU; composing takes .2, and a test machine may be slow


def sentence_of(overrides: list[str], folders: tuple[str, ...] = ()) -> str:
    began = time.process_time()
    with pytest.raises(CreditgraphError) as raised:
        build_all([overrides], folders)
    assert time.process_time() - began < SECONDS
    problems = getattr(raised.value, "problems", [str(raised.value)])
    assert len(problems) == 1, problems
    return problems[0]


def fits(sentence: str, expected: str) -> bool:
    """Whether a sentence is the expected one, in which "…" stands for any text."""
    pattern = ".*".join(re.escape(part) for part in expected.split("…"))
    return re.fullmatch(pattern, sentence) is not None  # "." is no line break


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """The imports of components are not part of the time of the first mistake."""
    build_all([["recipe=toy_grpo"]])


@pytest.mark.parametrize(("override", "expected"), MISTAKES, ids=[override for override, _ in MISTAKES])
def test_a_mistaken_setting_gets_one_sentence(override: str, expected: str) -> None:
    sentence = sentence_of(["recipe=toy_grpo", override])
    assert fits(sentence, expected), sentence


@pytest.mark.parametrize("name", FILES)
def test_a_mistaken_file_gets_one_sentence(name: str, tmp_path) -> None:
    text, expected = FILES[name]
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / f"{name}.yaml").write_text(f"# @package _global_\n{text}")
    sentence = sentence_of([f"recipe={name}"], (str(tmp_path),))
    assert fits(sentence, expected), sentence


def test_a_long_name_is_cut() -> None:
    assert len(sentence_of(["recipe=toy_grpo", f"sampler.{'a' * 5000}=1"])) < 200


@pytest.mark.parametrize(
    "mistake",
    [
        "model.path=/nowhere",
        "model.max_context=100000000",
        "data.train.split=nothing",
        "data.train.size=-1",
        "data.train.size=abc",
        "data.train.source=fil",
        "data.train.source=file",
        "prompts.split=train2",
        "evaluator.split=train2",
        "run.device=tpu",
        "run.record.outputs=[nothing.here]",
        "sampler.temperature=nan",
    ],
)
def test_the_corrected_command_of_the_same_name_trains(mistake: str, tmp_path, capsys: pytest.CaptureFixture) -> None:
    small = ["prompts.batch=2", "evaluator.num_problems=2", "sampler.group_size=2", "run.iterations=0"]
    command = ["train", "recipe=toy_grpo", *small, f"run.root={tmp_path / 'runs'}", "run.name=r"]
    assert main([*command, mistake]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(command) == 0
