"""Unsloth's own GRPO trainer, on the CPU that it falls back to, with the advantages of credit graphs."""

import json

import pytest
import torch

from creditgraph.pipeline import ROOT
from tests.adapters import slow
from tests.adapters.test_trl import JOBS, check_branches, check_continued, check_reset, check_scored, train

PYTHON = ROOT.parent / ".venv-unsloth/bin/python"
TRL = ROOT.parent / ".venv-trl/bin/python"
pytestmark = [
    pytest.mark.skipif(
        not (PYTHON.exists() and TRL.exists()), reason="no Unsloth or no TRL: tools/other_environment unsloth, or trl"
    ),
    pytest.mark.xdist_group("unsloth"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Name of the job → what it reports."""
    folder = tmp_path_factory.mktemp("unsloth")
    # float32 without autocast, and nothing compiled: that would take a minute.
    settings = {"UNSLOTH_MIXED_PRECISION": "bfloat16", "TORCHDYNAMO_DISABLE": "1"}
    names = ("trl_grpo", "advantages", "gigpo", "s_trace", "rredcot", "vineppo", "hicra", "rrpo", "treerl")
    jobs = {name: JOBS[name] for name in (*names, "trl_means", "one_level")}
    jobs["rredcot"] = jobs["rredcot"] | {"branches": False}  # its attention takes no masks
    train(folder, jobs, python=PYTHON, settings=settings)
    return json.loads((folder / "results.json").read_text())


def test_grpo_by_a_graph_trains_as_that_of_unsloth(trained):
    assert trained["trl_grpo"]["trainer"] == "UnslothGRPOTrainer"
    torch.testing.assert_close(trained["advantages"]["losses"], trained["trl_grpo"]["losses"], atol=5e-7, rtol=0)
    torch.testing.assert_close(trained["advantages"]["weights"], trained["trl_grpo"]["weights"], atol=5e-6, rtol=1e-6)


def test_each_token_is_trained_with_its_own_advantage(trained, tmp_path):
    seen = trained["gigpo"]["seen"]
    states = slow.states_of(seen["mask"], seen["tokens"])
    expected = torch.tensor(slow.gigpo(seen["mask"], seen["turn_rewards"], seen["group"], states, omega=0.5))
    actual = torch.tensor(seen["advantages"])
    torch.testing.assert_close(actual, expected[:, : actual.shape[1]], atol=1e-6, rtol=1e-6)
    # Unsloth moves each row to the left by the padding of its prompt: the loss would be another at a shifted token.
    train(tmp_path, {"gigpo": JOBS["gigpo"]}, python=TRL)
    plain = json.loads((tmp_path / "results.json").read_text())["gigpo"]
    assert plain["seen"]["tokens"] == seen["tokens"]
    torch.testing.assert_close(trained["gigpo"]["losses"], plain["losses"], atol=2e-5, rtol=0)


def test_its_model_scores_texts_and_continues_responses(trained, policy):
    check_scored(trained["rredcot"]["seen"], "rredcot", policy)
    assert trained["rredcot"]["masks"] is False
    check_continued(trained["vineppo"]["seen"], policy)


def test_it_trains_on_rows_that_a_graph_makes(trained):
    check_reset(trained["rrpo"]["seen"])
    check_branches(trained["treerl"]["seen"]["rows"])
    torch.testing.assert_close(trained["one_level"]["weights"], trained["trl_means"]["weights"], atol=5e-6, rtol=1e-6)


def test_the_loss_of_a_graph_and_entropies_are_refused(trained):
    assert "Unsloth computes its losses in functions of its own" in trained["s_trace"]["error"]
    assert "it reads entropies, but the trainer gives none" in trained["hicra"]["error"]
