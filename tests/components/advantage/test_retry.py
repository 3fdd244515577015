"""Credit for pairs of attempts."""

import pytest
import torch

from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.components.advantage.retry import RetryAdvantage, first_of, improvement_reward

# Two pairs of prompt 100: rows 0, 1 first attempts, 2, 3 their second ones, given in another order.
PARENT = torch.tensor([-1, -1, 1001, 1000])


def _run(toolbox, values, iteration=0, valid=None, **config):
    trajectories = toolbox.trajectories(["ab", "c", "de", "f"], group=[100, 100, 1000, 1000], parent=PARENT)
    node = toolbox.start(RetryAdvantage, iteration=iteration, **config)
    rewards = toolbox.rewards(trajectories.uid, values, valid)
    return node.run(trajectories=trajectories, rewards=rewards).credit, node.context.metrics, trajectories, rewards


def test_improvement_by_hand_and_slow(reference):
    reward, first = torch.tensor([1.0, 0.0, 1.0, 0.25]), torch.tensor([-1, -1, 1, 0])
    result, valid = improvement_reward(reward, torch.ones(4, dtype=torch.bool), first, 10.0)
    # 1 + 10·(1 − 0) and 0.25 + 10·(0.25 − 1).
    assert result.tolist() == [1, 0, 11, -7.25]
    assert result.tolist() == reference.improvement_reward(reward.tolist(), first.tolist(), 10.0)
    assert valid.all()


def test_stage_two_by_hand(toolbox):
    # y1: 1, 0; y2 of row 1: 1, of row 0: 0. Shaped: 1, 0, 11, −10: per turn ±1/2 and ±10.5 around the mean.
    credit, metrics, _, _ = _run(toolbox, [1, 0, 1, 0])
    assert credit.advantage.to_lists() == [[0.5, 0.5], [-0.5], [10.5, 10.5], [-10.5]]
    assert credit.columns["kl_weight"].to_lists() == [[1, 1], [1], [1, 1], [1]]
    assert credit.mask.values.all()
    assert metrics["stage"] == 2
    assert (
        metrics["first_correct"]
        == metrics["second_correct"]
        == metrics["turned_right"]
        == metrics["turned_wrong"]
        == 0.5
    )
    untrained, _, _, _ = _run(toolbox, [1, 0, 1, 0], train_first=False)
    assert untrained.advantage.to_lists() == [[0, 0], [0], [10.5, 10.5], [-10.5]]


def test_stage_one_holds_the_first_attempt(toolbox):
    credit, metrics, _, _ = _run(toolbox, [1, 0, 1, 0], iteration=2, stage_one_iterations=3, first_kl_weight=25.0)
    assert credit.advantage.to_lists() == [[0, 0], [0], [0.5, 0.5], [-0.5]]
    assert credit.columns["kl_weight"].to_lists() == [[25, 25], [25], [1, 1], [1]]
    assert credit.mask.values.all()
    assert metrics["stage"] == 1
    assert _run(toolbox, [1, 0, 1, 0], iteration=3, stage_one_iterations=3)[1]["stage"] == 2


@pytest.mark.parametrize("normalize", ["mean", "std", "std_exact"])
def test_no_improvement_bonus_gives_plain_rewards(toolbox, normalize):
    credit, _, trajectories, rewards = _run(toolbox, [1, 0, 1, 0.5], alpha=0.0, normalize=normalize)
    plain = toolbox.start(GroupAdvantage, normalize=normalize).run(trajectories=trajectories, rewards=rewards).credit
    assert credit.advantage.equal(plain.advantage)
    assert credit.mask.equal(plain.mask)


def test_a_second_attempt_needs_both_verdicts(toolbox):
    credit, metrics, _, _ = _run(toolbox, [1, 0, 1, 0], valid=[True, False, True, True])
    # Row 2's first attempt has no verdict: it gets nothing, and row 3 is alone in its turn.
    assert credit.advantage.values.tolist() == [0] * 6
    assert metrics["first_correct"] == 1
    assert metrics["turned_wrong"] == 1


def test_first_attempts_alone_are_plain_groups(toolbox):
    trajectories = toolbox.trajectories(["a", "b"])
    node = toolbox.start(RetryAdvantage)
    credit = node.run(trajectories=trajectories, rewards=toolbox.rewards(trajectories.uid, [1, 0])).credit
    assert credit.advantage.to_lists() == [[0.5], [-0.5]]
    assert first_of(trajectories).tolist() == [-1, -1]
    assert node.context.metrics["second_correct"] == 0


def test_no_rows(toolbox):
    trajectories = toolbox.trajectories([])
    credit = (
        toolbox.start(RetryAdvantage)
        .run(trajectories=trajectories, rewards=toolbox.rewards(trajectories.uid, []))
        .credit
    )
    assert len(credit) == 0


@pytest.mark.parametrize("config", [{"alpha": -1.0}, {"stage_one_iterations": -1}, {"first_kl_weight": -0.5}])
def test_settings_are_checked(config):
    with pytest.raises(ValueError, match="expected stage_one_iterations, alpha and first_kl_weight ≥ 0"):
        RetryAdvantage.Config(**config)
