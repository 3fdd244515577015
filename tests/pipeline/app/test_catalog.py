"""What `creditgraph components` shows of a class."""

import dataclasses
import json

import pytest

from creditgraph.pipeline.app.catalog import describe
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.registry import known_components, load_class


def test_sockets_paper_and_settings() -> None:
    entry = describe("graph_toys:Sampler")
    assert entry.summary == "Samples a group per prompt <&>."
    assert entry.takes == {"prompts": "Prompts", "policy": "Policy", "verifier": "Verifier, optional"}
    assert entry.makes == {"trajectories": "Trajectories", "failures": "Trajectories"}
    assert (entry.paper, entry.placement) == ("2402.03300", "replica")
    assert [(s.name, s.type, s.default, s.doc) for s in entry.settings] == [
        ("group_size", "int", "8", "responses per prompt")
    ]


def test_rows_lists_and_nested_settings() -> None:
    assert describe("graph_toys:Merge").takes == {"trajectories": "list[Trajectories]"}
    assert describe("graph_toys:Advantage").takes["rewards"] == "Rewards (rows of trajectories)"
    assert describe("graph_toys:Advantage").makes == {"credit": "Credit (rows of trajectories)"}
    learner = describe("graph_toys:Learner")
    assert learner.placement == "collective"
    assert [s.name for s in learner.settings] == ["objective", "optimizer.lr", "optimizer.betas", "kl"]
    assert learner.settings[0].type == "'reinforce' or 'token'"
    assert learner.settings[1].doc == "step size, per update"


def test_no_inputs_no_outputs_no_settings() -> None:
    source, watch = describe("graph_toys:Source"), describe("graph_toys:Watch")
    assert (source.takes, source.settings) == ({}, [])
    assert watch.makes == {}
    assert watch.takes["errors"] == "StepErrors, optional"


def test_an_inherited_run_and_config() -> None:
    mine, parent = describe("heavy_toys:Heavy"), describe("advantage.group")
    assert mine.summary == "Loads colorsys at import."
    assert (mine.takes, mine.makes, mine.settings) == (parent.takes, parent.makes, parent.settings)
    assert mine.makes == {"credit": "Credit (rows of trajectories)"}


@pytest.mark.parametrize(
    ("use", "text"),
    [
        ("graph_toys:Samplr", r"no class 'Samplr' in graph_toys\. Did you mean 'Sampler'\?"),
        ("no_such:X", "module 'no_such' cannot be imported; install it or correct 'no_such'"),
        ("pathlib:Path", "pathlib:Path is not a component; derive it from creditgraph.Component"),
    ],
)
def test_unknown_targets(use: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        describe(use)


@pytest.mark.parametrize("use", sorted(known_components()))
def test_shipped_entries_are_complete(use: str) -> None:
    entry = describe(use)
    assert list(dict.fromkeys(s.name.partition(".")[0] for s in entry.settings)) == [
        f.name for f in dataclasses.fields(load_class(use).Config)
    ]
    assert entry.summary
    assert all(s.doc for s in entry.settings)


def test_the_settings_of_a_run_are_listed(capsys):
    assert main(["components", "run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "run.iterations: int = 100  total number of iterations; raising it later continues a finished run" in lines
    names = {line.partition(":")[0] for line in lines}
    assert {"run.checkpoint.every", "run.record.outputs", "run.wandb.mode", "run.tables.rows"} <= names
    assert all(line.partition("  ")[2] for line in lines), "every setting has its description"
    assert main(["components", "run", "--json"]) == 0
    assert {f"run.{setting['name']}" for setting in json.loads(capsys.readouterr().out)} == names
    assert main(["components", "run", "sampler"]) == 2
    assert "expected it alone, or components" in capsys.readouterr().err


@pytest.mark.parametrize("names", [[], ["advantage"]])
def test_a_class_that_cannot_be_loaded_is_a_row(names, monkeypatch, tmp_path, capsys):
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no such device')\n")
    monkeypatch.syspath_prepend(tmp_path)
    known = {**known_components(), "advantage.mine": "broken_plugin:Mine", "advantage.lost": "no_such_package:Mine"}
    monkeypatch.setattr("creditgraph.pipeline.core.registry.known_components", lambda: known)
    monkeypatch.setattr("creditgraph.pipeline.app.commands.components.known_components", lambda: known)
    assert main(["components", *names, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["advantage.group"]["problem"] == ""
    assert listed["advantage.mine"]["problem"] == "RuntimeError: no such device, broken_plugin.py line 1"
    assert "module 'no_such_package' cannot be imported" in listed["advantage.lost"]["problem"]
    assert main(["components", *names]) == 0
    assert "cannot be loaded: RuntimeError: no such device" in capsys.readouterr().out
    assert main(["components", "advantage.lost"]) == 2
