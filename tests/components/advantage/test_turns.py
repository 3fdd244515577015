"""Advantages over turns: numbers by hand, slow loops, and exact expectations on a stop-or-continue problem."""

import statistics

import pytest
import torch
import turn_problem as problem

from components.advantage.group import GroupAdvantage
from components.advantage.turns.gigpo import GiGPO
from components.advantage.turns.information_gain import InformationGain
from components.advantage.turns.turn_gae import TurnGAE, turn_gae
from components.advantage.turns.turn_group import TurnGroup
from components.rollouts.turn_rows import by_episode, returns_to_go, state_groups
from components.value.state_mean import StateMean
from pipeline.core.errors import AlignmentError
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import SegmentValues, Turns

SIZE = 3


@pytest.fixture
def advantage(toolbox):
    """Advantage of a component with these settings, as a function of its inputs."""

    def build(kind, **settings):
        return lambda **given: toolbox.start(kind, **settings).run(**given).credit

    return build


def with_values(run, value):
    """`run` with values of states, or with those of a component."""

    def call(**given):
        if callable(value):
            return run(**given, values=value(**given))
        rows = [[value[int(s[1:])], 0.0] for s in given["turns"].state]
        return run(**given, values=SegmentValues(uid=given["turns"].uid, values=Jagged.from_rows(rows, torch.float64)))

    return call


def close(left, right, tolerance=2e-6):
    return torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


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
    # Joint: the mean of .3, 1, 0 is 13/30. Separate: one gain alone has 0, outcomes 1 and 0 have ±.5.
    assert run(normalize="mean") == pytest.approx([1.3 - 26 / 30, 1 - 13 / 30, -13 / 30])
    assert run(normalize="mean", compare="separate") == pytest.approx([0.5, 0.5, -0.5])


def test_state_mean_by_hand(toolbox):
    # Episodes A(1) B(2), A(0), A(4) C(6); returns 3, 2; 0; 10, 6. v(A) of the first is (0 + 10)/2, v(B) has no peer:
    # the others' mean 5 less the 1 it has received.
    trajectories = toolbox.trajectories(["x"] * 5)
    turns = turns_of(trajectories, [2, 1, 2], [1.0, 2.0, 0.0, 4.0, 6.0], "ABAAC")
    rewards = toolbox.rewards(trajectories.uid, [3, 3, 0, 10, 10])
    values = toolbox.start(StateMean).run(trajectories=trajectories, turns=turns, rewards=rewards).values.values
    assert values.to_lists() == [[5, 4], [4, 0], [6.5, 0], [1.5, -2.5], [-2.5, 0]]


# --- slow versions and identities ---


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
        spread = {"mean": 1.0, "std": statistics.pstdev(peers) + eps, "std_exact": statistics.pstdev(peers)}[normalize]
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


def test_outcomes_of_episodes_are_unbiased_and_of_rows_are_not(toolbox, advantage):
    close(problem.expected(toolbox, advantage(TurnGroup, normalize="mean", weight=0), SIZE), (SIZE - 1) * problem.TRUE)
    close(problem.expected(toolbox, advantage(GiGPO, normalize="mean", omega=0), SIZE), (SIZE - 1) * problem.TRUE)
    rows = lambda trajectories, turns, rewards: advantage(GroupAdvantage, normalize="mean")(  # noqa: E731
        trajectories=trajectories, rewards=rewards
    )
    # Over rows the mean weighs an episode by its number of turns, which depends on its actions.
    assert problem.cosine(problem.expected(toolbox, rows, 2), problem.TRUE) < 0.999
    close(problem.in_the_limit(toolbox, rows), problem.TRUE)  # any constant baseline is unbiased


def test_turn_rewards_have_the_stated_bias(toolbox, advantage):
    own = lambda s, a: sum(p * r for p, r, _ in problem.STEPS[s, a])  # noqa: E731
    p = [problem.reach(lambda s, a, last, t=t: problem.TURN_OF[s] == t) for t in range(3)]
    share = [1 - (1 - (1 - x) ** SIZE) / (SIZE * x) for x in p]
    visited = problem.per_state(lambda s: problem.reach(lambda x, a, last: x == s) * share[problem.TURN_OF[s]])
    bias = SIZE * visited * problem.policy_part(own)
    result = problem.expected(toolbox, advantage(TurnGroup, normalize="mean", last_turn=True), SIZE)
    close(result, (SIZE - 1) * problem.TRUE + bias)
    assert problem.cosine(result, problem.TRUE) < 0.99


def test_turn_rewards_without_the_last_turn_have_the_stated_bias(toolbox, advantage):
    own = lambda s, a: sum(p * r for p, r, _ in problem.STEPS[s, a])  # noqa: E731
    bias = torch.zeros_like(problem.TRUE)
    for t, states in enumerate(([0], [1, 2])):
        p = problem.reach(lambda s, a, last, t=t: problem.TURN_OF[s] == t and not last)
        share = 1 - (1 - (1 - p) ** SIZE) / (SIZE * p)
        goes_on = {s: problem.reach(lambda x, a, last, s=s: x == s and not last) for s in states}
        mean = sum(goes_on[s] * own(s, 1) for s in states) / p
        bias += SIZE * share * sum(goes_on[s] * (own(s, 1) - mean) * problem.score(s, 1) for s in states)
    result = problem.expected(toolbox, advantage(TurnGroup, normalize="mean"), SIZE)
    close(result, (SIZE - 1) * problem.TRUE + bias)
    assert bias.abs().max() > 0.01
    assert bias[0].abs().max() < 1e-12  # all that go on at turn 1 have the same reward: nothing to compare


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_gigpo_has_the_stated_bias(toolbox, advantage, size, gamma):
    p = problem.per_state(lambda s: problem.reach(lambda x, a, last: x == s))
    part = problem.policy_part(lambda s, a: problem.action_value(s, a, gamma))
    result = problem.expected(toolbox, advantage(GiGPO, normalize="mean", omega=0.5, gamma=gamma), size)
    close(result, (size - 1) * problem.TRUE + 0.5 * (size * p - (1 - (1 - p) ** size)) * part)
    if gamma == 1:  # then the part is ∇J / p
        factor = size - 1 + 0.5 * (size - (1 - (1 - p) ** size) / p)
        close(result, factor * problem.TRUE)
        assert problem.cosine(result, problem.TRUE) > (0.99 if size > 2 else 0.98)


def test_gigpo_with_std_divides_each_state_by_its_spread(toolbox, advantage):
    result = problem.in_the_limit(toolbox, advantage(GiGPO, normalize="std_exact", gamma=1.0))
    outcomes = [e.total for e in problem.ALL for _ in range(round(64 * e.probability))]

    def spread(state):
        returns = [
            sum(r for *_, r in e.steps[t:])
            for e in problem.ALL
            for t, (s, _, _) in enumerate(e.steps)
            for _ in range(round(64 * e.probability))
            if s == state
        ]
        return statistics.pstdev(returns)

    close(result, (1 / statistics.pstdev(outcomes) + 1 / problem.per_state(spread)) * problem.TRUE)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_gae_with_exact_values_is_unbiased(toolbox, advantage, lam):
    values = [problem.state_value(s) for s in range(problem.STATES)]
    result = problem.expected(toolbox, with_values(advantage(TurnGAE, lam=lam), values), 1)
    close(result, problem.TRUE)


def test_gae_with_any_value_of_the_state_is_unbiased_at_lambda_1(toolbox, advantage):
    result = problem.expected(toolbox, with_values(advantage(TurnGAE), [0.3, -2.0, 1.0, 0.1]), 1)
    close(result, problem.TRUE)
    biased = problem.expected(toolbox, with_values(advantage(TurnGAE, lam=0.0), [0.3, -2.0, 1.0, 0.1]), 1)
    assert problem.cosine(biased, problem.TRUE) < 0.9


def test_gae_with_the_mean_of_other_episodes_is_unbiased_at_lambda_1(toolbox, advantage):
    values = lambda **given: toolbox.start(StateMean).run(**given).values  # noqa: E731
    close(problem.expected(toolbox, with_values(advantage(TurnGAE), values), SIZE), SIZE * problem.TRUE, 1e-5)


LIKELIHOOD = [0.2, 0.5, 0.4, 0.7]


def test_information_gain_has_the_stated_bias(toolbox, advantage):
    raw = problem.expected(toolbox, with_values(advantage(InformationGain, compare="none"), LIKELIHOOD), 1)
    both = problem.expectation_gradient(lambda e: e.total + LIKELIHOOD[e.steps[-1][0]])
    close(raw, both)
    # In the limit of large groups: (∇(J + E[v(s_T)]) − m ∇E[T]) / σ over all rewards of all turns.
    r = [
        x
        for e in problem.ALL
        for _ in range(round(64 * e.probability))
        for x in (
            *(LIKELIHOOD[b[0]] - LIKELIHOOD[a[0]] for a, b in zip(e.steps, e.steps[1:], strict=False)),
            e.total,
        )
    ]
    m, sigma = statistics.fmean(r), statistics.pstdev(r)
    result = problem.in_the_limit(toolbox, with_values(advantage(InformationGain, normalize="std_exact"), LIKELIHOOD))
    close(result, (both - m * problem.expectation_gradient(lambda e: len(e.steps))) / sigma)


# --- bad input and explanations ---


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
