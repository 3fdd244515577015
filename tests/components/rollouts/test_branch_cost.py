"""The cost of scoring branches behind a prefix cache, against a plain loop over a cache of blocks.

tests/components/engine/vllm/test_engine.py compares it with vLLM's own counts.
"""

import torch

from creditgraph.components.value.answer_likelihood import BranchCost, branch_cost, planned_cost
from creditgraph.pipeline.app.costs import cost_lines
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose


def by_loop(row, at, tokens, block, warm):
    """Tokens that pass through the model, branch by branch, with a set of cached blocks."""
    cached = {(r, n) for r in row for n in range(1000)} if warm else set()
    prefilled = 0
    for r, a, n in sorted(zip(row, at, tokens, strict=True), key=lambda branch: (branch[0], -branch[1])):
        found = 0
        while (r, found) in cached and (found + 1) * block <= a - 1:
            found += 1
        prefilled += a + n - found * block
        cached |= {(r, whole) for whole in range(a // block)}
    return prefilled


def test_counts_are_those_of_a_loop_over_blocks():
    generator = torch.Generator().manual_seed(0)
    for block in (1, 16, 32):
        row = torch.randint(0, 5, (40,), generator=generator)
        at = torch.randint(1, 300, (40,), generator=generator)
        tokens = torch.randint(1, 9, (40,), generator=generator)
        cost = branch_cost(row, at, tokens, block)
        lists = (row.tolist(), at.tolist(), tokens.tolist(), block)
        assert cost.prefilled == by_loop(*lists, warm=False)
        assert cost.prefilled_cached == by_loop(*lists, warm=True)
        assert (cost.requests, cost.sent, cost.scored) == (40, int((at + tokens).sum()), int(tokens.sum()))


def test_a_plan_by_hand():
    # One trunk of 4 + 32 tokens in two segments: branches of 3 tokens after 4, 20 and 36. Whole blocks of 16 before the
    # position that predicts a branch: 0, 1 and 2. So 7 + 7 + 7 tokens, and 32 more where the trunk is not cached.
    cost = planned_cost(rows=1, prompt=4, response=32, segments=2, reference=3)
    assert cost == BranchCost(requests=3, sent=69, prefilled=53, prefilled_cached=21, scored=9)
    nothing = branch_cost(*(torch.zeros(0, dtype=torch.int64) for _ in range(3)))
    assert nothing == BranchCost(requests=0, sent=0, prefilled=0, prefilled_cached=0, scored=0)


def test_a_check_says_what_rredcot_costs():
    experiment = build_experiment(compose(["recipe=rredcot_qwen3_4b", "prompts.max_tokens=512"]))
    longest, cost = cost_lines(experiment)
    assert longest == "  rows of at most 26,536 tokens of prompt and response, or as many as the model takes"
    # 32 prompts × 8 responses × (8 segments + 1).
    assert cost.startswith("  value: scores at most 2,304 references per iteration, 30.13 M tokens")
    assert "6.70 M of these pass through the model, 0.17 M where it still holds the responses" in cost
