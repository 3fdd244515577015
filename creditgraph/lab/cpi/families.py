"""Families of MDPs: three where p_π is a knob over decades, and random ones.

The three families are outcome MDPs: one reward, paid with some probability at the end, as a verifier pays it. At easy
states all actions are alike (A^π = 0), at hard states one action is right, and `knob` sets how often hard states come
up.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from creditgraph.lab.cpi.mdp import Floats, TabularMDP

EASY, HARD, GOOD, BAD = 0, 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a seed fixes for a family."""

    horizon: int
    num_actions: int
    gap: float
    """Size of what a hard decision decides, in (0, 0.5]."""
    base: float
    """Success probability of the final reward before any gap."""
    table: int
    """Seed of the random tables (only `scattered` has any)."""


def random_shape(rng: np.random.Generator) -> Shape:
    """A shape of moderate size: H in 4..8, A in 2..4, gap in [0.2, 0.35], base in [0.4, 0.6]."""
    return Shape(
        horizon=int(rng.integers(4, 9)),
        num_actions=int(rng.integers(2, 5)),
        gap=float(rng.uniform(0.2, 0.35)),
        base=float(rng.uniform(0.4, 0.6)),
        table=int(rng.integers(2**31)),
    )


def _batch_of_one(initial: Floats, rewards: Floats, transitions: Floats) -> TabularMDP:
    return TabularMDP(
        initial=initial[None], rewards=rewards[None], transitions=transitions[None], max_reward=np.ones(1), outcome=True
    )


def needle(shape: Shape, knob: float) -> TabularMDP:
    """At most one hard decision per trajectory, met with probability `knob` per step until it is met.

    The right action leads to GOOD (paid with base + gap), any other to BAD (base − gap); a trajectory without the
    decision is paid with `base`. So A^π at a hard state does not depend on the knob, and under uniform π p_π = (1 − (1
    − knob)^H)/H.
    """
    h, a = shape.horizon, shape.num_actions
    transitions, rewards = np.zeros((h, 4, a, 4)), np.zeros((h, 4, a))
    transitions[:, EASY, :, HARD], transitions[:, EASY, :, EASY] = knob, 1 - knob
    transitions[:, HARD, 0, GOOD] = transitions[:, HARD, 1:, BAD] = 1
    transitions[:, GOOD, :, GOOD] = transitions[:, BAD, :, BAD] = 1
    rewards[-1] = shape.base
    rewards[-1, GOOD] += shape.gap
    rewards[-1, BAD] -= shape.gap
    rewards[-1, HARD, 0] += shape.gap
    rewards[-1, HARD, 1:] -= shape.gap
    return _batch_of_one(np.array([1 - knob, knob, 0, 0]), rewards, transitions)


def chain(shape: Shape, knob: float) -> TabularMDP:
    """Any number of hard decisions: each step is one with probability `knob`.

    A wrong action there ruins the chain with probability 2·gap (BAD, never paid); a chain that is not ruined is paid
    with `base`. The reward of one decision depends on those still to come, so A^π falls slowly as the knob rises.
    """
    h, a = shape.horizon, shape.num_actions
    ruin = 2 * shape.gap
    transitions, rewards = np.zeros((h, 4, a, 4)), np.zeros((h, 4, a))
    transitions[:, (EASY, HARD, GOOD), :, EASY] = 1 - knob
    transitions[:, (EASY, HARD, GOOD), :, HARD] = knob
    transitions[:, HARD, 1:] *= 1 - ruin
    transitions[:, HARD, 1:, BAD] = ruin
    transitions[:, BAD, :, BAD] = 1
    rewards[-1] = shape.base
    rewards[-1, BAD] = 0
    rewards[-1, HARD, 1:] *= 1 - ruin
    return _batch_of_one(np.array([1 - knob, knob, 0, 0]), rewards, transitions)


def scattered(shape: Shape, knob: float) -> TabularMDP:
    """Random tables of eight states per step, two of them hard.

    Every state leads to the hard ones with probability `knob` in all, and what a hard decision does is random too
    (another distribution of next states and of final rewards per action).
    """
    rng = np.random.default_rng(shape.table)
    h, a, easy, hard = shape.horizon, shape.num_actions, 6, 2
    s = easy + hard
    to_easy = rng.dirichlet(np.ones(easy), size=(h, s, a))
    to_hard = rng.dirichlet(np.ones(hard), size=(h, s, a))
    quality = np.linspace(shape.base - shape.gap, shape.base + shape.gap, easy)
    # Action 0 of a hard state leads to the best easy states, the others to the worst; easy states keep their quality.
    to_easy[:, :easy] = np.eye(easy)[None, :, None]
    tilt = np.exp(3 * np.linspace(-1, 1, easy))
    to_easy[:, easy:, 0] *= tilt
    to_easy[:, easy:, 1:] *= tilt[::-1]
    to_easy /= to_easy.sum(-1, keepdims=True)
    to_hard[:, :easy] = to_hard[:, :easy, :1]
    transitions = np.concatenate([(1 - knob) * to_easy, knob * to_hard], axis=-1)
    rewards = np.zeros((h, s, a))
    rewards[-1, :easy] = quality[:, None]
    rewards[-1, easy:] = to_easy[-1, easy:] @ quality
    initial = np.concatenate([(1 - knob) * rng.dirichlet(np.ones(easy)), knob * rng.dirichlet(np.ones(hard))])
    return _batch_of_one(initial, rewards, transitions)


FAMILIES: dict[str, Callable[[Shape, float], TabularMDP]] = {"needle": needle, "chain": chain, "scattered": scattered}


def uniform_policy(mdp: TabularMDP) -> Floats:
    """[B, H, S, A]: every action alike."""
    return np.full(mdp.rewards.shape, 1 / mdp.num_actions)


def random_mdps(rng: np.random.Generator, count: int) -> tuple[TabularMDP, Floats]:
    """`count` MDPs of one random shape (H in 1..12, S in 1..8, A in 2..6) with random policies: (mdp, policy).

    Every MDP has its own R_max (0.1 to 10), reward sparsity, and concentration of transitions and policy, from nearly
    deterministic to nearly uniform.
    """
    h, s, a = int(rng.integers(1, 13)), int(rng.integers(1, 9)), int(rng.integers(2, 7))

    def distributions(*shape: int) -> Floats:
        concentration = 10 ** rng.uniform(-1.5, 1, size=(count,) + (1,) * len(shape))
        draws = rng.standard_gamma(np.broadcast_to(concentration, (count, *shape))) + 1e-12
        normalised: Floats = draws / draws.sum(-1, keepdims=True)
        return normalised

    max_reward = 10 ** rng.uniform(-1, 1, size=count)
    share = rng.uniform(0.05, 1, size=(count, 1, 1, 1))
    rewards = rng.random((count, h, s, a)) * (rng.random((count, h, s, a)) < share) * max_reward[:, None, None, None]
    mdp = TabularMDP(
        initial=distributions(s), rewards=rewards, transitions=distributions(h, s, a, s), max_reward=max_reward
    )
    return mdp, distributions(h, s, a)
