"""What a method needs of data, template and environment is said before anything loads; so is what is not there."""

import json

import pytest

from creditgraph.components.text.stops import ends_of_thoughts
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.signal_watch import SignalWatch
from creditgraph.pipeline.core import errors
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose

SRPO = ["train", "graph=srpo", "data=file", "data.train.path=d.jsonl", "model.path=tiny", "--check"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i} + 1", "answer": str(i + 1)} for i in range(30)]
    (tmp_path / "d.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "empty_model").mkdir()
    return tmp_path


WORDS = ["data.train.template=plain", "data.train.user_prompt=Solve {question}"]


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        (["model.path=org/name"], "template 'chat' does not ask for steps that end with </thought>; set"),
        (
            [*WORDS, "sampler.mode=plain", "expander.mode=plain"],
            "node 'expander' (expander.reset) reads where thoughts end, but 'sampler' samples whole responses",
        ),
        ([*WORDS, "sampler.mode=line", "expander.mode=line"], ""),
        ([*WORDS, "sampler.mode=sentence", "expander.mode=sentence"], ""),
        ([*WORDS], ""),  # the user's own words may ask for it
    ],
)
def test_resets_say_which_thoughts_they_lack(changes, answer, capsys) -> None:
    assert main([*SRPO, *changes]) == (2 if answer else 0)
    said = capsys.readouterr()
    assert answer in said.err
    assert bool(answer) != ("valid: 12 nodes" in said.out)


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ([], ""),
        (["data.train.path=nothing.jsonl"], "data file nothing.jsonl does not exist"),
        (["data.train.answer=solution"], "d.jsonl has no column 'solution'; it has prompt, answer."),
        (["model.path=./empty_model"], "model folder empty_model: no config.json"),
        (["verifier.function="], "verifier.function: missing; set it to your reward"),
    ],
)
def test_check_looks_at_what_is_cheap(changes, answer, folder, capsys) -> None:
    (folder / "rewards.py").write_text("def right(response, answer):\n    return float(answer in response)\n")
    own = ["train", "recipe=your_own", "model.path=tiny", *WORDS, "data.train.path=d.jsonl"]
    assert main([*own, "verifier.function=rewards.py:right", "--check", *changes]) == (2 if answer else 0)
    assert answer in capsys.readouterr().err


def test_rows_of_which_none_can_be_used_are_seen(folder, capsys) -> None:
    (folder / "bad.jsonl").write_text('{"prompt": "", "answer": "1"}\n' * 30)
    assert main([*SRPO, *WORDS, "data.train.path=bad.jsonl"]) == 2
    assert "none of its first 20 rows can be used, the first because: no prompt." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("choice", "package", "answer"),
    [
        ("engine=vllm", "vllm", "engine.vllm: the package vllm is not installed. Install it with"),
        ("learner=megatron", "megatron", "pip install 'creditgraph[megatron]'"),
        ("learner.lora.rank=4", "peft", "pip install 'creditgraph[lora]'"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(choice, package, answer, monkeypatch, capsys) -> None:
    import importlib.util

    found = importlib.util.find_spec
    absent = lambda name, *rest: None if name == package else found(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    monkeypatch.setattr(errors, "find_spec", absent)
    assert main(["train", "recipe=toy_grpo", choice, "--check"]) == 2
    assert answer in capsys.readouterr().err


GAME = """
class Game:
    STATE
    def reset(self, problem): return ""
    def step(self, text): return "", 0.0, True
    def close(self): pass
"""


@pytest.mark.parametrize(("line", "code"), [("", 2), ("state = 'x'", 0)])
def test_a_comparison_by_states_says_that_there_are_none(line, code, folder, capsys) -> None:
    (folder / "game.py").write_text(GAME.replace("STATE", line))
    use = ["environment.use=environment.custom", "environment.name=game.py:Game"]
    assert main(["train", "recipe=toy_gigpo_thoughts", *use, "--check"]) == code
    assert ("the environments of 'environment' have no `state`" in capsys.readouterr().err) == bool(code)
    assert main(["train", "recipe=toy_gigpo_thoughts", *use, "advantage.omega=0", "--check"]) == 0


def test_lines_and_sentences_end_thoughts() -> None:
    pieces = ["2", " + 3.5", " =", " 5.5", ".", " So", "\n", "\n", "the", " end", "!"]
    # Lines: tokens 0 to 7 with both line breaks, then the rest. Sentences: "5.5." ends with the space of " So".
    assert ends_of_thoughts(pieces, "line") == [8, 11]
    assert ends_of_thoughts(pieces, "sentence") == [6, 8, 11]
    assert ends_of_thoughts(["a"], "line") == [1]
    assert ends_of_thoughts([], "line") == []
    # A continuation that begins with white space has no empty first thought.
    assert ends_of_thoughts(["\n", "a", "\n", "b"], "line") == [3, 4]


def test_an_alarm_warns_at_the_tenth_iteration_and_at_the_end(folder) -> None:
    graph = build_experiment(compose(["recipe=toy_srpo"])).graph
    watch = SignalWatch(graph, folder)
    name = "expander/empty_prefix_share"
    said = [watch.add({"iteration": i, name: 1.0}) for i in range(10)]
    assert said[:9] == [""] * 9
    assert said[9].startswith(f"{name} was 1 in iterations 0 to 9: every reset began at the prompt")
    assert watch.summary() == said[9]
    assert watch.add({"iteration": 10, name: 0.5}) == watch.summary() == ""
    # Two iterations after one that was well are too few to say anything at the end.
    watch.add({"iteration": 11, name: 1.0})
    assert watch.summary() == ""
