"""Advantages by plain loops over the tensors of another trainer, without the payloads of a graph."""

import math


def turns(mask):
    """Of each row [(begin, end)] of its runs of ones."""
    out = []
    for row in mask:
        runs, begin = [], None
        for i, m in enumerate([*row, 0]):
            if m and begin is None:
                begin = i
            if not m and begin is not None:
                runs.append((begin, i))
                begin = None
        out.append(runs)
    return out


def normalised(values, unbiased=False, eps=1e-6):
    mean = sum(values) / len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - unbiased, 1))
    return [(v - mean) / (std + eps) for v in values]


def by_key(values, keys, unbiased=False):
    out = [0.0] * len(values)
    for key in set(keys):
        rows = [i for i, k in enumerate(keys) if k == key]
        for i, a in zip(rows, normalised([values[i] for i in rows], unbiased), strict=True):
            out[i] = a
    return out


def spread(mask, per_turn):
    """Advantages per token from those of each row's turns."""
    out = [[0.0] * len(row) for row in mask]
    for i, runs in enumerate(turns(mask)):
        for (begin, end), a in zip(runs, per_turn[i], strict=True):
            out[i][begin:end] = [a] * (end - begin)
    return out


def grpo(mask, rewards, group):
    advantage = by_key(rewards, group)
    return [[advantage[i] if m else 0.0 for m in row] for i, row in enumerate(mask)]


def gigpo(mask, turn_rewards, group, states, omega, gamma=0.95):
    episode = by_key([sum(r) for r in turn_rewards], group, unbiased=True)
    returns, keys, where = [], [], []
    for i, rewards in enumerate(turn_rewards):
        for t in range(len(rewards)):
            returns.append(sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))))
            keys.append((group[i], states[i][t]))
            where.append(i)
    step = by_key(returns, keys, unbiased=True)
    out = [[] for _ in mask]
    for i, a in zip(where, step, strict=True):
        out[i].append(episode[i] + omega * a)
    return spread(mask, out)


def turn_gae(mask, turn_rewards, group, states):
    """γ = λ = 1: the return from a turn on, minus the mean of other episodes of the group from its state."""
    out = []
    for i, rewards in enumerate(turn_rewards):
        row = []
        for t in range(len(rewards)):
            others = [
                sum(turn_rewards[j][u:])
                for j in range(len(mask))
                if j != i and group[j] == group[i]
                for u in range(len(turn_rewards[j]))
                if states[j][u] == states[i][t]
            ]
            whole = [sum(turn_rewards[j]) for j in range(len(mask)) if j != i and group[j] == group[i]]
            value = sum(others) / len(others) if others else sum(whole) / len(whole) - sum(rewards[:t])
            row.append(sum(rewards[t:]) - value)
        out.append(row)
    return spread(mask, out)


def states_of(mask, tokens):
    """The tokens read since the turn before; "start" where there are none."""
    out = []
    for row, runs in enumerate(turns(mask)):
        ends = [0, *(end for _, end in runs)]
        out.append([str(tokens[row][ends[k] : begin]) if k or begin else "start" for k, (begin, _) in enumerate(runs)])
    return out
