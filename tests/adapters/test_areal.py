"""AReaL's own trainer and workers, with the advantages of credit graphs; only its servers have a stand-in."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from creditgraph.components.models.load import resolve_model_path
from creditgraph.pipeline import ROOT
from creditgraph.pipeline.core.jagged import Jagged
from tests.adapters import slow
from tests.adapters.tiny_server import tiny_server

PYTHON = ROOT.parent / ".venv-verl/bin/python"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no AReaL: tools/other_environment verl"),
    pytest.mark.xdist_group("areal"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Name of the job → what it reports."""
    folder = tmp_path_factory.mktemp("areal")
    command = [PYTHON, Path(__file__).parent / "areal_train.py", resolve_model_path("tiny"), folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"}
    with tiny_server() as server:
        done = subprocess.run(
            [*command, f"{server.url}/v1"], cwd=folder, env=environment, capture_output=True, text=True, timeout=1200
        )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((folder / "results.json").read_text())
    results["log"] = next((folder / "grpo/logs").rglob("actor.log")).read_text()
    return results


def test_grpo_by_a_graph_trains_as_areal_with_centred_rewards(trained):
    own, graph = trained["own"], trained["grpo"]
    for theirs, ours in zip(own["seen"], graph["seen"], strict=True):
        mask = torch.tensor(ours["loss_mask"])
        assert mask.tolist() == theirs["loss_mask"]
        torch.testing.assert_close(torch.tensor(ours["advantages"]), torch.tensor(theirs["advantages"]) * mask)
    assert graph["weights"] == pytest.approx(own["weights"], abs=5e-5)
    name = "ppo_actor/update/actor_loss/avg"
    assert graph["logged"][name] == pytest.approx(own["logged"][name], abs=1e-6)
    assert graph["logged"]["credit/advantage/groups"] == 4


def test_each_token_is_trained_with_its_own_advantage(trained):
    seen = trained["gigpo"]["seen"]
    group = [i for i, item in enumerate(seen) for _ in item["loss_mask"]]
    rows = {k: [row for item in seen for row in item[k]] for k in ("loss_mask", "input_ids", "rewards", "advantages")}
    mask = [[int(m) for m in row] for row in rows["loss_mask"]]
    after = [[*row[1:], 0] for row in rows["input_ids"]]
    expected = slow.gigpo(mask, [[0.0, r] for r in rows["rewards"]], group, slow.states_of(mask, after), omega=0.5)
    flat = []
    for actual, row, trained_on in zip(rows["advantages"], expected, mask, strict=True):
        torch.testing.assert_close(torch.tensor(actual), torch.tensor(row), atol=1e-6, rtol=1e-6)
        flat += [a for a, m in zip(actual, trained_on, strict=True) if m]
    # What the workers got, by their own statistics.
    logged = {k: trained["gigpo"]["logged"][f"ppo_actor/advantages/{k}"] for k in ("avg", "min", "max")}
    assert logged == pytest.approx({"avg": sum(flat) / len(flat), "min": min(flat), "max": max(flat)}, abs=1e-6)
    assert len({len(item["loss_mask"]) for item in seen}) > 1


def test_a_teacher_reads_the_log_probs_of_the_servers(trained, policy):
    for item in trained["distill"]["seen"]:
        rows = zip(
            *(item[k] for k in ("input_ids", "attention_mask", "loss_mask", "logprobs", "advantages")), strict=True
        )
        for ids, read, mask, old, advantages in rows:
            tokens = ids[: sum(read)]
            first, rest = (Jagged.from_rows([x], torch.int32) for x in (tokens[:1], tokens[1:]))
            teacher = policy.score(first, rest).logprobs.to_lists()[0]
            expected = [m and t - o for t, o, m in zip(teacher, old, mask, strict=False)]
            assert sum(mask) == sum(mask[: len(expected)]) > 3
            assert advantages[: len(expected)] == pytest.approx(expected, abs=1e-5)


def test_nothing_stays_in_the_stores_of_the_workers(trained):
    cleared = [line for line in trained["log"].splitlines() if "Cleared" in line]
    assert len(cleared) == 12  # of three steps and two workers: what the graph replaced, then the batch
    assert all("'num_tensors': 0" in line for i, line in enumerate(cleared) if i % 4 > 1)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("norms", "its credit has no part for AReaL's reward_norm="),
        ("norms", ", adv_norm="),
        ("sequence", "differs within responses, but with importance_sampling_level=sequence"),
        ("kl", "AReaL adds that times the log-prob of each token to the rewards. Set actor.kl_ctl=0, or give ref."),
        ("hot", "servers give log-probs at temperature 1, but this trainer samples at 0.7"),
        ("critic", "it reads values, but the trainer gives none"),
        ("agent", "each turn of an agent is a row without its episode. Set it to concat."),
    ],
)
def test_settings_that_would_change_the_credit_are_refused(trained, case, sentence):
    assert sentence in trained[case]
