"""Assigns trajectories to replicas, so that all of them get about as many tokens.

A step takes as long as its slowest replica. Trajectories of one prompt share its prefix, so they stay together as long
as that is even enough: longest first, each prompt to the replica with the least load so far (LPT, Graham 1969: at most
the mean and one prompt). With few prompts per replica that is far from even; then prompts are cut into pieces, each of
which computes the prefix again.
"""

from __future__ import annotations

import heapq
import math

import torch
from torch import Tensor

EVEN = 1.1  # fullest replica over the mean up to which prompts stay whole
PIECES = (1.0, 0.5, 0.25, 0.125)  # largest pieces of a prompt that are tried, as shares of a replica's mean load


def assign(costs: Tensor, lengths: Tensor, group: Tensor, num_replicas: int) -> Tensor:
    """The replica of each row, int64 [rows]; the same on every replica, and at least as even as `contiguous`.

    Args:
        costs: [rows], non-negative, tokens to compute for each row beside those that a row before it shares.
        lengths: [rows], tokens of each row by itself, at least its cost.
        group: int64 [rows], rows that share a prefix (their prompt's uid).
        num_replicas: at least 1.

    >>> assign(torch.tensor([5, 1, 2, 2]), torch.tensor([5, 4, 2, 2]), torch.tensor([7, 7, 8, 9]), 2).tolist()
    [0, 0, 1, 1]
    """
    if num_replicas == 1 or not len(costs):
        return torch.zeros_like(group)
    which, count = _in_order(group)
    mean = float(costs.double().sum()) / num_replicas
    best = contiguous(group, num_replicas)
    most = float(loads(costs, lengths, group, best, num_replicas).max())
    for share in (math.inf, *PIECES):
        piece, pieces = _cut(costs, which, count, share * mean)
        total = loads(costs, lengths, group, piece, pieces)
        spread = _longest_first(total, num_replicas)[piece]
        fullest = float(loads(costs, lengths, group, spread, num_replicas).max())
        if fullest < most:
            best, most = spread, fullest
        if most <= EVEN * mean:
            break
    return best


def contiguous(group: Tensor, num_replicas: int) -> Tensor:
    """The replica of each row, int64 [rows], when groups are cut evenly in their order, as without balancing."""
    which, count = _in_order(group)
    return which * num_replicas // max(count, 1)


def loads(costs: Tensor, lengths: Tensor, group: Tensor, part: Tensor, parts: int) -> Tensor:
    """Tokens that each part of the rows computes, float64 [parts]; the arguments are those of `assign`.

    A part that has only some rows of a group computes what they share once more.

    >>> costs, lengths, group = torch.tensor([5, 1, 2]), torch.tensor([5, 4, 2]), torch.tensor([7, 7, 8])
    >>> loads(costs, lengths, group, torch.tensor([0, 1, 0]), 2).tolist()
    [7.0, 4.0]
    """
    out = torch.zeros(parts, dtype=torch.float64, device=costs.device).index_add(0, part, costs.double())
    pairs, which = torch.unique(torch.stack([group, part]), dim=1, return_inverse=True)
    shared = (lengths - costs).double()
    first = torch.full((pairs.shape[1],), math.inf, dtype=torch.float64, device=costs.device)
    return out.index_add(0, pairs[1], first.scatter_reduce(0, which, shared, "amin"))


def imbalance(costs: Tensor, lengths: Tensor, group: Tensor, replica: Tensor, num_replicas: int) -> float:
    """Largest load of a replica over the mean load without cut groups; 1 is even, `num_replicas` is all on one.

    >>> row = torch.tensor([3, 1])
    >>> imbalance(row, row, torch.tensor([0, 1]), torch.tensor([0, 1]), 2)
    1.5
    """
    total = float(costs.double().sum())
    most = loads(costs, lengths, group, replica, num_replicas).max()
    return float(most) * num_replicas / total if total else 1.0


def _cut(costs: Tensor, which: Tensor, count: int, limit: float) -> tuple[Tensor, int]:
    """The piece of each row, and how many there are; each group is cut in its order into as few as `limit` allows."""
    costs = costs.double()
    totals = torch.zeros(count, dtype=torch.float64, device=costs.device).index_add(0, which, costs)
    order = torch.argsort(which, stable=True)
    before = torch.empty_like(costs)
    before[order] = costs[order].cumsum(0) - costs[order]
    before -= (totals.cumsum(0) - totals)[which]
    pieces = (totals / limit).ceil().clamp(min=1)
    number = (before * (pieces / totals.clamp(min=1))[which]).floor().long().clamp(min=0)
    keys = torch.unique(torch.stack([which, number]), dim=1, return_inverse=True)
    return keys[1], keys[0].shape[1]


def _longest_first(totals: Tensor, num_replicas: int) -> Tensor:
    """The replica of each of some loads, int64."""
    sizes = totals.tolist()
    place = [0] * len(sizes)
    heap = [(0.0, r) for r in range(num_replicas)]  # equal loads go to the lower replica
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, replica = heap[0]
        place[index] = replica
        heapq.heapreplace(heap, (load + sizes[index], replica))
    return torch.tensor(place, dtype=torch.int64, device=totals.device)


def _in_order(group: Tensor) -> tuple[Tensor, int]:
    """Number of each row's group, counted in the order in which groups first appear, and how many there are."""
    uids, which = torch.unique(group, return_inverse=True)
    first = torch.full((len(uids),), len(group), dtype=torch.int64, device=group.device)
    first = first.scatter_reduce(0, which, torch.arange(len(group), device=group.device), "amin")
    number = torch.empty_like(first)
    number[torch.argsort(first)] = torch.arange(len(uids), device=group.device)
    return number[which], len(uids)
