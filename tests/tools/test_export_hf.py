"""tools/export_hf: a run's weights as a folder that transformers loads."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.app.commands.train import train
from pipeline.core.payloads import Weights
from pipeline.run.checkpoint import Checkpoints
from pipeline.run.compose import build_experiment, compose

TOOL = Path(__file__).parents[2] / "tools" / "export_hf"


def export(*arguments):
    return subprocess.run(
        [sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    settings = [
        "recipe=toy_grpo",
        "prompts.batch=2",
        "evaluator.num_problems=2",
        "run.iterations=2",
        "run.wandb.mode=disabled",
    ]
    train(build_experiment(compose([*settings, f"run.root={root}", "run.name=toy"])))
    return root / "toy"


def test_the_exported_folder_holds_the_published_weights(run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = export(run, "--output", tmp_path / "model", "--shard-gb", "0.0003")
    assert done.returncode == 0, done.stderr
    assert "weights of version 2" in done.stdout
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) > 0
    values = Checkpoints(run / "checkpoints").latest().groups["values"].values()
    newest = max((v for v in values if isinstance(v, Weights)), key=lambda w: w.version)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in newest.tensors.items())


def test_mistakes_get_sentences(run, tmp_path):
    assert "exists; expected a new folder" in export(run, "--output", tmp_path).stderr
    assert "expected the directory of a run" in export(tmp_path, "--output", tmp_path / "x").stderr
    assert "not a readable checkpoint" in export(run, "--output", tmp_path / "x", "--iteration", "7").stderr
    assert not (tmp_path / "x").exists()
