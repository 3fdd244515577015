"""A user's mistake gets one sentence, quickly, and leaves no file."""

import pytest
from attack_suites import settings

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.sweep import build_all
from creditgraph.pipeline.core.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory) -> None:
    settings.use(tmp_path_factory.mktemp("settings"))


def test_the_table_is_as_large_as_promised_and_names_each_mistake_once() -> None:
    names = [str(case) for case in settings.cases()]
    assert len(names) == len(set(names)) >= 200


@pytest.mark.parametrize("case", settings.cases(), ids=str)
def test_a_mistake_gets_one_sentence_and_leaves_no_file(case: settings.Case) -> None:
    held, detail = settings.run(case)
    assert held, detail


def test_what_is_accepted_is_noticed() -> None:
    held, detail = settings.run(settings.Case("run.seed=1", "…"))
    assert not held
    assert detail.startswith("not refused in one sentence, left ['runs'")
    held, detail = settings.run(settings.Case("accepted", "…", text="defaults: [toy_grpo]\n"))
    assert not held
    assert detail == "not refused in one sentence, left [] and said "


def test_a_long_name_is_cut() -> None:
    with pytest.raises(ConfigError) as raised:
        build_all([["recipe=toy_grpo", f"sampler.{'a' * 5000}=1"]])
    assert len(str(raised.value)) < 200


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
