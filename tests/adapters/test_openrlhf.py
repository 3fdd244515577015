"""OpenRLHF's own step from rewards to advantages and its loss with credit graphs, in verl's environment."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rows import Rollouts
from creditgraph.components.models.load import resolve_model_path
from creditgraph.pipeline import ROOT
from tests.adapters import asked, slow
from tests.adapters.tiny_server import tiny_server

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
PYTHON = ROOT.parent / ".venv-verl/bin/python"
PROMPTS = [[1, 2], [1, 2], [1, 2, 3, 4], [1, 2, 3, 4]]
GROUPS = [0, 0, 1, 1]
RESPONSES = [[5, 6, 7, 7, 5, 6], [5, 7, 7, 8, 6, 5, 6], [5, 8, 6, 6], [5, 6, 9, 5, 6]]
MASKS = [[1, 1, 0, 0, 1, 1], [1, 0, 0, 1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1, 1]]
READ = [["start", "7 7"], ["start", "7 7"], ["start", "8"], ["start", "9"]]
REWARDS = [1.0, 0.25, 0.0, 0.5]
BUFFER = 4  # of 8 new tokens: longer responses than 4 are punished, by a quarter for each token
PUNISHED = [r - max(0, len(row) - (8 - BUFFER)) / BUFFER for r, row in zip(REWARDS, RESPONSES, strict=True)]
WIDTH = max(map(len, MASKS))


def padded(rows):
    return [list(row) + [0] * (WIDTH - len(row)) for row in rows]


def masked(generator):
    return [(torch.randn(len(mask), generator=generator) * torch.tensor(mask)).tolist() for mask in MASKS]


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(0)
    return {
        "prompts": PROMPTS,
        "responses": RESPONSES,
        "masks": MASKS,
        "rewards": REWARDS,
        "buffer": BUFFER,
        "kl": masked(generator),
        "values": masked(generator),
        "padded_masks": padded(MASKS),
        "old": (-torch.rand(4, WIDTH, generator=generator)).tolist(),
        "moved": (0.3 * torch.randn(4, WIDTH, generator=generator)).tolist(),
        "advantages": torch.randn(4, WIDTH, generator=generator).tolist(),
        "asked": {
            "prompts": [asked.PROMPT] * 2,
            "responses": asked.RESPONSES,
            "masks": [[1] * 5] * 2,
            "rewards": asked.REWARDS,
            "buffer": None,
            "kl": [[0.0] * 5] * 2,
            "logprobs": asked.LOGPROBS,
            "labels": ["4", "4"],
        },
    }


@pytest.fixture(scope="module")
def found(batch, tmp_path_factory):
    if not PYTHON.exists():
        pytest.skip("no OpenRLHF: tools/other_environment verl")
    with tiny_server() as server:
        folder = tmp_path_factory.mktemp("openrlhf")
        where = [f"--endpoint={server.url}/v1", "--model=tiny"]
        own = {"vineppo": asked.settings_of(folder)} | asked.SCORED
        model = {"own": {"model": resolve_model_path("tiny"), "settings": asked.SCORED["recipe=toy_rredcot"]}}
        return hooked(batch | model | {"ask": {name: [*settings, *where] for name, settings in own.items()}}, folder)


def hooked(batch, folder):
    (folder / "batch.json").write_text(json.dumps(batch))
    given = {"PYTHONPATH": os.pathsep.join([str(ROOT.parent), str(HERE / "openrlhf_python")])}
    command = [PYTHON, HERE / "openrlhf_hooks.py", folder / "batch.json", folder / "out.json"]
    done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())


def test_a_graph_asks_a_server_or_the_workers(found, policy, tmp_path):
    check(found["vineppo asks"], asked.expected(tmp_path, policy).tolist())
    given = {"logprobs": torch.tensor(asked.LOGPROBS), "answers": ["4", "4"]}
    for name, settings in asked.SCORED.items():
        expected = asked.advantages(CreditGraph(name, *settings, policy=policy), **given)
        assert len(set(expected.flatten().tolist())) > 3
        check(found[f"{name} asks"], expected.tolist(), 1e-5)
    graph = CreditGraph("recipe=toy_rredcot", *asked.SCORED["recipe=toy_rredcot"], policy=policy)
    check(found["by its workers"], asked.advantages(graph, temperature=0.7, **given).tolist(), 1e-5)
    assert "it reads texts with the model, but the prompts have images" in found["images"]
    assert "servers give log-probs at temperature 1, but this trainer samples at 0.5" in found["colder"]


def check(rows, expected, tolerance=1e-6):
    for (advantages, *_), row in zip(rows, expected, strict=True):
        torch.testing.assert_close(
            torch.tensor(advantages), torch.tensor(row[: len(advantages)]), atol=tolerance, rtol=tolerance
        )


def test_advantages_equal_loops_over_punished_rewards(found):
    assert PUNISHED != REWARDS
    mask = padded(MASKS)
    check(found["grpo"], slow.grpo(mask, PUNISHED, GROUPS))
    last = [[0.0, reward] for reward in PUNISHED]
    check(found["gigpo advantage.omega=0.5"], slow.gigpo(mask, last, GROUPS, READ, omega=0.5))
    # Without rewards of turns a turn has the outcome's alone.
    check(found["mt_grpo"], slow.grpo(mask, PUNISHED, GROUPS), 1e-4)
    # Its own divides by the unbiased deviation, and spreads what follows over the tokens that tools wrote.
    own = [
        [a * 2**0.5 * m for a, m in zip(row, m, strict=True)] for (row, *_), m in zip(found["own"], MASKS, strict=True)
    ]
    check(found["grpo"], own, 1e-4)


def test_returns_and_what_is_logged_stay_openrlhfs(found):
    for graph, own in (("ppo with a critic", "own gae"), ("grpo", "own")):
        for (_, returns, logged), (_, expected, theirs) in zip(found[graph], found[own], strict=True):
            assert returns == expected
            assert theirs.items() <= logged.items()
            assert any(name.startswith("credit/") for name in logged)


def test_a_critic_and_a_divergence_in_the_reward_reach_the_graph(found, batch):
    rewards = -0.1 * torch.tensor(padded(batch["kl"]))
    for row, reward, total in zip(MASKS, PUNISHED, rewards, strict=True):
        total[len(row) - 1] += reward
    rollouts = Rollouts(
        mask=torch.tensor(padded(MASKS)), rewards=rewards, group=GROUPS, values=torch.tensor(padded(batch["values"]))
    )
    check(found["ppo with a critic"], CreditGraph("ppo")(rollouts).tolist())
    check(found["grpo with a critic"], slow.grpo(padded(MASKS), rewards.sum(1).tolist(), GROUPS), 1e-5)


def test_the_clipped_objective_equals_openrlhfs_own(found):
    for unit in ("tokens", "rows"):
        loss, gradient, rest = found[f"loss of grpo {unit}"]
        theirs = found[f"own {unit}"]
        assert loss == pytest.approx(theirs[0], abs=1e-6)
        torch.testing.assert_close(torch.tensor(gradient), torch.tensor(theirs[1]), atol=1e-6, rtol=1e-6)
        assert rest == pytest.approx(theirs[2], abs=1e-6)
        assert 0 < rest[0] < 1, "the share of clipped tokens"
        assert found[f"loss of p_trace {unit}"][1] != gradient


def test_ray_brings_the_graph_into_workers(found):
    advantages, kind = found["in a worker"]
    assert advantages == [row for row, *_ in found["gigpo advantage.omega=0.5"]]
    assert kind == "CreditLoss"


def test_what_cannot_run_there_says_so(found):
    assert "put CREDITGRAPH_GRAPH" in found["no graph"]
    assert "expected one sampler of independent responses" in found["srpo"]
    assert "it reads values, but the trainer gives none" in found["ppo"]
    assert "CREDITGRAPH_LOSS is 'yes'; expected true or false" in found["neither true nor false"]
    assert "its loss needs entropies" in found["loss of s_trace tokens"]
    assert "no part for actor.dual_clip" in found["dual clip"]
    assert "differs within responses, but with policy_loss_type=gspo" in found["gigpo advantage.omega=0.5 with gspo"]
    assert found["grpo with gspo"] == found["grpo"]
