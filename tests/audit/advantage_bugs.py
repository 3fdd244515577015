"""Published faults of advantage functions, rebuilt from what their threads say, each with a repaired form.

Names are those of `BUGS`: the reference, the check that finds it, the wrong function, the repaired one.
"""

import numpy as np
import torch


def by_group(rewards, groups, form):
    out = np.zeros_like(rewards)
    for group in np.unique(groups):
        rows = groups == group
        out[rows] = form(rewards[rows])
    return out


def normalised(r):
    return (r - r.mean()) / (r.std() + 1e-6)


def grpo(rewards: np.ndarray, groups: np.ndarray):
    return by_group(rewards, groups, normalised)


def uneven_over_batch(rewards: np.ndarray, groups: np.ndarray):
    """Groups that cannot be reshaped to a rectangle are normalised as one."""
    sizes = np.unique(groups, return_counts=True)[1]
    return normalised(rewards) if len(set(sizes)) > 1 else grpo(rewards, groups)


def fixed_stride(rewards: np.ndarray, groups: np.ndarray):
    """Groups are found by their usual size, so rows after a smaller group are compared with strangers."""
    size = int(np.unique(groups, return_counts=True)[1].max())
    order = np.argsort(groups, kind="stable")
    out = np.zeros_like(rewards)
    for start in range(0, len(rewards), size):
        rows = order[start : start + size]
        out[rows] = normalised(rewards[rows])
    return out


def tail_by_epsilon(rewards: np.ndarray, groups: np.ndarray):
    """Rows after the last whole group keep mean 0 and standard deviation 0, and are divided by epsilon."""
    size = int(np.unique(groups, return_counts=True)[1].max())
    order = np.argsort(groups, kind="stable")
    mean, std = np.zeros_like(rewards), np.zeros_like(rewards)
    for start in range(0, len(rewards) - size + 1, size):
        rows = order[start : start + size]
        mean[rows], std[rows] = rewards[rows].mean(), rewards[rows].std()
    return (rewards - mean) / (std + 1e-5)


def whole_batch(rewards: np.ndarray, groups: np.ndarray):
    """Mean and standard deviation along the dimension of the batch, not of the group."""
    return normalised(rewards)


def bessel_of_one(scores: torch.Tensor, index: torch.Tensor):
    """The unbiased standard deviation of a group of one is no number."""
    out = torch.zeros_like(scores)
    for group in index.unique():
        rows = index == group
        out[rows] = (scores[rows] - scores[rows].mean()) / (scores[rows].std() + 1e-6)
    return out


def population_of_one(scores: torch.Tensor, index: torch.Tensor):
    out = torch.zeros_like(scores)
    for group in index.unique():
        rows = index == group
        out[rows] = (scores[rows] - scores[rows].mean()) / (scores[rows].std(unbiased=False) + 1e-6)
    return out


def last_turn_only(rewards: np.ndarray, groups: np.ndarray, turns: np.ndarray):
    """The outcome is an advantage of the last turn's tokens; earlier turns get 0."""
    last = turns.max(axis=1, keepdims=True)
    return np.where(turns == last, grpo(rewards, groups)[:, None], 0.0) * (turns >= 0)


def all_turns(rewards: np.ndarray, groups: np.ndarray, turns: np.ndarray):
    return grpo(rewards, groups)[:, None] * (turns >= 0)


def rejected_in_baseline(rewards: np.ndarray, groups: np.ndarray, response_mask: np.ndarray):
    """Rejected rows are masked out of the loss, but their rewards stay in the mean of their group."""
    return grpo(rewards, groups)[:, None] * response_mask


def rejected_left_out(rewards: np.ndarray, groups: np.ndarray, response_mask: np.ndarray):
    kept = response_mask.any(axis=1)
    out = np.zeros_like(rewards)
    out[kept] = grpo(rewards[kept], groups[kept])
    return out[:, None] * response_mask


def returns_to_go(rewards, turn_rewards, turn):
    return rewards + turn_rewards[:, turn:].sum(axis=1)


def per_turn(rewards: np.ndarray, groups: np.ndarray, turns: np.ndarray, turn_rewards: np.ndarray):
    """Each turn is normalised over the rows that reached it; who goes on alone has nothing to be compared with."""
    out = np.zeros(turns.shape)
    for turn in range(turns.max() + 1):
        reached = (turns == turn).any(axis=1)
        value = returns_to_go(rewards, turn_rewards, turn)
        for group in np.unique(groups):
            rows = reached & (groups == group)
            if rows.sum() > 1:
                own = np.zeros_like(rewards)
                own[rows] = normalised(value[rows])
                out += np.where(turns == turn, own[:, None], 0.0)
    return out


def per_episode(rewards: np.ndarray, groups: np.ndarray, turns: np.ndarray, turn_rewards: np.ndarray):
    """One baseline for all rows of the group, whether they reached the turn or not."""
    out = np.zeros(turns.shape)
    for turn in range(turns.max() + 1):
        value = returns_to_go(rewards, turn_rewards, turn)
        centred = by_group(value, groups, lambda r: r - r.mean())
        out += np.where(turns == turn, centred[:, None], 0.0)
    return out


STUDENT = np.array([0.5, 0.3, 0.2])
TEACHER = np.array([0.2, 0.5, 0.3])


def top_k_divergence(rewards: np.ndarray, groups: np.ndarray, mask: np.ndarray):
    """The divergence from a teacher over the most likely tokens, as advantage of the one that was sampled.

    It does not depend on the sampled token, so its expected gradient is 0.
    """
    best = np.argsort(-STUDENT)[:2]
    gap = (STUDENT[best] * np.log(STUDENT[best] / TEACHER[best])).sum()
    return -gap * mask


def outcome(rewards: np.ndarray, groups: np.ndarray, mask: np.ndarray):
    return rejected_left_out(rewards, groups, mask)


BUGS = {
    "slime#1414": ("uneven_groups", uneven_over_batch, grpo),
    "AReaL#1419": ("uneven_groups", fixed_stride, grpo),
    "AReaL#1673": ("uneven_groups", tail_by_epsilon, grpo),
    "grpo-flat#2": ("uneven_groups", whole_batch, grpo),
    "miles#1573": ("no_signal", bessel_of_one, population_of_one),
    "SkyRL#1492": ("credited_turns", last_turn_only, all_turns),
    "verl#6452": ("invalid_rows", rejected_in_baseline, rejected_left_out),
    "verl#7244": ("gradient_stop", per_turn, per_episode),
    "miles#2362": ("gradient_bandit", top_k_divergence, outcome),
}
