"""Advantages over turns: numbers by hand and slow loops."""

import math
import statistics

import pytest
import torch

from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.components.advantage.trees.leaves import TreeLeaves
from creditgraph.components.advantage.trees.siblings import TreeSiblings
from creditgraph.components.advantage.turns.gigpo import GiGPO
from creditgraph.components.advantage.turns.information_gain import InformationGain
from creditgraph.components.advantage.turns.turn_gae import TurnGAE
from creditgraph.components.advantage.turns.turn_group import TurnGroup
from creditgraph.components.rewards.episode import EpisodeRewards
from creditgraph.components.rollouts.turn_rows import by_episode, returns_to_go, state_groups, turn_gae
from creditgraph.components.value.state_mean import StateMean
from creditgraph.pipeline.core.errors import AlignmentError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import SegmentValues, Turns


def turns_of(trajectories, episodes, reward, state):
    """Turns with these numbers of turns per episode."""
    lengths = torch.tensor(episodes)
    first = trajectories.uid[torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])]
    return Turns(
        uid=trajectories.uid,
        episode=first.repeat_interleave(lengths),
        turn=torch.cat([torch.arange(n) for n in episodes]),
        state=list(state),
        reward=torch.tensor(reward, dtype=torch.float32),
        done=torch.zeros(len(trajectories), dtype=torch.bool),
        fault=[""] * len(trajectories),
    )


@pytest.fixture
def batch(toolbox):
    """Two groups; random episodes, states (some unknown) and rewards, one episode invalid."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 6, (24,), generator=generator).tolist()
    total = sum(lengths)
    owner = [e for e, n in enumerate(lengths) for _ in range(n)]
    trajectories = toolbox.trajectories(["ab"] * total, group=[7 if e < 12 else 9 for e in owner])
    state = ["" if s == 5 else "ABCDE"[s] for s in torch.randint(0, 6, (total,), generator=generator).tolist()]
    reward = torch.randn(total, generator=generator).tolist()
    turns = turns_of(trajectories, lengths, reward, state)
    returns = [sum(float(turns.reward[i]) for i in range(total) if owner[i] == e) for e in owner]
    rewards = toolbox.rewards(trajectories.uid, returns, [e != 4 for e in owner])
    return {"trajectories": trajectories, "turns": turns, "rewards": rewards}


def per_turn(credit):
    """One number per row, which all of its tokens have."""
    rows = credit.advantage.to_lists()
    assert all(len(set(row)) == 1 for row in rows)
    return [row[0] for row in rows]


# --- by hand ---


def test_turn_group_by_hand(toolbox, advantage):
    # One group, episodes of 2, 1 and 2 turns with outcomes 1, 0, 2: advantages 0, −1, +1. Turn rewards of the first
    # turns that are not last: .5 (episode 1) and .1 (episode 3), mean .3.
    trajectories = toolbox.trajectories(["x"] * 5)
    turns = turns_of(trajectories, [2, 1, 2], [0.5, 0.0, 0.0, 0.1, 0.4], "abcde")
    rewards = toolbox.rewards(trajectories.uid, [1, 1, 0, 2, 2])
    given = {"trajectories": trajectories, "turns": turns, "rewards": rewards}
    credit = advantage(TurnGroup, normalize="mean")(**given)
    assert per_turn(credit) == pytest.approx([0 + 0.2, 0, -1, 1 - 0.2, 1])
    # With last turns: the first turns .5, 0, .1 have mean .2, the second ones 0 and .4 have mean .2.
    credit = advantage(TurnGroup, normalize="mean", weight=0.5, last_turn=True)(**given)
    assert per_turn(credit) == pytest.approx([0.15, -0.1, -1.1, 0.95, 1.1])


def test_turn_group_with_outcomes_apart_by_hand(toolbox, advantage):
    # Two episodes of two turns: turn rewards 1 and 0, outcomes 0 and 2. Outcomes −1 and +1 about their mean 1, first
    # turns ±.5. The first episode is not paid for its turn's reward again: with the sums 1 and 2 it would have −.5.
    trajectories = toolbox.trajectories(["x"] * 4)
    turns = turns_of(trajectories, [2, 2], [1.0, 0.0, 0.0, 2.0], "abcd")
    outcome = toolbox.start(EpisodeRewards, outcome="last").run(turns=turns).rewards
    assert outcome.value.tolist() == [0, 0, 2, 2]
    given = {"trajectories": trajectories, "turns": turns, "rewards": outcome}
    assert per_turn(advantage(TurnGroup, normalize="mean")(**given)) == pytest.approx([-0.5, -1, 0.5, 1])
    # cae with γ = .5: first turns 1 + 0 and 0 + 1, so 0 each; last turns the outcome's −1 and +1.
    assert per_turn(advantage(TurnGroup, normalize="mean", form="cae", gamma=0.5)(**given)) == [0, -1, 0, 1]


def test_gigpo_divides_by_n_minus_1(toolbox, advantage):
    # A pair in one state with returns 1 and 0: deviation √(.25 + .25) = .7071, so ±.5/.7071 = ±.7071, with n ±1.
    trajectories = toolbox.trajectories(["x"] * 2)
    turns = turns_of(trajectories, [1, 1], [1.0, 0.0], "ss")
    given = {
        "trajectories": trajectories,
        "turns": turns,
        "rewards": toolbox.rewards(trajectories.uid, [1, 0]),
    }
    run = lambda **settings: per_turn(advantage(GiGPO, eps=0.0, **settings)(**given))  # noqa: E731
    assert run() == pytest.approx([2 * 0.5**0.5, -2 * 0.5**0.5])
    assert run(unbiased=False) == pytest.approx([2, -2])
    assert run(omega=0.0) == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_similar_states_are_one_in_the_order_of_the_rows():
    group = torch.tensor([0, 0, 0, 0, 1])
    state = ["room one", "room two", "a lake", "", "room one"]
    # "room one" and "room two" share "room " and "o": ratio 2·6/16 = .75.
    assert state_groups(group, state, 0.75).tolist() == [0, 0, 1, 6, 2]
    assert state_groups(group, state, 0.76).tolist() == state_groups(group, state).tolist() == [0, 1, 2, 7, 3]


def test_gae_by_hand():
    # Rewards 1, 2 and values 3, 4: δ = 1 + 4 − 3 = 2 and 2 + 0 − 4 = −2; λ = .5 gives 2 − 1 = 1 and −2.
    reward = Jagged.from_rows([[1.0, 2.0], [5.0]], torch.float64)
    value = torch.tensor([3.0, 4.0, 1.0], dtype=torch.float64)
    assert turn_gae(reward, value, 1.0, 0.5).tolist() == [1, -2, 4]
    assert turn_gae(reward, value, 1.0, 1.0).tolist() == [0, -2, 4]  # the rewards that follow, without the value
    # γ = .5: δ = 1 + 2 − 3 = 0 and −2; γλ = .25 gives 0 − .5.
    assert turn_gae(reward, value, 0.5, 0.5).tolist() == [-0.5, -2, 4]


def test_information_gain_by_hand(toolbox, advantage):
    # Likelihoods .1, .4 and outcome 1 of the first episode, .2 and outcome 0 of the second: r = .3, 1, 0.
    trajectories = toolbox.trajectories(["x"] * 3)
    turns = turns_of(trajectories, [2, 1], [0.0, 1.0, 0.0], "abc")
    values = SegmentValues(
        uid=trajectories.uid, values=Jagged.from_rows([[0.1, 0.9], [0.4, 0.9], [0.2, 0.9]], torch.float32)
    )
    given = {
        "trajectories": trajectories,
        "turns": turns,
        "values": values,
        "rewards": toolbox.rewards(trajectories.uid, [1, 1, 0]),
    }
    run = lambda **settings: per_turn(advantage(InformationGain, **settings)(**given))  # noqa: E731
    assert run(compare="none", gamma=0.5) == pytest.approx([0.3 + 0.5, 1, 0])
    # Of logarithms log(.4/.1) = log 4; with γ = 0 a turn has its own alone.
    assert run(compare="none", gamma=0.0, log=True) == pytest.approx([math.log(4), 1, 0])
    assert run(compare="none", gamma=0.5, log=True) == pytest.approx([math.log(4) + 0.5, 1, 0])
    # Joint: the mean of .3, 1, 0 is 13/30. Separate: one gain alone has 0, outcomes 1 and 0 have ±.5.
    assert run(normalize="mean") == pytest.approx([1.3 - 26 / 30, 1 - 13 / 30, -13 / 30])
    assert run(normalize="mean", compare="separate") == pytest.approx([0.5, 0.5, -0.5])


def test_gains_of_logarithms_telescope_and_a_likelihood_of_0_gives_no_credit(toolbox, advantage):
    trajectories = toolbox.trajectories(["x"] * 4)
    turns = turns_of(trajectories, [3, 1], [0.0, 0.0, 0.0, 0.0], "abcd")
    rows = [[0.1, 0.9], [0.3, 0.9], [0.2, 0.9], [0.0, 0.9]]
    values = SegmentValues(uid=trajectories.uid, values=Jagged.from_rows(rows, torch.float32))
    given = {"trajectories": trajectories, "turns": turns, "values": values}
    rewards = toolbox.rewards(trajectories.uid, [1, 1, 1, 0])
    node = advantage(InformationGain, compare="none", log=True, gamma=1.0)
    # log .3 − log .1 + log .2 − log .3 + 1 = log 2 + 1
    assert per_turn(node(**given, rewards=rewards))[0] == pytest.approx(math.log(2) + 1)
    first = SegmentValues(uid=trajectories.uid, values=Jagged.from_rows([[0.0, 0.9], *rows[1:]], torch.float32))
    assert per_turn(node(**given | {"values": first}, rewards=rewards))[:3] == [0, 0, 0]


def test_state_mean_by_hand(toolbox):
    # Episodes A(1) B(2), A(0), A(4) C(6); returns 3, 2; 0; 10, 6. v(A) of the first is (0 + 10)/2, v(B) has no peer:
    # the others' mean 5 less the 1 it has received.
    trajectories = toolbox.trajectories(["x"] * 5)
    turns = turns_of(trajectories, [2, 1, 2], [1.0, 2.0, 0.0, 4.0, 6.0], "ABAAC")
    rewards = toolbox.rewards(trajectories.uid, [3, 3, 0, 10, 10])
    values = toolbox.start(StateMean).run(trajectories=trajectories, turns=turns, rewards=rewards).values.values
    assert values.to_lists() == [[5, 4], [4, 0], [6.5, 0], [1.5, -2.5], [-2.5, 0]]


# --- slow versions and identities ---


@pytest.mark.parametrize("gamma", [0.0, 0.7])
def test_cae_is_its_slow_loop(batch, advantage, gamma):
    trajectories, turns, rewards = batch["trajectories"], batch["turns"], batch["rewards"]
    rows = range(len(turns))
    last = [i + 1 == len(turns) or int(turns.turn[i + 1]) == 0 for i in rows]
    compared = [
        (int(trajectories.group[i]), int(turns.turn[i])) if rewards.valid[i] and not last[i] else None for i in rows
    ]
    value = [float(turns.reward[i]) + gamma * float(rewards.value[i]) for i in rows]
    ends = {
        g: [float(rewards.value[i]) for i in rows if last[i] and rewards.valid[i] and trajectories.group[i] == g]
        for g in (7, 9)
    }
    expected = []
    for i in rows:
        peers = (
            [value[j] for j in rows if compared[j] == compared[i]] if compared[i] else ends[int(trajectories.group[i])]
        )
        own = value[i] if compared[i] else float(rewards.value[i])
        expected.append(own - statistics.fmean(peers) if rewards.valid[i] else 0.0)
    credit = advantage(TurnGroup, normalize="mean", form="cae", gamma=gamma)(**batch)
    assert per_turn(credit) == pytest.approx(expected, abs=1e-5)


def test_outcomes_apart_with_one_turn_each_are_the_sum(toolbox):
    turns = turns_of(toolbox.trajectories(["x"] * 3), [1, 1, 1], [0.5, -1.0, 2.0], "abc")
    of = lambda outcome: toolbox.start(EpisodeRewards, outcome=outcome).run(turns=turns).rewards.value  # noqa: E731
    assert of("last").tolist() == of("sum").tolist() == [0.5, -1.0, 2.0]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.0), (1.0, 0.6), (0.9, 1.0), (0.8, 0.5)])
def test_gae_is_the_mixture_of_returns_of_n_turns(batch, gamma, lam):
    # Â = (1 − λ) Σ_n λ^(n−1) (n-step return) + λ^(rest) (whole return) − v, the definition of GAE.
    reward = by_episode(batch["trajectories"], batch["turns"])
    value = torch.rand(len(batch["turns"]), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = []
    for r, v in zip(reward.to_lists(), reward.with_values(value).to_lists(), strict=True):
        for t in range(len(r)):
            rest = len(r) - t
            steps = [
                sum(gamma**k * r[t + k] for k in range(n)) + (gamma**n * v[t + n] if n < rest else 0.0)
                for n in range(1, rest + 1)
            ]
            mixed = sum((1 - lam) * lam**n * x for n, x in enumerate(steps[:-1])) + lam ** (rest - 1) * steps[-1]
            expected.append(mixed - v[t])
    assert turn_gae(reward, value, gamma, lam).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("normalize", ["std", "mean", "std_exact"])
@pytest.mark.parametrize(("omega", "gamma"), [(1.0, 0.95), (0.4, 1.0), (2.0, 0.0)])
def test_gigpo_is_that_of_the_papers_formulas(batch, advantage, normalize, omega, gamma):
    expected = gigpo_by_dicts(batch, normalize, omega, gamma, 1e-6)
    credit = advantage(GiGPO, normalize=normalize, omega=omega, gamma=gamma)(**batch)
    assert per_turn(credit) == pytest.approx(expected, abs=1e-6)
    assert max(abs(a) for a in expected) > 0.5


def gigpo_by_dicts(batch, normalize, omega, gamma, eps):
    """2505.10978: episodes of a group, then steps of a group by anchor state; plain loops and dicts."""
    turns, rewards = batch["turns"], batch["rewards"]
    count = len(turns)
    group, valid = batch["trajectories"].group.tolist(), rewards.valid.tolist()
    paths = {}
    for i in range(count):
        paths.setdefault(int(turns.episode[i]), []).append(i)

    def norm(x, peers):
        mean = statistics.fmean(peers)
        spread = {
            "mean": 1.0,
            "std": (statistics.stdev(peers) if len(peers) > 1 else 0.0) + eps,
            "std_exact": statistics.pstdev(peers),
        }[normalize]
        return 0.0 if spread < 1e-8 else (x - mean) / spread

    outcomes, anchors, returns = {}, {}, {}
    for rows in paths.values():
        if not valid[rows[0]]:
            continue
        outcomes.setdefault(group[rows[0]], []).append(float(rewards.value[rows[0]]))
        for t, i in enumerate(rows):
            returns[i] = sum(gamma ** (k - t) * float(turns.reward[j]) for k, j in enumerate(rows) if k >= t)
            anchors.setdefault((group[i], turns.state[i] or i), []).append(returns[i])
    return [
        norm(float(rewards.value[i]), outcomes[group[i]])
        + omega * norm(returns[i], anchors[group[i], turns.state[i] or i])
        if valid[i]
        else 0.0
        for i in range(count)
    ]


def test_turn_group_is_that_of_plain_loops(batch, advantage, reference):
    trajectories, turns, rewards = batch.values()
    rows = range(len(turns))
    valid, episode = rewards.valid.tolist(), turns.episode.tolist()
    firsts = [i for i in rows if turns.turn[i] == 0]
    outcome = reference.group_advantage(
        *([x[i] for i in firsts] for x in (rewards.value.tolist(), trajectories.group.tolist(), valid)),
        "std", False, 1e-6,
    )  # fmt: skip
    by_episode_uid = dict(zip((episode[i] for i in firsts), outcome, strict=True))
    counts = [valid[i] and i + 1 in rows and episode[i + 1] == episode[i] for i in rows]
    place = [(int(trajectories.group[i]), int(turns.turn[i])) for i in rows]
    own = reference.group_advantage(turns.reward.tolist(), place, counts, "std", False, 1e-6)
    expected = [by_episode_uid[e] + 0.7 * t for e, t in zip(episode, own, strict=True)]
    assert per_turn(advantage(TurnGroup, weight=0.7)(**batch)) == pytest.approx(expected, abs=1e-5)


def test_returns_and_state_groups(batch):
    rewards = by_episode(batch["trajectories"], batch["turns"])
    for row, result in zip(rewards.to_lists(), returns_to_go(rewards, 0.9).to_lists(), strict=True):
        assert result == pytest.approx(
            [sum(0.9 ** (k - t) * row[k] for k in range(t, len(row))) for t in range(len(row))]
        )
    ids = state_groups(torch.tensor([1, 1, 2, 1, 1]), ["a", "a", "a", "", ""]).tolist()
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4


def test_an_invalid_episode_has_no_credit_and_changes_nothing(batch, advantage):
    valid = batch["rewards"].valid
    kept = {name: part.select(valid) for name, part in batch.items()}
    for kind in (TurnGroup, GiGPO):
        whole, alone = per_turn(advantage(kind)(**batch)), per_turn(advantage(kind)(**kept))
        assert [a for a, ok in zip(whole, valid.tolist(), strict=True) if ok] == alone
        assert {a for a, ok in zip(whole, valid.tolist(), strict=True) if not ok} == {0.0}


# --- exact expectations ---


TREE = {"value": "children", "max_probability": 1.0}


def test_tree_of_turns_by_hand(toolbox, advantage):
    # Episode A: rewards .5, 0, 1. B branches off A at turn 1 with 0; C off A at turn 2 with 3; D is a root with .2.
    #   A0 ─┬─ A1 ─┬─ A2   return 1.5
    #       │      └─ C2   return 3.5
    #       └─ B1          return .5
    #   D0                 return .2
    trajectories = toolbox.trajectories(["xy"] * 6, parent=torch.tensor([-1, -1, -1, 1000, 1001, -1]))
    turns = turns_of(trajectories, [3, 1, 1, 1], [0.5, 0, 1, 0, 3, 0.2], "abcbcx").replace(
        turn=torch.tensor([0, 1, 2, 1, 2, 0])
    )
    rewards = toolbox.rewards(trajectories.uid, [1.5, 1.5, 1.5, 0, 3, 0.2])
    given = {"trajectories": trajectories, "turns": turns, "rewards": rewards}
    # V: A2 1.5, C2 3.5, A1 2.5, B1 .5, A0 1.5, D0 .2.
    assert per_turn(advantage(TreeSiblings, **TREE)(**given)) == pytest.approx([0.65, 1, -1, -1, 1, -0.65])
    # Nodes below A count half, those below A1 a quarter.
    node = toolbox.start(TreeSiblings, equal_levels=True, **TREE)
    credit = node.run(**given).credit
    assert per_turn(credit) == pytest.approx([0.65, 0.5, -0.25, -0.5, 0.25, -0.65])
    assert bool(credit.mask.values.all())
    assert (node.context.metrics["nodes"], node.context.metrics["leaves"]) == (6, 4)
    assert "1.5 − .85 = +.65, V over 3 leaves" in node.explain({"credit": credit}, **given)[0]
    assert "3.5 − 2.5 = +1, weighed +.25, V over 1 leaf" in node.explain({"credit": credit}, **given)[4]
    # A has a fault: its last turn alone loses its credit, those before it are as C and B continue them.
    valid = torch.tensor([False, False, False, True, True, True])
    given["rewards"] = rewards.replace(valid=valid)
    lost = per_turn(advantage(TreeSiblings, **TREE)(**given))
    # V: C2 3.5 = A1, B1 .5, A0 2.
    assert lost == pytest.approx([0.9, 1.5, 0, -1.5, 0, -0.9])
    assert "invalid" in toolbox.start(TreeSiblings, **TREE).explain({}, **given)[2]
    kept = torch.tensor([0, 1, 2, 4, 5])
    with pytest.raises(AlignmentError, match=r"got 0 of 1 before turn 2 of trajectory 1001\. Merge"):
        advantage(TreeSiblings)(**{name: part.select(torch.arange(1, 6)) for name, part in given.items()})
    without_b = {name: part.select(kept) for name, part in given.items()}
    assert per_turn(advantage(TreeSiblings, **TREE)(**without_b))[3] == 0


def test_leaves_of_a_tree_of_turns_by_hand(toolbox, advantage):
    # As above: returns A 1.5, C 3.5, B .5 in one tree (mean 11/6), D .2 alone; across them the mean is 5.7/4 = 1.425.
    # A2 −.3333 + .075, C2 1.6667 + 2.075, B1 −1.3333 − .925; A1 is above A and C, A0 above A, B and C, D0 above D.
    trajectories = toolbox.trajectories(["xy"] * 6, parent=torch.tensor([-1, -1, -1, 1000, 1001, -1]))
    turns = turns_of(trajectories, [3, 1, 1, 1], [0.5, 0, 1, 0, 3, 0.2], "abcbcx").replace(
        turn=torch.tensor([0, 1, 2, 1, 2, 0])
    )
    rewards = toolbox.rewards(trajectories.uid, [1.5, 1.5, 1.5, 0, 3, 0.2])
    given = {"trajectories": trajectories, "turns": turns, "rewards": rewards}
    a, c, b = -1 / 3 + 0.075, 5 / 3 + 2.075, -4 / 3 - 0.925
    expected = [a + b + c, a + c, a, b, c, 0.2 - 1.425]
    assert per_turn(advantage(TreeLeaves, normalize="mean")(**given)) == pytest.approx(expected)
    lines = toolbox.start(TreeLeaves, normalize="mean").explain({}, **given)
    assert "+1.67 + (+2.08) = +3.74, leaves below: 1" in lines[4]


def test_a_tree_without_branches_is_the_outcome_of_episodes(batch, advantage):
    leaves = per_turn(advantage(TreeLeaves)(**batch))
    assert leaves == pytest.approx(per_turn(advantage(TurnGroup, weight=0)(**batch)), abs=1e-5)
    tree = per_turn(advantage(TreeSiblings, **TREE)(**batch))
    outcome = per_turn(advantage(TurnGroup, normalize="mean", weight=0)(**batch))
    assert tree == pytest.approx(outcome, abs=1e-5)


def test_mistaken_inputs_are_named(batch, toolbox):
    component = toolbox.start(GiGPO)
    mixed = torch.arange(len(batch["turns"])).flip(0)
    with pytest.raises(AlignmentError, match="expected the turns of an episode in consecutive rows, in their order"):
        component.run(**{name: part.select(mixed) for name, part in batch.items()})
    value = batch["rewards"].value.clone()
    value[1 + int((batch["turns"].turn[1:] > 0).nonzero()[0])] += 1
    with pytest.raises(AlignmentError, match=r"expected one reward per episode.*Wire rewards\.episode"):
        component.run(**{**batch, "rewards": batch["rewards"].replace(value=value)})


@pytest.mark.parametrize("kind", [TurnGroup, GiGPO, TurnGAE, InformationGain])
def test_explanations_give_the_credit(batch, toolbox, kind):
    if kind in (TurnGAE, InformationGain):
        batch["values"] = toolbox.start(StateMean).run(**batch).values
    component = toolbox.start(kind)
    credit = component.run(**batch).credit
    texts = component.explain({"credit": credit}, **batch)
    assert len(texts) == len(batch["turns"])
    assert sum("invalid" in text for text in texts) == int((~batch["rewards"].valid).sum())


@pytest.mark.parametrize("compare", ["gae", "joint", "separate", "none"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_episode_with_an_unknown_value_alone_has_no_credit(batch, toolbox, compare, bad):
    kind, settings = (TurnGAE, {}) if compare == "gae" else (InformationGain, {"compare": compare})
    rows = torch.rand(len(batch["turns"]), 2, generator=torch.Generator().manual_seed(0))
    lost = batch["turns"].episode == batch["turns"].episode[-1]
    clean = SegmentValues(uid=batch["turns"].uid, values=Jagged.from_rows(list(rows)))
    rows = rows.clone()
    rows[-1, 0] = bad
    node = toolbox.start(kind, **settings)
    got = node.run(**batch, values=SegmentValues(uid=batch["turns"].uid, values=Jagged.from_rows(list(rows)))).credit
    # As if that episode's reward were invalid.
    rewards = batch["rewards"].replace(valid=batch["rewards"].valid & ~lost)
    expected = toolbox.start(kind, **settings).run(**{**batch, "rewards": rewards}, values=clean).credit
    assert got.advantage.equal(expected.advantage)
    assert node.context.metrics["unvalued"] == 1
    assert [r["row"]["uid"] for r in node.context.rejected] == [int(batch["turns"].episode[-1])]


def test_rewards_that_differ_within_an_episode_are_refused_by_the_group_too(batch, toolbox):
    value = batch["rewards"].value.clone()
    value[0] += 1
    with pytest.raises(AlignmentError, match="expected one reward per episode"):
        toolbox.start(GroupAdvantage).run(**{**batch, "rewards": batch["rewards"].replace(value=value)})


def test_the_value_of_a_lone_episode_is_0(toolbox):
    trajectories = toolbox.trajectories(["a", "a"], group=[0, 0])
    turns = turns_of(trajectories, [2], [3.0, 1.0], ["", ""])
    rewards = toolbox.rewards(trajectories.uid, [4.0, 4.0])
    values = toolbox.start(StateMean).run(trajectories=trajectories, turns=turns, rewards=rewards).values
    assert values.values.to_lists() == [[0, 0], [0, 0]]
