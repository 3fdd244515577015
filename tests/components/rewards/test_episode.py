"""Returns of episodes, and advantages in which each episode counts once."""

import pytest
import torch

from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.components.rewards.episode import EpisodeRewards
from creditgraph.pipeline.core.payloads import Turns


def turns_of(uid, episodes, fault=None):
    """Episodes as lists of rewards, their rows in order."""
    rows = [(i, k, r) for i, rewards in enumerate(episodes) for k, r in enumerate(rewards)]
    first = [sum(map(len, episodes[:i])) for i in range(len(episodes))]
    return Turns(
        uid=uid,
        episode=torch.stack([uid[first[i]] for i, _, _ in rows]),
        turn=torch.tensor([k for _, k, _ in rows]),
        state=[""] * len(rows),
        reward=torch.tensor([r for _, _, r in rows]),
        done=torch.tensor([k + 1 == len(episodes[i]) for i, k, _ in rows]),
        fault=[(fault or {}).get(i, "") for i, _, _ in rows],
    )


def test_each_turn_has_the_return_of_its_episode(toolbox):
    uid = torch.arange(1000, 1016)
    turns = turns_of(uid, [[0.1] * 10, [0.0, 0.5], [1.0], [2.0, 0.0, 0.0]], {2: "raised: x", 3: "turns: y"})
    rewards = toolbox.start(EpisodeRewards)
    got = rewards.run(turns=turns).rewards
    assert got.value.tolist() == pytest.approx([1.0] * 10 + [0.5] * 2 + [0.0] * 4)
    assert got.correct.tolist() == [True] * 10 + [False] * 6  # ten times 0.1 is 1
    assert got.valid.tolist() == [True] * 12 + [False] * 4
    assert got.detail == turns.fault
    assert rewards.context.metrics == {"mean": pytest.approx(0.75), "correct": 0.25, "invalid": 2}
    kept = toolbox.start(EpisodeRewards, keep=("turns",)).run(turns=turns).rewards
    assert kept.value.tolist()[12:] == [0.0, 2.0, 2.0, 2.0]
    assert kept.valid.tolist() == [True] * 12 + [False] + [True] * 3
    with pytest.raises(ValueError, match=r"keep: expected kinds of time, .* replay, got turn"):
        EpisodeRewards.Config(keep=("turn",))


@pytest.mark.parametrize("order", [list(range(6)), [5, 3, 0, 4, 2, 1]])
def test_an_episode_counts_once_however_many_turns_it_has(toolbox, order):
    # One group: returns 1 (three turns), 0 (one turn), 0.5 (two turns). Mean 1/2, not (3 + 0 + 1)/6 = 2/3.
    trajectories = toolbox.trajectories(["ab", "c", "d", "ef", "g", "h"])
    turns = turns_of(trajectories.uid, [[0.0, 0.0, 1.0], [0.0], [0.5, 0.0]])
    rewards = toolbox.start(EpisodeRewards).run(turns=turns).rewards
    rows = torch.tensor(order)
    trajectories, turns, rewards = (batch.select(rows) for batch in (trajectories, turns, rewards))
    advantage = toolbox.start(GroupAdvantage, normalize="mean")
    credit = advantage.run(trajectories=trajectories, rewards=rewards, turns=turns).credit
    expected = [0.5, 0.5, 0.5, -0.5, 0.0, 0.0]
    assert [row[0] for row in credit.advantage.to_lists()] == pytest.approx([expected[i] for i in order])
    assert advantage.context.metrics["group_size"] == 3
    said = advantage.explain({}, trajectories=trajectories, rewards=rewards, turns=turns)
    assert said[order.index(0)].startswith("r − mean = 1 − .5 = +.5")
    assert said[order.index(0)] == said[order.index(2)]


def test_with_one_turn_each_it_is_the_plain_advantage(toolbox):
    trajectories = toolbox.trajectories(["ab", "c", "d", "ef"], group=[1, 1, 2, 2])
    turns = turns_of(trajectories.uid, [[1.0], [0.0], [0.25], [0.75]])
    rewards = toolbox.start(EpisodeRewards).run(turns=turns).rewards
    start = lambda: toolbox.start(GroupAdvantage, drop_zero_groups=True)  # noqa: E731
    plain = start().run(trajectories=trajectories, rewards=rewards).credit
    episodes = start().run(trajectories=trajectories, rewards=rewards, turns=turns).credit
    assert episodes.advantage.equal(plain.advantage)
    assert episodes.mask.equal(plain.mask)
