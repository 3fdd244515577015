"""DAPO's soft overlong punishment."""

import pytest
import torch

from creditgraph.components.rewards.overlong import Overlong, overlong_punishment


def test_numbers_by_hand():
    # Longest 20, buffer 8: free up to 12; at 14 (12 − 14)/8 = −0.25; at 20 (12 − 20)/8 = −1; beyond −1.
    lengths = torch.tensor([0, 12, 13, 14, 20, 21, 100])
    assert overlong_punishment(lengths, 20, 8).tolist() == [0, 0, -0.125, -0.25, -1, -1, -1]
    assert overlong_punishment(lengths, 20, 0).tolist() == [0, 0, 0, 0, 0, -1, -1]


def test_slow_version(reference):
    lengths = torch.arange(0, 60)
    slow = [reference.overlong_punishment(int(n), 40, 15) for n in lengths]
    assert overlong_punishment(lengths, 40, 15).tolist() == pytest.approx(slow, abs=1e-7)


def test_it_is_added_to_valid_rewards_only(toolbox):
    node = toolbox.start(Overlong, max_length=4, buffer=2)
    trajectories = toolbox.trajectories(["ab", "abc", "abcde", "abcde"])
    rewards = toolbox.rewards(trajectories.uid, [1.0, 1.0, 0.0, 0.0], [True, True, True, False])
    out = node.run(trajectories=trajectories, rewards=rewards).rewards
    assert out.value.tolist() == [1.0, 0.5, -1.0, 0.0]
    assert out.correct.tolist() == [True, True, False, False]
    assert node.context.metrics == {"punished_share": 0.5, "punishment": -0.375}
    half = toolbox.start(Overlong, max_length=4, buffer=2, weight=0.5)
    assert half.run(trajectories=trajectories, rewards=rewards).rewards.value.tolist() == [1.0, 0.75, -0.5, 0.0]


def test_a_buffer_longer_than_the_limit_is_reported():
    with pytest.raises(ValueError, match=r"expected 0 ≤ buffer ≤ max_length \(4\), got 9"):
        Overlong.Config(max_length=4, buffer=9)
