"""The newest transformers that the extra `train` takes; .venv has an older one, which the engines in it ask for."""

import json
import os
import subprocess
import sys

import pytest
from requirements import wanted

from creditgraph.pipeline import ROOT

CHECKOUT = ROOT.parent
PYTHON = CHECKOUT / ".venv-trl/bin/python"
TESTS = (
    "components/engine/local/test_generate.py",
    "components/learner/hf/test_model.py",
    "components/learner/hf/test_replay.py",
    "components/learner/hf/test_weights.py",
    "components/models/test_weights.py",
)
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no other transformers: tools/other_environment trl"),
    pytest.mark.slow,
]


def run(python, *words, **options):
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([python, *words], env=environment, capture_output=True, text=True, check=False, **options)


def version(python):
    return run(python, "-c", "from importlib.metadata import version; print(version('transformers'))").stdout.strip()


def test_it_is_the_last_that_is_taken():
    newer, older = version(PYTHON), version(sys.executable)
    (specifier,) = [text for text in wanted(["train"]) if text.startswith("transformers")]
    major, minor, _ = map(int, newer.split("."))
    assert specifier.endswith(f"<{major}.{minor + 1}")
    assert newer != older


def test_a_run_has_the_same_bytes(tmp_path):
    found = []
    for python in (sys.executable, PYTHON):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        settings = ["run.iterations=2", "run.checkpoint.every=2", "prompts.batch=4", "evaluator.num_problems=4"]
        done = run(
            python,
            "-m",
            "creditgraph",
            "train",
            "recipe=toy_srpo",
            *settings,
            "learner.recompute=full",
            "run.name=r",
            cwd=folder,
        )
        assert done.returncode == 0, done.stderr
        assert "FutureWarning" not in done.stderr
        first = json.loads((folder / "runs/r/metrics.jsonl").read_text().splitlines()[0])
        assert first["learner/grad_norm"] > 0
        found.append((folder / "runs/r/checkpoints/000001/tensors.safetensors").read_bytes())
    assert found[0] == found[1]


def test_models_learners_and_the_local_engine():
    done = run(
        PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in TESTS), cwd=CHECKOUT
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert " passed" in done.stdout
