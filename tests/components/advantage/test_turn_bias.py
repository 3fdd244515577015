"""Advantages over turns: exact expectations of their gradients on a stop-or-continue problem."""

import statistics

import pytest
import torch
import turn_problem as problem

from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.components.advantage.trees.leaves import TreeLeaves
from creditgraph.components.advantage.trees.siblings import TreeSiblings
from creditgraph.components.advantage.turns.gigpo import GiGPO
from creditgraph.components.advantage.turns.information_gain import InformationGain
from creditgraph.components.advantage.turns.turn_gae import TurnGAE
from creditgraph.components.advantage.turns.turn_group import TurnGroup
from creditgraph.components.value.state_mean import StateMean
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import SegmentValues

SIZE = 3


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


def at_turn(*weights):
    """[states, 1]: the weight of the turn that starts in each state."""
    return problem.per_state(lambda s: weights[problem.TURN_OF[s]])


TREE = {"value": "children", "max_probability": 1.0}


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((2, ()), (1, 1, 1)),
        ((2, (3,)), (1, 4, 4)),  # two nodes at turn 1, each with 3 − 1
        ((2, (2, 2)), (1, 2, 4)),
        ((3, (2,), 2), (2, 2, 3)),  # turns 0 and 1 are one segment
        ((1, (1, 2)), (0, 0, 1)),  # nothing is compared before turn 2
    ],
)
def test_trees_are_unbiased_with_equal_levels_and_have_the_stated_weights_without(toolbox, advantage, shape, parts):
    assert sum(p for *_, p in problem.trees(*shape)) == pytest.approx(1)
    plain = problem.expected_over_trees(toolbox, advantage(TreeSiblings, **TREE), *shape)
    close(plain, at_turn(*parts) * problem.TRUE)
    equal = problem.expected_over_trees(toolbox, advantage(TreeSiblings, equal_levels=True, **TREE), *shape)
    close(equal, (shape[0] - 1) * problem.TRUE)
    if shape[0] > 1:
        assert problem.cosine(equal, problem.TRUE) > 0.999


def test_means_over_leaves_favour_what_leads_to_many(toolbox, advantage):
    settings = TREE | {"value": "leaves", "equal_levels": True}
    result = problem.expected_over_trees(toolbox, advantage(TreeSiblings, **settings), 2, (2, 2))
    assert 0.7 < float(result[0, 1] / problem.TRUE[0, 1]) < 0.8  # at the root; the states after it have no subtrees
    close(result[1:], problem.TRUE[1:])
    # Two levels have no subtrees of different sizes.
    close(problem.expected_over_trees(toolbox, advantage(TreeSiblings, **settings), 2, (2,)), problem.TRUE)


def test_leaves_count_a_level_by_what_is_below_and_are_biased_in_deep_trees(toolbox, advantage):
    leaves = advantage(TreeLeaves, normalize="mean")
    close(problem.expected_over_trees(toolbox, leaves, 2, ()), problem.TRUE)
    deep = problem.expected_over_trees(toolbox, leaves, 2, (2, 2))
    assert problem.cosine(deep, problem.TRUE) == pytest.approx(0.956, abs=1e-3)
    parts = (deep / problem.TRUE)[:, 0].tolist()
    assert parts == pytest.approx([1.258, 6.325, 6.750, 12.161], abs=1e-3)  # turn 1 starts in state 1 or 2


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
