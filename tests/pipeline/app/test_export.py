"""creditgraph export: a run's weights as a folder that transformers loads."""

import pytest
import torch

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.commands.train import train
from creditgraph.pipeline.run.checkpoint import Checkpoints
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose


@pytest.fixture
def export(capsys):
    """Runs the command; returns exit code and what it printed."""

    def call(*arguments):
        code = main(["export", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


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


def test_the_exported_folder_holds_the_published_weights(export, run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code, said = export(run, "--output", tmp_path / "model", "--shard-gb", "0.0003")
    assert code == 0, said
    assert "weights of version 2" in said
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) > 0
    trained = Checkpoints(run / "checkpoints").latest().groups["node.learner"]["optimizer"]["masters"]
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in trained.items())


def test_mistakes_get_sentences(export, run, tmp_path):
    for arguments, part in (
        ((run, "--output", tmp_path), "exists; expected a new folder"),
        ((tmp_path, "--output", tmp_path / "x"), "expected the directory of a run"),
        ((run, "--output", tmp_path / "x", "--iteration", 7), "not a readable checkpoint"),
    ):
        code, said = export(*arguments)
        assert code == 2
        assert part in said
    assert not (tmp_path / "x").exists()
