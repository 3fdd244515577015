"""A stop-or-continue problem whose J(θ), ∇J and every episode can be enumerated; no language model.

In state 0, 1 and 2 an agent stops or goes on, in state 3 it chooses between two ends. Turns 2 and 3 are reached only by
going on, and turn 2 starts in state 1 or 2.
"""

import itertools
import math
from dataclasses import dataclass

import torch

from creditgraph.pipeline.core.payloads import Turns

# (state, action) → [(probability, reward, next state or None)].
STEPS = {
    (0, 0): [(1.0, 0.3, None)],
    (0, 1): [(0.5, -0.1, 1), (0.5, -0.1, 2)],
    (1, 0): [(1.0, 0.9, None)],
    (1, 1): [(1.0, -0.2, 3)],
    (2, 0): [(1.0, 0.1, None)],
    (2, 1): [(1.0, 0.2, 3)],
    (3, 0): [(1.0, 1.0, None)],
    (3, 1): [(1.0, 0.0, None)],
}
STATES, TURN_OF = 4, [0, 1, 1, 2]
POLICY = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.75, 0.25], [0.5, 0.5]], dtype=torch.float64)  # π(action | state)


@dataclass(frozen=True)
class Episode:
    """One way through the problem: `steps` of (state, action, reward), and its probability under POLICY."""

    steps: tuple[tuple[int, int, float], ...]
    probability: float

    @property
    def total(self):
        return sum(r for *_, r in self.steps)


def episodes(state=0, steps=(), probability=1.0):
    """All episodes."""
    found = []
    for action in (0, 1):
        for chance, reward, following in STEPS[state, action]:
            p, path = probability * chance * float(POLICY[state, action]), (*steps, (state, action, reward))
            found += [Episode(path, p)] if following is None else episodes(following, path, p)
    return found


ALL = episodes()


def score(state, action):
    """∇ log π(action | state) with respect to the logits [states, 2]."""
    gradient = torch.zeros(STATES, 2, dtype=torch.float64)
    gradient[state] = -POLICY[state]
    gradient[state, action] += 1
    return gradient


def expectation_gradient(worth):
    """∇ E[worth(episode)], by the sum over all episodes."""
    return sum(e.probability * worth(e) * sum(score(s, a) for s, a, _ in e.steps) for e in ALL)


TRUE = expectation_gradient(lambda e: e.total)


def reach(choose):
    """Probability that an episode has a step (state, action, whether it is the last) for which `choose` is true."""
    return sum(
        e.probability for e in ALL if any(choose(s, a, i == len(e.steps) - 1) for i, (s, a, _) in enumerate(e.steps))
    )


def action_value(state, action, gamma=1.0):
    """Q(state, action) with discount gamma."""
    value = lambda s: sum(float(POLICY[s, a]) * action_value(s, a, gamma) for a in (0, 1))  # noqa: E731
    return sum(p * (r + gamma * (0.0 if s is None else value(s))) for p, r, s in STEPS[state, action])


def state_value(state):
    """V(state)."""
    return sum(float(POLICY[state, a]) * action_value(state, a) for a in (0, 1))


def policy_part(worth):
    """Σ_a ∇π(a | s) worth(s, a) for each state, [states, 2]."""
    return sum(float(POLICY[s, a]) * score(s, a) * worth(s, a) for s in range(STATES) for a in (0, 1))


def per_state(weight):
    """[states, 1]: weight(state)."""
    return torch.tensor([[weight(s)] for s in range(STATES)], dtype=torch.float64)


def inputs(toolbox, groups, lineage=None):
    """Trajectories, turns and rewards of groups of episodes, and (state, action) of each row; a token per turn.

    With `lineage` an episode has rows from its turn `begin` on, and continues that of its group at place `above`:
    lineage[g][place] = (above, begin).
    """
    rows, group, first, number, total, done, parent = [], [], [], [], [], [], []
    for g, members in enumerate(groups):
        path = []  # of each episode of the group, the rows of all its turns
        for place, episode in enumerate(members):
            above, begin = lineage[g][place] if lineage else (-1, 0)
            start = 1000 + len(rows)
            path.append(path[above][:begin] if begin else [])
            for t, step in enumerate(episode.steps[begin:], begin):
                path[-1].append(len(rows))
                rows.append(step)
                group.append(g)
                first.append(start)
                number.append(t)
                parent.append(1000 + path[-1][begin - 1] if t == begin and begin else -1)
                total.append(sum(r for *_, r in episode.steps[begin:]))
                done.append(t == len(episode.steps) - 1)
    trajectories = toolbox.trajectories(["x"] * len(rows), group=group, parent=torch.tensor(parent))
    turns = Turns(
        uid=trajectories.uid,
        episode=torch.tensor(first),
        turn=torch.tensor(number),
        state=[f"s{s}" for s, _, _ in rows],
        reward=torch.tensor([r for *_, r in rows]),
        done=torch.tensor(done),
        fault=[""] * len(rows),
    )
    rewards = toolbox.rewards(trajectories.uid, total)
    return {"trajectories": trajectories, "turns": turns, "rewards": rewards}, [(s, a) for s, a, _ in rows]


def trees(size, branching, every=1):
    """All trees of `size` episodes with branches at turn `every`, 2 `every`, …: (episodes, lineage, probability)."""
    found = [
        (list(m), [(-1, 0)] * size, math.prod(e.probability for e in m)) for m in itertools.product(ALL, repeat=size)
    ]
    for level, width in enumerate(branching, 1):
        at = level * every
        deeper = []
        for members, lineage, p in found:
            live = [i for i, e in enumerate(members) if len(e.steps) > at] * (width - 1)
            ways = [episodes(members[i].steps[at][0], members[i].steps[:at]) for i in live]
            for new in itertools.product(*ways):
                chance = math.prod(e.probability for e in new)
                deeper.append(([*members, *new], [*lineage, *((i, at) for i in live)], p * chance))
        found = deeper
    return found


def expected_over_trees(toolbox, advantage, *shape):
    """As `expected`, over all trees of this shape."""
    groups, lineage, weight = zip(*trees(*shape), strict=True)
    given, choices = inputs(toolbox, groups, lineage)
    return _sum(advantage(**given), choices, torch.tensor(weight, dtype=torch.float64)[given["trajectories"].group])


def expected(toolbox, advantage, size):
    """E[Σ_rows A ∇log π] over all groups of `size` episodes; `advantage` takes the inputs and returns the credit."""
    groups = list(itertools.product(ALL, repeat=size))
    given, choices = inputs(toolbox, groups)
    weight = torch.tensor([math.prod(e.probability for e in g) for g in groups], dtype=torch.float64)
    return _sum(advantage(**given), choices, weight[given["trajectories"].group])


def in_the_limit(toolbox, advantage):
    """Mean of Σ_turns A ∇log π over the episodes of one group in which each is as frequent as it is probable.

    That is the limit of large groups; all probabilities are multiples of 1/64.
    """
    members = [e for e in ALL for _ in range(round(64 * e.probability))]
    assert len(members) == 64
    given, choices = inputs(toolbox, [members])
    return _sum(advantage(**given), choices, torch.full((len(choices),), 1 / 64, dtype=torch.float64))


def _sum(credit, choices, weight):
    amount = weight * credit.advantage.values.double()
    assert len(amount) == len(choices)
    place = torch.tensor([2 * s + a for s, a in choices])
    totals = torch.zeros(2 * STATES, dtype=torch.float64).index_add_(0, place, amount).reshape(STATES, 2)
    return sum(float(totals[s, a]) * score(s, a) for s in range(STATES) for a in (0, 1))


def cosine(left, right):
    return float((left * right).sum() / left.norm() / right.norm())
