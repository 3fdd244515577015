"""Batches of finite-horizon tabular MDPs: exact evaluation, state distributions, roll-outs.

Shapes: B MDPs, H steps, S states per step, A actions. A state x of the theory is a pair (step h, state s): a chain of
thoughts never returns to where it was. B = 1 broadcasts against a batch of policies, so that many policies of one MDP
are evaluated at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TabularMDP:
    """B finite-horizon MDPs of one shape.

    With `outcome`, all rewards but those of the last step are 0 and the last one pays max_reward with probability
    rewards/max_reward, else 0: the verifiable reward of a reasoning chain. Otherwise rewards are paid as they stand.
    """

    initial: Floats
    """[B, S]: distribution of the first state."""
    rewards: Floats
    """[B, H, S, A]: mean reward of an action, in [0, max_reward]."""
    transitions: Floats
    """[B, H, S, A, S]: distribution of the next state (unused after the last step)."""
    max_reward: Floats
    """[B]: R_max, the largest reward of one step."""
    outcome: bool = False

    def __post_init__(self) -> None:
        if self.rewards.ndim != 4:
            raise ValueError(f"rewards: expected shape [B, H, S, A], got {self.rewards.shape}.")
        b, h, s, a = self.rewards.shape
        shapes = {"initial": (b, s), "transitions": (b, h, s, a, s), "max_reward": (b,)}
        for name, shape in shapes.items():
            actual = getattr(self, name).shape
            if actual != shape:
                raise ValueError(f"{name}: expected shape {shape} for rewards {self.rewards.shape}, got {actual}.")
        for name in ("initial", "transitions"):
            table = getattr(self, name)
            if (table < 0).any() or not np.allclose(table.sum(-1), 1):
                raise ValueError(f"{name}: expected rows of non-negative numbers that sum to 1.")
        limit = self.max_reward[:, None, None, None]
        if (self.rewards < 0).any() or (self.rewards > limit * (1 + 1e-12)).any():
            raise ValueError("rewards: expected values in [0, max_reward], the range that the step sizes assume.")
        if self.outcome and self.rewards[:, :-1].any():
            raise ValueError("outcome=True: expected rewards at the last step only, got some earlier.")

    @property
    def horizon(self) -> int:
        """H."""
        return int(self.rewards.shape[1])

    @property
    def num_actions(self) -> int:
        """A."""
        return int(self.rewards.shape[3])

    def row(self, index: int) -> TabularMDP:
        """One MDP of the batch, as a batch of one."""
        cut = slice(index, index + 1)
        return TabularMDP(
            initial=self.initial[cut],
            rewards=self.rewards[cut],
            transitions=self.transitions[cut],
            max_reward=self.max_reward[cut],
            outcome=self.outcome,
        )


@dataclass(frozen=True, kw_only=True)
class Values:
    """Exact values of a policy."""

    q: Floats
    """[B, H, S, A]: expected return from an action on."""
    v: Floats
    """[B, H, S]: expected return from a state on."""
    start: Floats
    """[B]: J(π), the expected return from the initial distribution."""

    @property
    def advantage(self) -> Floats:
        """[B, H, S, A]: A^π(x, y) = Q^π(x, y) − V^π(x)."""
        return self.q - self.v[..., None]


def evaluate(mdp: TabularMDP, policy: Floats) -> Values:
    """Exact values of `policy` [B, H, S, A] by dynamic programming from the last step.

    Q_h = r_h + P_h V_{h+1}, V_h = Σ_y π_h(y) Q_h(y), V_H = 0.
    """
    shape = np.broadcast_shapes(mdp.rewards.shape, policy.shape)
    q, v = np.empty(shape), np.empty(shape[:-1])
    following = np.zeros((shape[0], shape[2]))
    for h in reversed(range(shape[1])):
        q[:, h] = mdp.rewards[:, h] + (mdp.transitions[:, h] @ following[:, None, :, None])[..., 0]
        v[:, h] = following = (policy[:, h] * q[:, h]).sum(-1)
    return Values(q=q, v=v, start=(mdp.initial * v[:, 0]).sum(-1))


def state_distribution(mdp: TabularMDP, policy: Floats) -> Floats:
    """d^π [B, H, S], the distribution of a uniformly random reset: d(h, s) = P(s_h = s)/H; sums to 1."""
    b, h, s, a = np.broadcast_shapes(mdp.rewards.shape, policy.shape)
    visits = np.empty((b, h, s))
    visits[:, 0] = mdp.initial
    for step in range(h - 1):
        flow = (visits[:, step, :, None] * policy[:, step]).reshape(b, 1, s * a)
        visits[:, step + 1] = (flow @ mdp.transitions[:, step].reshape(-1, s * a, s))[:, 0]
    distribution: Floats = visits / h
    return distribution


def inverse_cdf(rows: Floats, uniform: Floats) -> Ints:
    """Draws one index per row of `rows` [N, M] (distributions) from `uniform` [N] in [0, 1)."""
    total = rows.cumsum(-1)
    index = (total <= uniform[:, None] * total[:, -1:]).sum(-1)
    return np.minimum(index, rows.shape[-1] - 1)


def roll_out(
    mdp: TabularMDP, policy: Floats, steps: Ints, states: Ints, actions: Ints, rng: np.random.Generator
) -> Floats:
    """Sampled returns [N] of one MDP (B = 1): from (steps, states) [N] take `actions` [N], then follow `policy`."""
    if mdp.rewards.shape[0] != 1:
        raise ValueError(f"roll_out: expected one MDP, got a batch of {mdp.rewards.shape[0]}. Use mdp.row(i).")
    state = states.copy()
    action = actions.copy()
    returns = np.zeros(len(states))
    last = mdp.horizon - 1
    for h in range(mdp.horizon):
        started = np.flatnonzero(steps <= h)
        fresh = started[steps[started] < h]
        action[fresh] = inverse_cdf(policy[0, h, state[fresh]], rng.random(len(fresh)))
        reward = mdp.rewards[0, h, state[started], action[started]]
        if mdp.outcome and h == last:
            reward = mdp.max_reward[0] * (rng.random(len(started)) * mdp.max_reward[0] < reward)
        returns[started] += reward
        if h < last:
            state[started] = inverse_cdf(
                mdp.transitions[0, h, state[started], action[started]], rng.random(len(started))
            )
    return returns
