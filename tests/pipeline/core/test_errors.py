"""What only some runs need: a missing package is named with the extra that installs it."""

import builtins
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.report.page import vega_bundle
from creditgraph.pipeline.core.errors import EXTRAS, ConfigError, MissingExtraError, any_extra, extra, find_package

OPTIONAL = ("matplotlib", "peft", "tensorboard", "vl_convert", "wandb")
TOY = ["recipe=toy_grpo", "prompts.batch=2", "sampler.group_size=4", "evaluator.num_problems=2", "run.device=cpu"]


@pytest.fixture
def bare(monkeypatch):
    """As if no extra were installed."""
    real = builtins.__import__

    def refuse(name, *arguments, **named):
        if name.partition(".")[0] in OPTIONAL or name == "torch.utils.tensorboard":
            raise ImportError(f"No module named '{name}'")
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr("creditgraph.pipeline.core.errors.find_spec", lambda name: None)
    vega_bundle.cache_clear()


def test_the_sentence_names_setting_extra_and_way_out():
    with pytest.raises(ConfigError) as raised, extra("wandb", "run.wandb.mode=online", "set run.wandb.mode=disabled"):
        find_package("no_such_package")
    assert str(raised.value) == (
        "run.wandb.mode=online: a package of the extra 'wandb' cannot be imported (No module named "
        "'no_such_package'). Install it with: pip install 'creditgraph[wandb]', or set run.wandb.mode=disabled."
    )
    find_package("torch")


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (["run.wandb.mode=offline"], "run.wandb.mode=offline: a package of the extra 'wandb'"),
        (["run.tensorboard.enabled=true"], "pip install 'creditgraph[tensorboard]'"),
    ],
)
def test_a_sink_without_its_package_is_refused_by_the_check(bare, tmp_path, capsys, settings, part):
    assert main(["train", *TOY, *settings, f"run.root={tmp_path}", "--check"]) == 2
    assert part in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_lora_without_peft_is_refused(bare, tmp_path, capsys):
    assert main(["train", *TOY, "learner.lora.rank=2", f"run.root={tmp_path}"]) == 2
    assert "pip install 'creditgraph[lora]', or set learner.lora.rank=0" in capsys.readouterr().err


def test_a_run_trains_without_any_extra_and_says_what_it_did_not_draw(bare, tmp_path, capsys):
    assert main(["train", *TOY, "run.iterations=1", f"run.root={tmp_path}", "run.name=r"]) == 0
    assert (tmp_path / "r" / "result.json").exists()
    assert main(["report", str(tmp_path / "r")]) == 0
    assert "its curves are left out: the charts of a report: a package of the extra 'plots'" in capsys.readouterr().out
    assert "Learning curves" not in (tmp_path / "r" / "report.html").read_text()


def test_every_extra_is_declared_and_what_it_brings_is_not_in_the_core():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) <= set(project["optional-dependencies"])
    core = {text.partition(">")[0].replace("-", "_") for text in project["dependencies"]}
    assert not core & {module for modules in EXTRAS.values() for module in modules.split()}


def test_a_missing_package_names_its_own_extra():
    with pytest.raises(MissingExtraError, match=r"a step: .*'megatron'.*pip install"), extra("train", "a step"):
        raise ModuleNotFoundError("No module named 'megatron.core'", name="megatron.core")
    with pytest.raises(ModuleNotFoundError), any_extra():
        raise ModuleNotFoundError("No module named 'mine'", name="mine")


def test_commands_import_no_extra_before_they_need_it():
    code = "import sys, creditgraph.pipeline.app.cli, creditgraph.pipeline.app.commands.report, creditgraph.components;"
    code += "import creditgraph.pipeline.app.trackers;"
    code += f"print([n for n in {OPTIONAL} if n in sys.modules])"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
