"""Which replica trains on which rows."""

import pytest
import torch

from creditgraph.components.learner.packing.balance import assign, contiguous, imbalance, loads


def random_batch(prompts, group, prompt_tokens=500, seed=0):
    """(costs, lengths, group) of responses of 500 to 20,000 tokens, harder prompts having longer ones."""
    generator = torch.Generator().manual_seed(seed)
    level = 4000 * torch.exp(0.5 * torch.randn(prompts, 1, generator=generator))
    responses = (level * torch.exp(0.5 * torch.randn(prompts, group, generator=generator))).clamp(500, 20000).long()
    costs = responses.clone()
    costs[:, 0] += prompt_tokens
    return costs.reshape(-1), (responses + prompt_tokens).reshape(-1), torch.arange(prompts).repeat_interleave(group)


def test_longest_first_by_hand():
    # Prompts of 7, 5, 4, 3, 3 tokens in rows of [4, 3], [5], [4], [3], [1, 2]; two replicas.
    # 7 -> 0, 5 -> 1, 4 -> 1 (9), 3 -> 0 (10), 3 -> 1 (12): loads 10 and 12, mean 11: even enough.
    costs, group = torch.tensor([4, 5, 3, 4, 3, 1, 2]), torch.tensor([9, 8, 9, 7, 3, 2, 2])
    replica = assign(costs, costs, group, 2)
    assert replica.tolist() == [0, 1, 0, 1, 0, 1, 1]
    assert imbalance(costs, costs, group, replica, 2) == pytest.approx(12 / 11)
    # Contiguous: prompts in order of appearance 9, 8, 7 | 3, 2 -> 16 and 6.
    assert contiguous(group, 2).tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert imbalance(costs, costs, group, contiguous(group, 2), 2) == pytest.approx(16 / 11)


def test_one_prompt_is_cut_and_every_piece_computes_what_its_rows_share_by_hand():
    # A prompt of 10 tokens with responses of 5, 6, 4, 5: the first row computes it, 10 + 20 tokens in all.
    costs, lengths, group = torch.tensor([15, 6, 4, 5]), torch.tensor([15, 16, 14, 15]), torch.zeros(4).long()
    replica = assign(costs, lengths, group, 2)
    # Mean 15. Two pieces, [15] and [6, 4, 5], of which the second computes the prompt again, are 15 and 25. Quarters
    # of the 30 tokens, at 7.5, 15 and 22.5, are [15], none, [6, 4] and [5]: 15, 20 and 15 with the prompt. The longest
    # goes first, the others together, where the prompt counts once: 20 and 15 + 5.
    assert replica.tolist() == [1, 0, 0, 1]
    assert loads(costs, lengths, group, replica, 2).tolist() == [20, 20]
    assert imbalance(costs, lengths, group, replica, 2) == pytest.approx(20 / 15)
    assert loads(costs, lengths, group, torch.zeros(4).long(), 2).tolist() == [30, 0]
    assert loads(costs, lengths, group, torch.tensor([1, 0, 0, 0]), 2).tolist() == [25, 15]


@pytest.mark.parametrize("replicas", [32, 64, 256])
def test_few_prompts_are_spread_over_many_replicas(replicas):
    """32 prompts of 16 responses, as in a step of DAPO; whole prompts have 2.4, 4.9 and 19.6 of these lengths."""
    for seed in range(3):
        costs, lengths, group = random_batch(32, 16, seed=seed)
        replica = assign(costs, lengths, group, replicas)
        longest = float(lengths.max()) * replicas / float(costs.sum())  # a row is not cut, and computes its prompt
        assert imbalance(costs, lengths, group, replica, replicas) < max(1.02 * longest, 1.15)
        assert torch.equal(replica, assign(costs.clone(), lengths.clone(), group.clone(), replicas))


def test_many_prompts_stay_whole_and_the_order_of_rows_does_not_matter_for_loads():
    for replicas in (2, 3, 8):
        costs, lengths, group = random_batch(80, 4, seed=replicas)
        mixed = torch.randperm(len(group), generator=torch.Generator().manual_seed(1))
        costs, lengths, group = costs[mixed], lengths[mixed], group[mixed]
        replica = assign(costs, lengths, group, replicas)
        assert all(len(set(replica[group == g].tolist())) == 1 for g in group.unique().tolist())
        even = imbalance(costs, lengths, group, replica, replicas)
        assert even <= imbalance(costs, lengths, group, contiguous(group, replicas), replicas)
        assert even < 1.1


def test_within_four_thirds_of_the_best_spread():
    generator = torch.Generator().manual_seed(1)
    spreads = torch.cartesian_prod(*[torch.arange(3)] * 8)
    for _ in range(20):
        costs = torch.randint(1, 30, (8,), generator=generator)
        sums = torch.stack([(costs * (spreads == replica)).sum(1) for replica in range(3)])
        best = int(sums.amax(0).min()) / (int(costs.sum()) / 3)
        even = imbalance(costs, costs, torch.arange(8), assign(costs, costs, torch.arange(8), 3), 3)
        assert best - 1e-9 <= even <= best * 4 / 3 + 1e-9


def test_not_worse_than_contiguous_where_longest_first_is():
    # LPT of 3 3 2 2 2 gives 7 and 5; the order as it is, cut after two of five prompts' worth, gives 6 and 6.
    costs, group = torch.tensor([3, 3, 0, 2, 2, 2]), torch.arange(6)
    assert imbalance(costs, costs, group, assign(costs, costs, group, 2), 2) == 1.0


def test_fewer_rows_than_replicas_and_no_rows():
    costs, group = torch.tensor([5, 6]), torch.tensor([1, 1])
    replica = assign(costs, costs, group, 4)
    assert len(set(replica.tolist())) == 2
    assert imbalance(costs, costs, group, replica, 4) == pytest.approx(24 / 11)
    empty = torch.zeros(0, dtype=torch.int64)
    assert assign(empty, empty, empty, 3).tolist() == contiguous(empty, 3).tolist() == []
    assert imbalance(empty, empty, empty, empty, 3) == 1.0
    nothing = torch.zeros(3, dtype=torch.int64)
    assert imbalance(nothing, nothing, torch.arange(3), assign(nothing, nothing, torch.arange(3), 2), 2) == 1.0
    assert assign(costs, costs, group, 1).tolist() == [0, 0]
