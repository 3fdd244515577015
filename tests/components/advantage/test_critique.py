"""Credit for groups with a refinement."""

import pytest
import torch

from creditgraph.components.advantage.critique import CritiqueAdvantage
from creditgraph.components.advantage.group import GroupAdvantage


def _run(toolbox, values, parent, texts=("ab", "c", "de"), valid=None, **config):
    trajectories = toolbox.trajectories(list(texts), parent=torch.tensor(parent))
    rewards = toolbox.rewards(trajectories.uid, values, valid)
    node = toolbox.start(CritiqueAdvantage, **config)
    return node.run(trajectories=trajectories, rewards=rewards).credit, node.context.metrics, trajectories, rewards


def test_the_refinement_is_compared_with_the_originals(toolbox):
    # Rewards 0, 0, 1: mean 1/3.
    credit, metrics, _, _ = _run(toolbox, [0, 0, 1], [-1, -1, 1001])
    assert [row[0] for row in credit.advantage.to_lists()] == pytest.approx([-1 / 3, -1 / 3, 2 / 3])
    assert credit.columns["shaping"].to_lists() == [[0, 0], [0], [pytest.approx(0.1)] * 2]
    assert credit.mask.values.all()
    assert metrics["refined"] == 1
    assert metrics["refined_advantage"] == pytest.approx(2 / 3)
    wider, _, _, _ = _run(toolbox, [0, 0, 1], [-1, -1, 1001], gamma=0.5)
    assert wider.columns["shaping"].row(2).tolist() == [0.5, 0.5]


def test_without_refinement_it_is_drgrpo(toolbox):
    credit, metrics, trajectories, rewards = _run(toolbox, [0, 0.5, 1], [-1, -1, -1])
    plain = toolbox.start(GroupAdvantage, normalize="mean").run(trajectories=trajectories, rewards=rewards).credit
    assert credit.advantage.equal(plain.advantage)
    assert credit.mask.equal(plain.mask)
    assert credit.columns["shaping"].values.abs().max() == 0
    assert metrics["refined_advantage"] == 0


def test_an_unverified_refinement_gets_nothing_and_changes_nothing(toolbox):
    credit, _, _, _ = _run(toolbox, [0, 1, 0], [-1, -1, 1000], valid=[True, True, False])
    assert credit.advantage.to_lists() == [[-0.5, -0.5], [0.5], [0, 0]]


def test_no_rows(toolbox):
    trajectories = toolbox.trajectories([])
    credit = (
        toolbox.start(CritiqueAdvantage)
        .run(trajectories=trajectories, rewards=toolbox.rewards(trajectories.uid, []))
        .credit
    )
    assert len(credit) == 0


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"expected gamma > 0 .* got 0.0"):
        CritiqueAdvantage.Config(gamma=0.0)
