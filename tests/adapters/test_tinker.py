"""The cookbook's own functions make data and ask for gradients with credit graphs, in an environment of its own."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from creditgraph.pipeline import ROOT
from tests.adapters import slow

HERE = Path(__file__).parent
PYTHON = ROOT.parent / ".venv-tinker/bin/python"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no Tinker: tools/other_environment tinker"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    file = tmp_path_factory.mktemp("tinker") / "out.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run([PYTHON, HERE / "tinker_hooks.py", file], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())


def test_the_reward_minus_the_mean_of_the_group_is_the_cookbooks_own(found):
    own, ours = found["own"], found["drgrpo"]
    assert len(own["data"]) == 9  # a trajectory without tokens has none, one with two histories has two
    assert own["credit"] == {}
    assert ours["credit"]["credit/advantage/groups"] == 2
    for theirs, row in zip(own["data"], ours["data"], strict=True):
        assert row["target_tokens"] == theirs["target_tokens"]
        assert row["mask"] == theirs["mask"]
        assert row["advantages"] == pytest.approx(theirs["advantages"], abs=1e-6)
    # One of them, by hand: rewards 1.25, .75, 1.25, .5 and −1.
    assert ours["data"][1]["advantages"] == pytest.approx([0, 0.75 - 0.55, 0, 0.75 - 0.55], abs=1e-6)


def test_the_steps_of_a_graph_of_turns_have_their_rewards_and_states(found):
    # By trajectory with trained tokens, of each turn: its datum, its tokens, its reward, its state.
    first = [
        [(0, 2, 0.25, "5 6"), (0, 3, 1.0, "7")],
        [(1, 1, 0.0, "5 6"), (1, 1, 0.75, "7")],  # with the reward of the group
        [(2, 2, 0.5, "5 6"), (3, 1, 0.0, "8 9"), (3, 2, 0.75, "7")],
        [(4, 1, 0.5, "15 15 7")],  # with the reward of the action that could not be parsed
    ]
    second = [
        [(5, 2, 0.0, "5 red"), (5, 1, 1.0, "7")],
        [(6, 2, 0.5, "5 blue"), (6, 1, 0.25, "7")],
        [(7, 2, 0.5, "")],  # its first token is no target
    ]
    expected = [[] for _ in range(9)]
    for members in (first, second):
        masks = [[m for _, tokens, *_ in turns for m in [*[1] * tokens, 0]] for turns in members]
        rewards = [[turn[2] for turn in turns] for turns in members]
        states = [[turn[3] for turn in turns] for turns in members]
        rows = slow.gigpo(masks, rewards, ["g"] * len(members), states, omega=1.0)
        for turns, row in zip(members, rows, strict=True):
            numbers = iter(row)
            for datum, tokens, *_ in turns:
                expected[datum] += [next(numbers) for _ in range(tokens)]
                next(numbers)
    for row, numbers in zip(found["gigpo"]["data"], expected, strict=True):
        trained = [a for a, m in zip(row["advantages"], row["mask"], strict=True) if m]
        assert trained == pytest.approx(numbers, abs=2e-5)
        assert all(a == 0 for a, m in zip(row["advantages"], row["mask"], strict=True) if not m)


def test_the_minibatch_is_recorded_and_not_the_groups_that_are_printed(found):
    rows = found["recorded"]
    assert {row["step"] for row in rows} == {0}
    assert len(rows) == 16  # an action each, also those that are not trained on
    trained = [a for d in found["gigpo"]["data"] for a, m in zip(d["advantages"], d["mask"], strict=True) if m]
    assert [a for row in rows for a, m in zip(row["advantage"], row["mask"], strict=True) if m] == pytest.approx(
        trained
    )
    assert {p for row in rows for p, m in zip(row["logprobs"], row["mask"], strict=True) if m} == {-0.5}


def test_the_gradients_that_are_sent_are_those_of_the_clipped_objective(found):
    batch, total = found["batch"], 0.0
    for i, gradient in enumerate(found["loss"]["gradients"]):
        expected = []
        columns = (batch[name][i] for name in ("logprobs", "old", "advantages", "mask"))
        for logprob, old, advantage, mask in zip(*columns, strict=True):
            ratio = math.exp(logprob - old)
            clipped = min(max(ratio, 0.8), 1.2)
            total -= mask * min(ratio * advantage, clipped * advantage)
            inside = ratio * advantage <= clipped * advantage
            expected.append(-ratio * advantage if mask and inside else 0.0)
        assert gradient == pytest.approx(expected, abs=1e-6)
    assert found["loss"]["loss"] == pytest.approx(total, abs=1e-5)
    # A graph that is registered without its loss has that of the cookbook again.
    assert found["own functions"] == [[False, False], [True, True]]


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        ("entropy_8020", "needs entropies of the whole batch"),
        ("ppo", "reads values, but the trainer gives none"),
        ("srpo", "samples responses of its own"),
    ],
)
def test_a_graph_that_cannot_run_there_is_refused_when_it_is_registered(found, graph, reason):
    assert reason in found[graph]
