"""A run of two iterations and a whole evaluation of the embedded model, each made once for all files."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from small_suite import SMALL, evaluate, write_suite

from creditgraph.pipeline.app.cli import main


@pytest.fixture(autouse=True)
def _log(tmp_path, monkeypatch):
    """Where the verifier of the suite writes what it verified."""
    monkeypatch.setenv("EVAL_TOYS_LOG", str(tmp_path / "verified"))


@pytest.fixture(scope="session")
def configs(tmp_path_factory):
    return write_suite(tmp_path_factory.mktemp("configs"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A run of two iterations, with a checkpoint after each."""
    root = tmp_path_factory.mktemp("runs")
    arguments = [
        "train",
        "recipe=toy_grpo",
        f"run.root={root}",
        "run.name=r",
        *SMALL,
        "sampler.group_size=4",
        "run.iterations=2",
    ]
    assert main([*arguments, "run.checkpoint.every=1", "run.checkpoint.keep=9", "run.record.every=0"]) == 0
    return root / "r"


@pytest.fixture
def run(finished, tmp_path):
    """A copy of that run."""
    return shutil.copytree(finished, tmp_path / "r")


@pytest.fixture(scope="session")
def model(tmp_path_factory, configs):
    """The embedded model evaluated in one go."""
    root = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVAL_TOYS_LOG", str(root / "verified"))
        assert evaluate(configs, "model=tiny", f"root={root}", "chunk=6") == 0
    return root / "model-tiny" / "eval" / "small" / "initial"
