"""tools/bench_peers: both ratios by hand, and a reward that always gives a signal."""

import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
from peers.varying_reward import varies
from random_model import random_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench():
    loader = SourceFileLoader("bench_peers", str(ROOT / "tools" / "bench_peers"))
    module = module_from_spec(spec_from_loader("bench_peers", loader))
    sys.modules["bench_peers"] = module  # dataclasses look their module up
    loader.exec_module(module)
    yield module
    del sys.modules["bench_peers"]


def test_ratios_by_hand(bench):
    # The first iteration is left out: medians 2 and 6 seconds; 8 s for 400 tokens and 18 s for 300.
    ours = bench.Side([99.0, 2.0, 4.0, 2.0], [1.0, 100.0, 200.0, 100.0], 0)
    theirs = bench.Side([50.0, 6.0, 6.0, 6.0], [1.0, 100.0, 100.0, 100.0], 0)
    assert (ours.iteration, theirs.iteration) == (2.0, 6.0)
    assert (ours.token, theirs.token) == (0.02, 0.06)
    line = bench.round_line(1, ours, theirs)
    assert line.endswith("ratio 3.0× per iteration, 3.0× per token")
    assert "creditgraph 2.000 s/iteration, 20.000 ms/token (133 tokens)" in line
    longer = bench.Side([50.0, 6.0, 6.0, 6.0], [1.0, 50.0, 50.0, 50.0], 0)
    assert bench.summary([(ours, theirs), (ours, longer)], "wall") == [
        "per iteration: 3.0× (from 3.0× to 3.0×), median of 2 rounds, wall time",
        "per token: 4.5× (from 3.0× to 6.0×), median of 2 rounds, wall time",
    ]


def test_iterations_that_skip_learning_are_named(bench):
    sides = bench.Side([1.0, 1.0], [1.0, 1.0], 3), bench.Side([1.0, 1.0], [1.0, 1.0], 0)
    assert bench.summary([sides], "cpu")[-1].startswith(
        "iterations without a signal, which skip learning: creditgraph 3, TRL 0."
    )


def test_the_reward_differs_between_responses_and_not_between_processes():
    responses = [f"s1 {n}" for n in range(50)]
    rewards = [varies("", r, "") for r in responses]
    assert len(set(rewards)) == 50
    assert all(0 <= r < 1 for r in rewards)
    code = (
        "import sys, json; from peers.varying_reward import varies;"
        "print(json.dumps([varies('', r, '') for r in json.loads(sys.argv[1])]))"
    )
    command = [sys.executable, "-c", code, json.dumps(responses)]
    done = subprocess.run(command, cwd=ROOT / "tools", capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == rewards


def test_random_30m_has_thirty_million_parameters(tmp_path):
    from safetensors import safe_open

    folder = random_model(tmp_path / "model", "random-30m")
    with safe_open(Path(folder) / "model.safetensors", "pt") as file:
        size = sum(file.get_tensor(name).numel() for name in list(file.keys()))
    assert size == pytest.approx(30e6, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--iterations", "1"], "--iterations: expected 2 or more, got 1; the first is left out."),
        (["--model", "no_such"], "--model: expected tiny, random-30m or a folder with config.json, got no_such."),
        (["--model", "random-7b"], "--model random-7b: expected tiny, random-30m, random-100m or a folder"),
    ],
)
def test_mistakes_get_one_sentence_before_anything_is_made(arguments, problem):
    done = subprocess.run(
        [str(ROOT / "tools" / "bench_peers"), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert problem in done.stderr
