"""Decision problems so small that the policy gradient is a finite sum.

A policy is a table of logits [states, actions], π(a | s) = softmax(logits[s]). A response is a list of decisions
(state, action), each one token; between turns there may be observations, which are tokens that nobody chose. With R(y)
the return of a response, J = Σ_y π(y) R(y) and ∇J = Σ_y π(y) R(y) Σ_t ∇ log π(a_t | s_t).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from creditgraph.pipeline.app.audit.batch import Batch, Floats, make

Decision = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response that the policy can give.

    Attributes:
        decisions: state and action of each token, None for an observation.
        turns: the turn of each token, −1 for an observation.
        reward: outcome.
        turn_rewards: rewards of its turns.
        chance: probability of what is not decided by the policy: how an environment answers.
    """

    decisions: tuple[Decision | None, ...]
    turns: tuple[int, ...]
    reward: float
    turn_rewards: tuple[float, ...] = ()
    chance: float = 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """A problem with all its responses.

    Attributes:
        name: for messages.
        title: what it is, as a phrase.
        responses: all of them; their probabilities add up to 1.
        logits: float64 [states, actions], the policy.
        actions: int [states], how many of the actions each state has.
        states: name of each state, for counter-examples.
    """

    name: str
    title: str
    responses: tuple[Response, ...]
    logits: Floats
    actions: tuple[int, ...]
    states: tuple[str, ...]

    def logprobs(self, logits: Floats | None = None) -> Floats:
        """float64 [states, actions], −∞ for actions that a state does not have."""
        logits = self.logits if logits is None else logits
        has = np.arange(logits.shape[1])[None, :] < np.array(self.actions)[:, None]
        held = np.where(has, logits, -np.inf)
        top = held.max(1, keepdims=True)
        out: Floats = held - top - np.log(np.exp(held - top).sum(1, keepdims=True))
        return out

    def probability(self) -> Floats:
        """float64 [responses]."""
        table = self.logprobs()
        return np.array([r.chance * math.exp(sum(table[d] for d in r.decisions if d)) for r in self.responses])

    @cache  # noqa: B019
    def scores(self) -> list[Floats]:
        """∇ log π of each token, per response float64 [tokens, states, actions]; 0 for observations."""
        probs = np.exp(self.logprobs())
        out = []
        for response in self.responses:
            grads = np.zeros((len(response.decisions), *self.logits.shape))
            for t, decision in enumerate(response.decisions):
                if decision:
                    state, action = decision
                    grads[t, state] = -probs[state]
                    grads[t, state, action] += 1.0
            out.append(grads)
        return out

    def returns(self, with_turns: bool) -> Floats:
        """float64 [responses]: outcome, and rewards of turns if the target is given them."""
        return np.array([r.reward + (sum(r.turn_rewards) if with_turns else 0.0) for r in self.responses])

    @cache  # noqa: B019 - there are six problems
    def values(self, chosen: int, with_turns: bool, noise: float = 0.0) -> list[float]:
        """V before each token of a response: the expectation, over what agrees with it so far, of what is still due.

        With `noise` a number of no meaning is added that depends, like V, on what is before the token.
        """
        probability, returns = self.probability(), self.returns(with_turns)
        own = self.responses[chosen]
        out = []
        for t in range(len(own.decisions)):
            agree = np.array([r.decisions[:t] == own.decisions[:t] for r in self.responses])
            paid = sum(r for k, r in enumerate(own.turn_rewards) if with_turns and k not in own.turns[t:])
            wrong = noise * ((5 * t + sum(3 + 7 * s + 4 * a for s, a in filter(None, own.decisions[:t]))) % 11) / 11
            out.append(float((probability * agree) @ returns / (probability @ agree)) - paid + wrong)
        return out

    def true_gradient(self, with_turns: bool) -> Floats:
        """∇J, float64 [states, actions]."""
        weight = self.probability() * self.returns(with_turns)
        out: Floats = np.sum([w * s.sum(0) for w, s in zip(weight, self.scores(), strict=True)], axis=0)
        return out

    def lengths(self) -> Floats:
        """float64 [responses]: tokens that the policy chose."""
        return np.array([sum(d is not None for d in r.decisions) for r in self.responses], dtype=np.float64)

    def row_mean_gradient(self) -> Floats:
        """Σ p (R − E R) ∇ log π / length, float64 [states, actions]: what a mean over each row follows."""
        probability, returns = self.probability(), self.returns(False)
        weight = probability * (returns - probability @ returns) / self.lengths()
        out: Floats = np.sum([w * s.sum(0) for w, s in zip(weight, self.scores(), strict=True)], axis=0)
        return out

    def doubled(self, most: int) -> tuple[int, int]:
        """n and 2n, the largest sizes of groups of which there are at most `most`."""
        kinds = len(self.responses)
        half = 2
        while math.comb(kinds + 2 * (half + 1) - 1, kinds - 1) <= most:
            half += 1
        return half, 2 * half

    def groups(self, size: int) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Every multiset of `size` responses with its probability."""
        probability = self.probability()
        for chosen in itertools.combinations_with_replacement(range(len(self.responses)), size):
            ways = math.factorial(size)
            for count in np.bincount(chosen):
                ways //= math.factorial(int(count))
            yield ways * float(np.prod(probability[list(chosen)])), chosen

    def by_state(self, gradient: Floats) -> dict[str, list[float]]:
        """A gradient as a person reads it: state → its actions."""
        own = zip(self.states, self.actions, np.round(gradient, 4).tolist(), strict=True)
        return {state: row[:count] for state, count, row in own}

    def batch(self, chosen: tuple[int, ...], with_turns: bool = False, noise: float = 0.0) -> Batch:
        """One group of responses, with the true V and `noise` as the values of a critic."""
        rows = [self.responses[i] for i in chosen]
        return make(
            [r.reward for r in rows],
            [0] * len(rows),
            turns=[list(r.turns) for r in rows],
            turn_rewards=[list(r.turn_rewards) for r in rows],
            values=[self.values(i, with_turns, noise) for i in chosen],
        )


def _bandit() -> Problem:
    rewards = (0.0, 1.0, 0.0)
    rows = tuple(Response(decisions=((0, a),), turns=(0,), reward=r) for a, r in enumerate(rewards))
    logits = np.array([[0.6, -0.4, 0.1]])
    return Problem(
        name="bandit",
        title="one decision, right or wrong",
        responses=rows,
        logits=logits,
        actions=(3,),
        states=("the only decision",),
    )


def _lengths() -> Problem:
    # Right or wrong in one token, or in four of which two leave no choice.
    rows = (
        Response(decisions=((0, 0),), turns=(0,), reward=1.0),
        *(Response(decisions=((0, 1), (1, 0), (2, 0), (3, a)), turns=(0,) * 4, reward=float(a == 0)) for a in range(2)),
        Response(decisions=((0, 2),), turns=(0,), reward=0.0),
    )
    return Problem(
        name="lengths",
        title="responses of one or four tokens",
        responses=rows,
        logits=np.array([[-0.5, 0.4, 0.3], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.2, -0.3, 0.0]]),
        actions=(3, 1, 1, 2),
        states=("token 0", "token 1", "token 2", "token 3"),
    )


def _chain() -> Problem:
    rows = tuple(
        Response(decisions=((0, a), (1 + a, b)), turns=(0, 0), reward=float(a == 0 and b == 1))
        for a, b in itertools.product(range(2), repeat=2)
    )
    logits = np.array([[0.2, -0.3], [0.5, -0.1], [-0.2, 0.4]])
    return Problem(
        name="chain",
        title="two decisions, both must be right",
        responses=rows,
        logits=logits,
        actions=(2, 2, 2),
        states=("token 0", "token 1 after action 0", "token 1 after action 1"),
    )


def _graded() -> Problem:
    rewards = (0.0, 1.0, 0.4, 0.6)
    rows = tuple(Response(decisions=((0, a),), turns=(0,), reward=r) for a, r in enumerate(rewards))
    logits = np.array([[0.6, -0.4, 0.1, 0.5]])
    return Problem(
        name="graded",
        title="one decision, graded rewards",
        responses=rows,
        logits=logits,
        actions=(4,),
        states=("the only decision",),
    )


def _stop() -> Problem:
    # Few go on, and what they decide then matters most: a group has seldom two of them to compare.
    def ends(decisions: tuple[Decision | None, ...], turns: tuple[int, ...], right: float) -> list[Response]:
        return [
            Response(decisions=decisions, turns=turns, reward=reward, chance=chance)
            for reward, chance in ((1.0, right), (0.0, 1.0 - right))
        ]

    rows = (
        *ends(((0, 0),), (0,), 0.2),
        *ends(((0, 1), None, (1, 0)), (0, -1, 1), 0.05),
        *ends(((0, 1), None, (1, 1)), (0, -1, 1), 0.95),
    )
    logits = np.array([[0.7, -0.7], [0.1, -0.1]])
    return Problem(
        name="stop",
        title="stop, or go on to another turn",
        responses=rows,
        logits=logits,
        actions=(2, 2),
        states=("turn 0: stop or go on", "turn 1"),
    )


def _turns() -> Problem:
    rows = tuple(
        Response(
            decisions=((0, a), None, (1 + a, b)),
            turns=(0, -1, 1),
            reward=float(b == 1),
            turn_rewards=(0.6 * (a == 0), 0.3 * (b == 0)),
        )
        for a, b in itertools.product(range(2), repeat=2)
    )
    logits = np.array([[-0.1, 0.4], [0.2, -0.3], [-0.5, 0.3]])
    return Problem(
        name="turns",
        title="two turns, each with a reward, and an outcome",
        responses=rows,
        logits=logits,
        actions=(2, 2, 2),
        states=("turn 0", "turn 1 after action 0", "turn 1 after action 1"),
    )


PROBLEMS = (_bandit(), _graded(), _lengths(), _chain(), _stop(), _turns())
