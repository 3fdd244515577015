"""learner.megatron as a user starts it: in one process, and under torchrun with a model cut over four."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'creditgraph[megatron]'")
pytestmark = pytest.mark.xdist_group("megatron command line")
# Adam's ε is large, so that rounding of gradients near zero is not made into whole steps.
SETTINGS = [
    "recipe=toy_srpo",
    "prompts.batch=4",
    "evaluator.num_problems=2",
    "run.iterations=2",
    "run.wandb.mode=disabled",
]
SETTINGS += ["learner.optimizer.eps=1e-3"]
LAYOUTS = {
    "one process": ([], []),
    "TP 2 × PP 2": (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"],
        ["learner.tensor_parallel=2", "learner.pipeline_parallel=2"],
    ),
}


def train(folder, name, launcher, *settings):
    command = [
        sys.executable,
        *launcher,
        "-m",
        "creditgraph",
        "train",
        *SETTINGS,
        f"run.root={folder}",
        f"run.name={name}",
        *settings,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return rows[:2]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    rows = train(tmp_path_factory.mktemp("hf"), "hf", [])
    assert any("learner/grad_norm" in row for row in rows)
    return rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_as_learner_hf_does(layout, reference, tmp_path):
    launcher, settings = LAYOUTS[layout]
    found = train(tmp_path, "megatron", launcher, "learner=megatron", *settings)
    # After a step, weights and so rollouts' log-probs differ by rounding.
    for hf, megatron, tolerance in zip(reference, found, (1e-5, 1e-3), strict=True):
        assert megatron["rewards/mean"] == hf["rewards/mean"]
        assert megatron.get("learner/grad_norm") == pytest.approx(hf.get("learner/grad_norm"), rel=tolerance)
