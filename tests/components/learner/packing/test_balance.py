"""Which replica trains on which rows."""

import itertools

import pytest
import torch

from creditgraph.components.learner.packing.balance import assign, contiguous, imbalance


def test_longest_first_by_hand():
    # Prompts of 7, 5, 4, 3, 3 tokens in rows of [4, 3], [5], [4], [3], [1, 2]; two replicas.
    # 7 -> 0, 5 -> 1, 4 -> 1 (9), 3 -> 0 (10), 3 -> 1 (12): loads 10 and 12, mean 11.
    costs, group = torch.tensor([4, 5, 3, 4, 3, 1, 2]), torch.tensor([9, 8, 9, 7, 3, 2, 2])
    replica = assign(costs, group, 2)
    assert replica.tolist() == [0, 1, 0, 1, 0, 1, 1]
    assert imbalance(costs, replica, 2) == pytest.approx(12 / 11)
    # Contiguous: prompts in order of appearance 9, 8, 7 | 3, 2 -> 16 and 6.
    assert contiguous(group, 2).tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert imbalance(costs, contiguous(group, 2), 2) == pytest.approx(16 / 11)


def test_prompts_stay_whole_and_the_order_of_rows_does_not_matter_for_loads():
    generator = torch.Generator().manual_seed(0)
    for replicas in (2, 3, 8):
        group = torch.randint(0, 40, (300,), generator=generator)
        costs = torch.randint(1, 500, (300,), generator=generator)
        replica = assign(costs, group, replicas)
        assert all(len(set(replica[group == g].tolist())) == 1 for g in group.unique().tolist())
        assert imbalance(costs, replica, replicas) <= imbalance(costs, contiguous(group, replicas), replicas)
        assert imbalance(costs, replica, replicas) < 1.2
        assert torch.equal(replica, assign(costs.clone(), group.clone(), replicas))


def test_within_four_thirds_of_the_best_spread():
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        costs = torch.randint(1, 30, (8,), generator=generator)
        group = torch.arange(8)
        best = min(imbalance(costs, torch.tensor(p), 3) for p in itertools.product(range(3), repeat=8))
        assert imbalance(costs, assign(costs, group, 3), 3) <= best * 4 / 3 + 1e-9


def test_not_worse_than_contiguous_where_longest_first_is():
    # LPT of 3 3 2 2 2 gives 7 and 5; the order as it is, cut after two of five prompts' worth, gives 6 and 6.
    costs, group = torch.tensor([3, 3, 0, 2, 2, 2]), torch.arange(6)
    assert imbalance(costs, assign(costs, group, 2), 2) == 1.0


def test_fewer_prompts_than_replicas_and_no_rows():
    costs, group = torch.tensor([5, 6]), torch.tensor([1, 1])
    assert len(set(assign(costs, group, 4).tolist())) == 1
    assert imbalance(costs, assign(costs, group, 4), 4) == 4.0
    empty = torch.zeros(0, dtype=torch.int64)
    assert assign(empty, empty, 3).tolist() == contiguous(empty, 3).tolist() == []
    assert imbalance(empty, empty, 3) == 1.0
    assert assign(costs, group, 1).tolist() == [0, 0]
