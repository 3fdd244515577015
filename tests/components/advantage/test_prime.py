"""advantage.prime: leave-one-out of process rewards and outcome by hand, a slow loop, RLOO."""

import math

import pytest
import torch

from creditgraph.components.advantage.gae import whitened
from creditgraph.components.advantage.prime import Prime, leave_one_out
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Segments, SegmentValues


def test_leave_one_out_by_hand():
    # n = 2, means 2 and 1, Σ = 3: 2 r − 3. One reward per row, 1 and 0: its difference from the other.
    rows = Jagged.from_rows([[1.0, 3.0], [1.0]], torch.float64)
    group, all_rows = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    assert leave_one_out(rows, group, all_rows).to_lists() == [[-1.0, 3.0], [-1.0]]
    single = Jagged.from_rows([[1.0], [0.0]], torch.float64)
    assert leave_one_out(single, group, all_rows).to_lists() == [[1.0], [-1.0]]
    # A row that does not count, and then a group of one.
    assert leave_one_out(single, group, torch.tensor([True, False])).to_lists() == [[0.0], [0.0]]


@pytest.fixture
def run(toolbox):
    def start(texts, values, gains, valid=None, **settings):
        rows = toolbox.trajectories(texts)
        ends = Jagged.from_rows([list(range(1, len(text) + 1)) for text in texts], torch.int32)
        sums = [[sum(own[:k]) for k in range(len(own) + 1)] for own in gains]
        node = toolbox.start(Prime, **settings)
        out = node.run(
            trajectories=rows,
            segments=Segments(uid=rows.uid, ends=ends),
            values=SegmentValues(uid=rows.uid, values=Jagged.from_rows(sums, torch.float32)),
            rewards=toolbox.rewards(rows.uid, values, valid),
        )
        return out.credit, node.context.metrics

    return start


def scaled(rows):
    """Minus the mean, over the deviation of n − 1."""
    flat = [a for row in rows for a in row]
    mean = sum(flat) / len(flat)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in flat) / (len(flat) - 1))
    return [pytest.approx([(a - mean) / deviation for a in row], abs=1e-4) for row in rows]


def test_by_hand(run):
    # LOO of process rewards as above: (−1, 3) and −1, summed to the end (2, 3) and −1; outcomes ±1.
    credit, metrics = run(["ab", "c"], [1, 0], [[1.0, 3.0], [1.0]])
    assert credit.advantage.to_lists() == scaled([[3.0, 4.0], [-2.0]])
    assert metrics["process_size"] == pytest.approx(2.0)
    half, _ = run(["ab", "c"], [1, 0], [[1.0, 3.0], [1.0]], weight=0.5)
    assert half.advantage.to_lists() == scaled([[2.0, 2.5], [-1.5]])


def test_equals_a_slow_loop(run):
    gains = [[0.3, -0.2, 0.9], [0.1, 0.4], [-0.5, 0.2, 0.0, 0.7], [1.0]]
    values, valid = [1, 0, 1, 1], [True, True, True, False]
    texts = ["abc", "de", "fghi", "j"]
    credit, _ = run(texts, values, gains, valid=valid, weight=0.7)
    mean = [sum(g) / len(g) for g in gains[:3]]
    expected = []
    for own, value in zip(gains[:3], values[:3], strict=True):
        loo = [1.5 * r - sum(mean) / 2 for r in own]
        outcome = 1.5 * value - sum(values[:3]) / 2
        expected.append([outcome + 0.7 * sum(loo[k:]) for k in range(len(own))])
    assert credit.advantage.to_lists()[:3] == scaled(expected)
    assert credit.advantage.row(3).tolist() == [0.0]


def test_without_process_rewards_it_is_rloo_whitened(run, toolbox):
    credit, _ = run(["ab", "c", "de"], [1, 0, 0], [[1.0, 3.0], [1.0], [0.0, 2.0]], weight=0.0)
    tokens = toolbox.trajectories(["ab", "c", "de"]).response_tokens
    rloo = tokens.spread(torch.tensor([1.0, -0.5, -0.5]))
    mask = tokens.with_values(torch.ones(5, dtype=torch.bool))
    torch.testing.assert_close(credit.advantage.values, whitened(rloo, mask).values)


def test_a_value_that_is_no_number_costs_its_row_alone(run):
    credit, metrics = run(["ab", "c", "de"], [1, 0, 1], [[1.0, math.nan], [1.0], [0.5, 0.5]])
    assert credit.advantage.row(0).tolist() == [0.0, 0.0]
    assert torch.isfinite(credit.advantage.values).all()
    assert metrics["unvalued"] == 1
