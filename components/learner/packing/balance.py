"""Assigns trajectories to replicas: prompts stay whole, and all replicas get about as many tokens.

A step takes as long as its slowest replica. Trajectories of one prompt stay together, because they share its prefix, so
whole prompts are assigned: longest first, each to the replica with the least load so far (LPT, Graham 1969: at most
4/3 of the optimum).
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor


def assign(costs: Tensor, group: Tensor, num_replicas: int) -> Tensor:
    """The replica of each row, int64 [rows]; the same on every replica, and at least as even as `contiguous`.

    Args:
        costs: [rows], non-negative, tokens to compute for each row.
        group: int64 [rows], rows that must stay together (their prompt's uid).
        num_replicas: at least 1.

    >>> assign(torch.tensor([5, 1, 2, 2]), torch.tensor([7, 7, 8, 9]), 2).tolist()
    [0, 0, 1, 1]
    """
    if num_replicas == 1 or not len(costs):
        return torch.zeros_like(group)
    which, count = _in_order(group)
    sums = torch.zeros(count, dtype=torch.float64, device=costs.device).index_add(0, which, costs.double())
    totals = sums.tolist()
    place = [0] * count
    loads = [(0.0, r) for r in range(num_replicas)]  # a heap; equal loads go to the lower replica
    for index in sorted(range(count), key=lambda i: (-totals[i], i)):
        load, replica = loads[0]
        place[index] = replica
        heapq.heapreplace(loads, (load + totals[index], replica))
    spread = torch.tensor(place, dtype=torch.int64, device=group.device)[which]
    plain = contiguous(group, num_replicas)
    return spread if imbalance(costs, spread, num_replicas) < imbalance(costs, plain, num_replicas) else plain


def contiguous(group: Tensor, num_replicas: int) -> Tensor:
    """The replica of each row, int64 [rows], when groups are cut evenly in their order, as without balancing."""
    which, count = _in_order(group)
    return which * num_replicas // max(count, 1)


def imbalance(costs: Tensor, replica: Tensor, num_replicas: int) -> float:
    """Largest load of a replica over the mean load; 1 is even, `num_replicas` is all on one.

    >>> imbalance(torch.tensor([3, 1]), torch.tensor([0, 1]), 2)
    1.5
    """
    loads = torch.zeros(num_replicas, dtype=torch.float64, device=costs.device).index_add(0, replica, costs.double())
    total = float(loads.sum())
    return float(loads.max()) * num_replicas / total if total else 1.0


def _in_order(group: Tensor) -> tuple[Tensor, int]:
    """Number of each row's group, counted in the order in which groups first appear, and how many there are."""
    uids, which = torch.unique(group, return_inverse=True)
    first = torch.full((len(uids),), len(group), dtype=torch.int64, device=group.device)
    first = first.scatter_reduce(0, which, torch.arange(len(group), device=group.device), "amin")
    number = torch.empty_like(first)
    number[torch.argsort(first)] = torch.arange(len(uids), device=group.device)
    return number[which], len(uids)
