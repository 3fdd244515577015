"""Steps of the CPI laboratory: exact values by hand and by enumeration, identities, sampling laws."""

import itertools

import numpy as np
import pytest

from creditgraph.lab.cpi.bounds import claimed_bound, guaranteed_gain
from creditgraph.lab.cpi.families import chain, needle, random_mdps, random_shape, uniform_policy
from creditgraph.lab.cpi.iteration import (
    draw_labels,
    estimate_advantage,
    exact_step,
    greedy,
    improvable,
    localiser_quality,
    localiser_with,
    mean_advantage,
    mixture,
    num_draws,
    regress,
    sampled_step,
)
from creditgraph.lab.cpi.mdp import TabularMDP, evaluate, roll_out, state_distribution


def generator(seed=0):
    return np.random.default_rng(seed)


@pytest.fixture
def by_hand():
    """H = 2, two states, two actions, R_max = 1, uniform policy.

    Step 0, state 0: action 0 pays .5 and stays in state 0; action 1 pays 0 and goes to either state. State 1: both
    actions alike.
    Step 1: state 0 pays (0, .4), state 1 pays (1, .6).
    """
    transitions = np.zeros((1, 2, 2, 2, 2))
    transitions[0, 0, 0, 0] = [1, 0]
    transitions[0, 0, 0, 1] = [0.5, 0.5]
    transitions[0, 0, 1, :] = [0, 1]
    transitions[0, 1, :, :] = [1, 0]
    rewards = np.array([[[[0.5, 0.0], [0.0, 0.0]], [[0.0, 0.4], [1.0, 0.6]]]])
    mdp = TabularMDP(initial=np.array([[1.0, 0.0]]), rewards=rewards, transitions=transitions, max_reward=np.ones(1))
    return mdp, uniform_policy(mdp)


def test_values_and_distribution_by_hand(by_hand):
    mdp, policy = by_hand
    values = evaluate(mdp, policy)
    # V_1 = (.4/2, 1.6/2) = (.2, .8)
    np.testing.assert_allclose(values.v[0, 1], [0.2, 0.8])
    # Q_0(0, ·) = (.5 + .2, 0 + .5·.2 + .5·.8) = (.7, .5), V_0(0) = J = .6
    np.testing.assert_allclose(values.q[0, 0, 0], [0.7, 0.5])
    np.testing.assert_allclose(values.start, [0.6])
    np.testing.assert_allclose(values.advantage[0, 0, 0], [0.1, -0.1])
    # Step 0: (1, 0)/2. Step 1: P(state 0) = .5·1 + .5·.5 = .75, so (.75, .25)/2.
    np.testing.assert_allclose(state_distribution(mdp, policy)[0], [[0.5, 0], [0.375, 0.125]])


def test_both_steps_by_hand(by_hand):
    mdp, policy = by_hand
    values = evaluate(mdp, policy)
    # Best advantages: .1 at step 0 (d = .5), .2 at both states of step 1 (d = .5 together), 0 at (0, 1), never reached.
    oracle = improvable(values, np.array([0.15]))
    np.testing.assert_array_equal(oracle[0], [[0, 0], [1, 1]])
    # Random resets: 𝔸 = .5·.1 + .5·.2 = .15, α = .15/(2·2²·1) = .01875, gain = α·.1 + α·.2 = .005625
    # (step 0 moves α/2 from .5 to .7: α·.1; step 1 gains α·.2 in either state).
    step = exact_step(mdp, policy)
    np.testing.assert_allclose(
        [step.advantage[0], step.alpha[0], step.mass[0], step.improvement[0]], [0.15, 0.01875, 1, 0.005625]
    )
    # Oracle: p = .5, 𝔸_𝒢 = .2, α = .2/(4·2²·1) = .0125, gain = α·.2 = .0025 (only step 1 changes).
    step = exact_step(mdp, policy, oracle)
    np.testing.assert_allclose(
        [step.advantage[0], step.alpha[0], step.mass[0], step.improvement[0]], [0.2, 0.0125, 0.5, 0.0025]
    )
    # Bounds with τ = .15: τ² p/(16·2·1) = .0225·.5/32, and with p² .0225·.25/32; certain: p 𝔸²/(8·2) = .5·.04/16,
    # 𝔸²/(4·2) = .0225/8
    tau, p = np.array([0.15]), np.array([0.5])
    np.testing.assert_allclose(claimed_bound(mdp, tau, p, np.ones(1)), 0.0225 * 0.5 / 32)
    np.testing.assert_allclose(claimed_bound(mdp, tau, p), 0.0225 * 0.25 / 32)
    np.testing.assert_allclose(guaranteed_gain(mdp, step, localised=True), 0.00125)
    np.testing.assert_allclose(guaranteed_gain(mdp, exact_step(mdp, policy), localised=False), 0.0028125)


def enumerate_trajectories(mdp, choices):
    """(J, d [H, S]) by listing every trajectory; choices[h][s] = list of (probability, action), one entry per way to
    choose."""
    horizon, states = mdp.rewards.shape[1:3]
    value, visits = 0.0, np.zeros((horizon, states))
    ways = len(choices[0][0])
    for path in itertools.product(range(states), repeat=horizon):
        for picks in itertools.product(range(ways), repeat=horizon):
            probability, total = mdp.initial[0, path[0]], 0.0
            for h, (s, pick) in enumerate(zip(path, picks, strict=True)):
                chance, action = choices[h][s][pick]
                probability *= chance
                total += mdp.rewards[0, h, s, action]
                if h + 1 < horizon:
                    probability *= mdp.transitions[0, h, s, action, path[h + 1]]
            value += probability * total
            for h, s in enumerate(path):
                visits[h, s] += probability / horizon
    return value, visits


def small_mdp(seed, horizon=3, states=2, actions=2):
    rng = generator(seed)
    mdp = TabularMDP(
        initial=rng.dirichlet(np.ones(states), size=1),
        rewards=rng.random((1, horizon, states, actions)) * 2,
        transitions=rng.dirichlet(np.ones(states), size=(1, horizon, states, actions)),
        max_reward=np.full(1, 2.0),
    )
    return mdp, rng.dirichlet(np.ones(actions), size=(1, horizon, states)), rng


@pytest.mark.parametrize("seed", [0, 1])
def test_dynamic_programming_equals_enumeration_of_all_trajectories(seed):
    mdp, policy, _ = small_mdp(seed, states=3)
    choices = [[[(policy[0, h, s, a], a) for a in range(2)] for s in range(3)] for h in range(3)]
    value, visits = enumerate_trajectories(mdp, choices)
    np.testing.assert_allclose(evaluate(mdp, policy).start[0], value)
    np.testing.assert_allclose(state_distribution(mdp, policy)[0], visits)


def test_mixture_equals_a_coin_flipped_at_every_state():
    mdp, policy, rng = small_mdp(2)
    target, membership = greedy(evaluate(mdp, policy).q), rng.random((1, 3, 2))
    alpha = 0.3
    choices = [
        [
            [(alpha * membership[0, h, s] * target[0, h, s, a], a) for a in range(2)]
            + [((1 - alpha * membership[0, h, s]) * policy[0, h, s, a], a) for a in range(2)]
            for s in range(2)
        ]
        for h in range(3)
    ]
    value, visits = enumerate_trajectories(mdp, choices)
    mixed = mixture(policy, target, np.array([alpha]), membership)
    np.testing.assert_allclose(mixed.sum(-1), 1)
    np.testing.assert_allclose(evaluate(mdp, mixed).start[0], value)
    np.testing.assert_allclose(state_distribution(mdp, mixed)[0], visits)


def test_performance_difference_is_an_identity():
    # J(π') − J(π) = H Σ_x d^π'(x) Σ_y π'(y|x) A^π(x, y)
    for seed in range(10):
        rng = generator(seed)
        mdp, policy = random_mdps(rng, 8)
        other = rng.dirichlet(np.ones(mdp.num_actions), size=policy.shape[:-1])
        values = evaluate(mdp, policy)
        right = mdp.horizon * (state_distribution(mdp, other)[..., None] * other * values.advantage).sum((1, 2, 3))
        np.testing.assert_allclose(evaluate(mdp, other).start - values.start, right, atol=1e-11)


def test_oracle_of_all_states_is_random_resets():
    mdp, policy = random_mdps(generator(3), 30)
    everywhere = improvable(evaluate(mdp, policy), np.zeros(30))  # the best action never has a negative advantage ...
    everywhere = np.maximum(everywhere, 1)  # ... but rounding may say so
    random, localised = exact_step(mdp, policy), exact_step(mdp, policy, everywhere)
    np.testing.assert_allclose(localised.advantage, random.advantage)
    np.testing.assert_allclose(localised.alpha, random.alpha / 2)  # 4 H² R_max against 2 H² R_max
    same = exact_step(mdp, policy, everywhere, alpha=random.alpha)
    np.testing.assert_allclose(same.policy, random.policy)
    np.testing.assert_allclose(same.improvement, random.improvement)


def test_localiser_has_the_rates_it_was_asked_for():
    # d = (.1, .2, .7), 𝒢 = the first two, p = .3; γ = .5 accepts .15 of it, β = .25 adds .05 of the rest.
    distribution, oracle = np.array([[[0.1, 0.2, 0.7]]]), np.array([[[1.0, 1.0, 0.0]]])
    result = localiser_with(distribution, oracle, np.array([0.25]), np.array([0.5]))
    np.testing.assert_allclose(result, [[[0.5, 0.5, 0.05 / 0.7]]])
    np.testing.assert_allclose(localiser_quality(distribution, oracle, result), [[0.25], [0.5]])
    exact = localiser_with(distribution, oracle, np.zeros(1), np.ones(1))
    np.testing.assert_array_equal(exact, oracle)


def test_exact_localiser_is_the_oracle_in_the_bound():
    mdp, _, _ = small_mdp(0)
    tau, p = np.array([0.3]), np.array([0.2])
    # At (1−β)γ = p the localised bound is that of random resets; above it is better.
    np.testing.assert_allclose(claimed_bound(mdp, tau, p, p), claimed_bound(mdp, tau, p))
    assert claimed_bound(mdp, tau, p, p * 1.01) > claimed_bound(mdp, tau, p) > claimed_bound(mdp, tau, p, p * 0.99)


def test_roll_outs_have_the_exact_mean():
    mdp, policy, rng = small_mdp(4)
    q = evaluate(mdp, policy).q
    n = 20_000
    for step, state, action in [(0, 1, 0), (1, 0, 1), (2, 1, 1)]:
        returns = roll_out(mdp, policy, *(np.full(n, v) for v in (step, state, action)), rng)
        assert abs(returns.mean() - q[0, step, state, action]) < 5 * returns.std() / np.sqrt(n) + 1e-12


def test_aggregated_labels_follow_the_law_of_single_roll_outs():
    shape = random_shape(generator(5))
    mdp = chain(shape, 0.2)
    policy = uniform_policy(mdp)
    distribution, values = state_distribution(mdp, policy), evaluate(mdp, policy)
    labels = draw_labels(mdp, policy, distribution, 50, generator(6), repeats=4000)
    assert (labels.counts.sum((1, 2, 3)) == 50).all()
    # E[count] = 50 d(x)/A, E[sum] = E[count] Q(x, y); five standard errors
    expected = 50 * distribution[0, :, :, None] / mdp.num_actions * np.ones(mdp.num_actions)
    np.testing.assert_array_less(abs(labels.counts.mean(0) - expected), 5 * np.sqrt(expected / 4000) + 1e-9)
    np.testing.assert_array_less(abs(labels.sums.mean(0) - expected * values.q[0]), 5 * np.sqrt(expected / 4000) + 1e-9)
    step, state, action = (np.full(20_000, v) for v in (1, 1, 0))
    returns = roll_out(mdp, policy, step, state, action, generator(7))
    assert set(np.unique(returns)) == {0.0, 1.0}
    assert abs(returns.mean() - values.q[0, 1, 1, 0]) < 5 * 0.5 / np.sqrt(20_000)


@pytest.mark.parametrize("localised", [False, True])
@pytest.mark.parametrize("outcome", [False, True])
def test_advantage_estimate_is_unbiased(outcome, localised):
    if outcome:
        mdp = needle(random_shape(generator(1)), 0.2)
        policy = uniform_policy(mdp)
    else:
        mdp, policy, _ = small_mdp(9)
    values, rng = evaluate(mdp, policy), generator(10)
    weights = state_distribution(mdp, policy) * (improvable(values, np.array([0.05])) if localised else 1)
    target, baseline = regress(draw_labels(mdp, policy, weights, 40, rng), policy)
    estimates = estimate_advantage(draw_labels(mdp, policy, weights, 60, rng, 3000), target, policy, baseline)
    exact, _ = mean_advantage(values, target, weights)
    assert abs(estimates.mean() - exact[0]) < 4 * estimates.std() / np.sqrt(3000)


def test_regression_takes_the_best_mean_and_keeps_unseen_states():
    from creditgraph.lab.cpi.iteration import Labels

    policy = np.array([[[[0.3, 0.7], [0.3, 0.7], [0.3, 0.7]]]])
    labels = Labels(counts=np.array([[[[2, 1], [0, 0], [3, 0]]]]), sums=np.array([[[[1.0, 0.2], [0, 0], [0.9, 0]]]]))
    target, baseline = regress(labels, policy)
    # State 0: means (.5, .2) → action 0; state 1: never seen → kept; state 2: the untried action counts as the state's
    # mean, a tie.
    np.testing.assert_allclose(target, [[[[1, 0], [0.3, 0.7], [1, 0]]]])
    np.testing.assert_allclose(baseline, [[[0.4, 0, 0.3]]])


def test_sampled_step_approaches_the_exact_one():
    mdp = needle(random_shape(generator(1)), 0.2)
    policy = uniform_policy(mdp)
    oracle = improvable(evaluate(mdp, policy), np.array([0.05]))
    for membership in (None, oracle):
        exact = exact_step(mdp, policy, membership)
        sampled, estimate = sampled_step(mdp, policy, 2**24, generator(2), membership, repeats=20)
        np.testing.assert_allclose(estimate, np.full(20, exact.advantage[0]), rtol=0.15)
        np.testing.assert_allclose(sampled.improvement, np.full(20, exact.improvement[0]), rtol=0.15)


def test_rejection_draws_one_over_p_resets_per_label():
    draws = num_draws(100, 0.05, generator(0), repeats=2000)
    assert draws.min() >= 100
    # Mean 100/.05 = 2000, standard deviation √(100·.95)/.05 = 195
    assert abs(draws.mean() - 2000) < 5 * 195 / np.sqrt(2000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": np.full((1, 2, 2, 2), 1.5)}, r"rewards: expected values in \[0, max_reward\]"),
        ({"initial": np.array([[0.5, 0.4]])}, "initial: expected rows of non-negative numbers"),
        (
            {"initial": np.ones((2, 2)) / 2},
            r"initial: expected shape \(1, 2\) for rewards \(1, 2, 2, 2\), got \(2, 2\)",
        ),
        ({"outcome": True}, "expected rewards at the last step only"),
    ],
)
def test_bad_mdps_are_refused(by_hand, change, message):
    mdp, _ = by_hand
    fields = {name: getattr(mdp, name) for name in ("initial", "rewards", "transitions", "max_reward", "outcome")}
    with pytest.raises(ValueError, match=message):
        TabularMDP(**{**fields, **change})


def test_roll_out_wants_one_mdp():
    mdp, policy = random_mdps(generator(0), 3)
    one = np.zeros(1, dtype=np.int64)
    with pytest.raises(ValueError, match="got a batch of 3"):
        roll_out(mdp, policy, one, one, one, generator(0))
