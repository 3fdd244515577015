"""Credit graphs as prime-rl's algorithm and loss, on episodes of verifiers 0.4."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch

from creditgraph.pipeline import ROOT
from tests.adapters import slow
from tests.adapters.prime_rl_episodes import CONTINUED, READ, REWARDS, TWO_AGENTS

PYTHON = ROOT.parent / ".venv-verifiers/bin/python"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no verifiers: tools/other_environment verifiers"),
    pytest.mark.slow,
]
# A trace: two tokens of the prompt and one of the template, a turn of two, what is read, a turn of one, a turn of two.
TURNS = [2, 1, 2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    file = tmp_path_factory.mktemp("prime_rl") / "out.json"
    here = Path(__file__).parent
    command = [PYTHON, here / "prime_rl_hooks.py", file]
    # prime-rl's own sources come before the stand-ins.
    paths = [str(ROOT.parent), *filter(None, [os.environ.get("PYTHONPATH")]), str(here / "prime_rl_stand_in")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())


def test_advantages_of_each_sampled_token_equal_loops(found):
    mean = sum(REWARDS) / 4
    for nodes, reward in zip(found["drgrpo"], [*REWARDS, None], strict=True):
        for advantages, tokens in zip((nodes[1], nodes[3], nodes[4]), TURNS, strict=True):
            # The failed episode gets none.
            expected = None if reward is None else pytest.approx([reward - mean] * tokens, abs=1e-6)
            assert advantages == expected
        assert nodes[0] is nodes[2] is None
    mask = [[1, 1, *[0] * len(read), 1, 0, 1, 1] for read in READ]
    width = max(map(len, mask))
    states = [["start", " ".join(map(str, read)), "0"] for read in READ]
    rewards = [[0.0, 0.0, reward] for reward in REWARDS]
    padded = [row + [0] * (width - len(row)) for row in mask]
    expected = slow.gigpo(padded, rewards, ["g"] * 4, states, omega=1.0)
    for nodes, row, trained in zip(found["gigpo"], expected, padded, strict=False):
        given = [a for i in (1, 3, 4) for a in nodes[i]]
        assert given == pytest.approx([a for a, m in zip(row, trained, strict=True) if m], abs=1e-6)


def test_agents_are_compared_as_hierarchical_grpo_does(found):
    proposed = sum(rewards[0] for rewards in TWO_AGENTS) / 3
    for advantages, (proposer, *solvers) in zip(found["two agents"], TWO_AGENTS, strict=True):
        solved = sum(solvers) / 2
        assert advantages == pytest.approx([proposer - proposed, *(r - solved for r in solvers)], abs=1e-6)


def test_a_graph_continues_responses_at_prime_rls_servers(found):
    continued = found["continued"]
    for (row, _), advantages, expected in zip(CONTINUED, continued["found"], continued["expected"], strict=True):
        assert advantages == pytest.approx(expected[: len(row)], abs=1e-6)
    assert any(any(row) for row in continued["found"])
    assert continued["asked"] == 2 * (3 + 2)  # boundaries, of both calls
    assert continued["refused"].startswith("graph 'vineppo': it reads texts, and a trace has several branches")


def test_a_penalty_of_lengths_is_refused(found):
    assert found["refused"].startswith(
        "graph 'gigpo': its credit has no part for prime-rl's length_penalty; leave that"
    )


def test_the_loss_of_a_batch_of_samples_equals_a_loop(found):
    batch = found["batch"]
    total, tokens = 0.0, sum(map(sum, batch["mask"]))
    gradient = torch.zeros(3, 5)
    for i in range(3):
        for t in range(5):
            if batch["mask"][i][t]:
                advantage = batch["advantages"][i][t]
                ratio = math.exp(batch["logprobs"][i][t] - batch["old"][i][t])
                clipped = min(max(ratio, 0.8), 1.2) * advantage
                total -= min(ratio * advantage, clipped)
                gradient[i, t] = -ratio * advantage if ratio * advantage <= clipped else 0.0
    assert found["loss"][0] == pytest.approx(total / tokens, abs=1e-6)
    torch.testing.assert_close(torch.tensor(found["loss"][1]), gradient / tokens, atol=1e-6, rtol=1e-6)
