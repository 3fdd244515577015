"""Group advantages: numbers by hand, a slow loop, identities."""

import math

import pytest
import torch

from creditgraph.components.advantage.group import GroupAdvantage, group_advantage, training_mask, zero_groups
from creditgraph.pipeline.core.errors import AlignmentError
from creditgraph.pipeline.core.jagged import Jagged

ALL = torch.ones(4, dtype=torch.bool)
ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def test_numbers_by_hand():
    # Rewards 1, 0, 0, 0: mean 1/4, population variance (9 + 1 + 1 + 1)/16/4 = 3/16, unbiased 12/16/3 = 1/4.
    reward = torch.tensor([1.0, 0.0, 0.0, 0.0])
    exact = group_advantage(reward, ONE_GROUP, ALL, normalize="std_exact")
    assert exact.tolist() == pytest.approx([0.75 / math.sqrt(3 / 16)] + [-0.25 / math.sqrt(3 / 16)] * 3)
    assert group_advantage(reward, ONE_GROUP, ALL, normalize="mean").tolist() == [0.75, -0.25, -0.25, -0.25]
    unbiased = group_advantage(reward, ONE_GROUP, ALL, normalize="std", unbiased=True, eps=0.5)
    assert unbiased.tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])  # 0.75 / (0.5 + 0.5)
    # (1 − 1/4)/(1/4) and (0 − 1/4)/(1/4).
    assert group_advantage(reward, ONE_GROUP, ALL, normalize="over_mean").tolist() == [3, -1, -1, -1]
    biased = group_advantage(reward, ONE_GROUP, ALL, normalize="std", eps=1e-6)
    assert biased[0].item() == pytest.approx(0.75 / (math.sqrt(3) / 4 + 1e-6))


@pytest.mark.parametrize("normalize", ["std", "mean", "std_exact", "over_mean"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_slow_version_and_order(reference, normalize, unbiased):
    torch.manual_seed(0)
    reward, group = torch.rand(60), torch.randint(0, 9, (60,)) * 10**12
    valid = torch.rand(60) > 0.2
    reward[~valid] = float("nan")
    fast = group_advantage(reward, group, valid, normalize=normalize, unbiased=unbiased)
    slow = reference.group_advantage(reward.tolist(), group.tolist(), valid.tolist(), normalize, unbiased, 1e-6)
    assert fast.tolist() == pytest.approx(slow, abs=1e-5)
    order = torch.randperm(60)
    shuffled = group_advantage(reward[order], group[order], valid[order], normalize=normalize, unbiased=unbiased)
    torch.testing.assert_close(shuffled, fast[order], rtol=0, atol=1e-6)


def test_each_group_of_exact_advantages_has_mean_zero_and_variance_one():
    reward, group = torch.tensor([1.0, 0, 0, 0, 1, 1]), torch.tensor([5, 5, 5, 6, 6, 6])
    advantage = group_advantage(reward, group, torch.ones(6, dtype=torch.bool), normalize="std_exact")
    for rows in (advantage[:3], advantage[3:]):
        assert rows.mean().item() == pytest.approx(0, abs=1e-6)
        assert rows.pow(2).mean().item() == pytest.approx(1, abs=1e-6)


def test_std_without_eps_is_std_exact():
    reward = torch.tensor([0.3, 0.9, 0.1, 0.4])
    a, b = (group_advantage(reward, ONE_GROUP, ALL, normalize=n, eps=0.0) for n in ("std", "std_exact"))
    assert torch.equal(a, b)


@pytest.mark.parametrize("normalize", ["std", "mean", "std_exact", "over_mean"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_equal_rewards_and_groups_of_one_give_zero(normalize, unbiased):
    reward, group = torch.tensor([0.1, 0.1, 0.1, 0.7]), torch.tensor([0, 0, 0, 1])
    advantage = group_advantage(reward, group, ALL, normalize=normalize, unbiased=unbiased)
    assert advantage.tolist() == [0, 0, 0, 0]
    assert zero_groups(advantage, group).tolist() == [True] * 4


def test_an_invalid_reward_leaves_its_group_untouched():
    group, valid = torch.zeros(4, dtype=torch.int64), torch.tensor([True, False, True, True])
    with_bad = group_advantage(torch.tensor([1.0, float("nan"), 0.0, 0.0]), group, valid)
    without = group_advantage(torch.tensor([1.0, 0.0, 0.0]), group[:3], ALL[:3])
    assert with_bad[[0, 2, 3]].tolist() == without.tolist()
    assert with_bad[1] == 0
    assert group_advantage(torch.tensor([math.nan] * 4), group, ~ALL).tolist() == [0] * 4


def test_mask_covers_new_tokens_only():
    tokens = Jagged.from_rows([[1, 2, 3], [], [4, 5]], torch.int32)
    assert training_mask(tokens, torch.tensor([2, 0, 0])).to_lists() == [[False, False, True], [], [True, True]]
    assert training_mask(tokens, torch.tensor([2, 0, 0]), mask_prefix=False).to_lists() == [
        [True] * 3,
        [],
        [True, True],
    ]


def test_the_component_spreads_and_logs(toolbox):
    trajectories = toolbox.trajectories(["ab", "c", "def", "g"], group=[1, 1, 2, 2], inherited=[0, 0, 2, 0])
    rewards = toolbox.rewards(trajectories.uid, [1.0, 0.0, 1.0, 1.0])
    node = toolbox.start(GroupAdvantage, normalize="std_exact")
    credit = node.run(trajectories=trajectories, rewards=rewards).credit
    assert credit.advantage.to_lists() == [[1, 1], [-1], [0, 0, 0], [0]]
    assert credit.mask.to_lists() == [[True, True], [True], [False, False, True], [True]]
    assert node.context.metrics == {"groups": 2, "group_size": 2, "zero_variance_share": 0.5, "reward_std": 0.25}
    dropped = (
        toolbox.start(GroupAdvantage, drop_zero_groups=True).run(trajectories=trajectories, rewards=rewards).credit
    )
    assert dropped.mask.to_lists() == [[True, True], [True], [False] * 3, [False]]


def test_no_rows(toolbox):
    trajectories = toolbox.trajectories([])
    credit = (
        toolbox.start(GroupAdvantage, drop_zero_groups=True)
        .run(trajectories=trajectories, rewards=toolbox.rewards(trajectories.uid, []))
        .credit
    )
    assert len(credit) == 0


def test_rewards_of_other_rows_are_refused(toolbox):
    trajectories = toolbox.trajectories(["a", "b"])
    with pytest.raises(AlignmentError, match="describe different populations"):
        toolbox.start(GroupAdvantage).run(
            trajectories=trajectories, rewards=toolbox.rewards(torch.tensor([1, 2]), [1.0, 0.0])
        )


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_over_mean_is_the_truncated_gradient_of_log_p(size, p):
    # Of a policy with two answers, ∇log π is ∇p/p for the right one and −∇p/(1 − p) for the wrong one. Over all groups,
    # E[1/N Σ A ∇log π]/∇p = Σ_{k<N} (1 − p)^(k−1), the first N − 1 terms of 1/p = ∇log p/∇p.
    total = 0.0
    for k in range(size + 1):
        right = torch.arange(size) < k
        advantage = group_advantage(right.float(), normalize="over_mean").double()
        score = torch.where(right, 1 / p, -1 / (1 - p)).double()
        total += math.comb(size, k) * p**k * (1 - p) ** (size - k) * float((advantage * score).mean())
    assert total == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, size)), rel=1e-5)
