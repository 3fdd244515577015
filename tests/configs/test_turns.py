"""Recipes with an environment: they gain, overlap, and end in the same bytes after a kill in mid-episode."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from creditgraph.pipeline.app.cli import main

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["prompts.batch=4", "sampler.group_size=4", "evaluator.num_problems=5", "data.train.size=40"]

# Continues up to three times. The process that has the variable KILL dies in the middle of an episode, once.
ENVIRONMENT = """
import os
import signal

steps = 0


class Three:
    def reset(self, problem):
        self.turn = 0
        return "<solve> 0 s1 - 6 </problem> s1 0 - 6"

    def step(self, text):
        global steps
        steps += 1
        if os.environ.get("KILL") == str(steps):
            os.kill(os.getpid(), signal.SIGKILL)
        self.turn += 1
        self.state = f"{self.turn}"
        done = self.turn == 3 or text.strip() == "12"
        return f"<solve> {self.turn} s1 - 6 </problem> s1 {self.turn} - 6", float(done) / self.turn, done

    def close(self):
        pass
"""


def metrics(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    ignored = ("seconds", "utilisation", "memory", "tokens_per_second")
    return [{k: v for k, v in row.items() if not any(word in k for word in ignored)} for row in rows]


def weights(path):
    newest = max(p for p in (path / "checkpoints").iterdir() if p.name.isdigit())
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in newest.glob("*.safetensors")}


@pytest.mark.slow
def test_killed_in_the_middle_of_an_episode_a_run_ends_in_the_same_bytes(tmp_path):
    (tmp_path / "three.py").write_text(ENVIRONMENT)
    words = [
        "train", "graph=grpo_turns", "+setup=toy_turns", "environment.use=environment.custom",
        f"environment.name={tmp_path}/three.py:Three", "sampler.history=none", "sampler.max_tokens=1",
        "nodes.engine.in.weights=learner.weights@2", "run.iterations=4", "run.checkpoint.every=1",
        "run.record.every=1", f"run.root={tmp_path}", *SMALL,
    ]  # fmt: skip
    assert main([*words, "run.name=whole", "run.overlap=false"]) == 0
    # An evaluation plays up to 15 steps and an iteration up to 48: it dies in the middle of a turn of all episodes.
    killed = subprocess.run(
        [sys.executable, "-m", "creditgraph", *words, "run.name=killed"],
        env=os.environ | {"KILL": "100", "PYTHONPATH": str(ROOT)}, capture_output=True, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    begun = len(metrics(tmp_path / "killed"))
    assert 1 <= begun < 4
    assert main([*words, "run.name=killed"]) == 0
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    for name in ("sampler.turns", "sampler.trajectories", "advantage.credit"):
        files = sorted((tmp_path / "whole" / "record" / name).glob("*.parquet"))
        assert len(files) == 4
        for file in files:
            assert file.read_bytes() == (tmp_path / "killed" / "record" / name / file.name).read_bytes()


@pytest.mark.parametrize(("recipe", "iterations", "gain"), [("toy_grpo_stop", 6, 0.9), ("toy_grpo_thoughts", 12, 0.05)])
@pytest.mark.slow
def test_recipes_gain(tmp_path, recipe, iterations, gain):
    settings = [f"run.iterations={iterations}", "evaluator.every=0", f"run.root={tmp_path}", "run.name=r"]
    assert main(["train", f"recipe={recipe}", *settings]) == 0
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    assert result["accuracy_after"] - result["accuracy_before"] >= gain
    rows = metrics(tmp_path / "r")[:iterations]
    assert all(row["learner/mismatch_abs_max"] < 1e-3 for row in rows)
    assert sum(row["sampler/faults"] for row in rows) == 0
