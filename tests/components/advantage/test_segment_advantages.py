"""Segment-level advantages: TD, additive; what they share with redistribution; by hand, slow loops, identities."""

import pytest
import torch

from creditgraph.components.advantage.additive import AdditiveAdvantage
from creditgraph.components.advantage.gae import GAE, adaptive_lambda, whitened
from creditgraph.components.advantage.redistribute import Redistribute
from creditgraph.components.rollouts.segments import generalised_advantage
from creditgraph.pipeline.core.errors import AlignmentError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Segments, SegmentValues


def test_td_by_hand(toolbox):
    # v = 0.5, 0.75, 0.25, end = reward 1: gains 0.25, −0.5, 0.75. With λ = 0.5 from the end: 0.75, −0.125, 0.1875.
    values = Jagged.from_rows([[0.5, 0.75, 0.25, 9.9]], torch.float32)
    assert generalised_advantage(values, torch.tensor([1.0])).to_lists() == [[0.25, -0.5, 0.75]]
    assert generalised_advantage(values, torch.tensor([1.0]), lam=0.5).to_lists() == [[0.1875, -0.125, 0.75]]
    trajectories = toolbox.trajectories(["abcd"], inherited=[1])
    credit = (
        toolbox.start(GAE, lam=0.0)
        .run(
            trajectories=trajectories,
            segments=Segments(uid=trajectories.uid, ends=Jagged.from_rows([[2, 3, 4]], torch.int32)),
            values=SegmentValues(uid=trajectories.uid, values=values),
            rewards=toolbox.rewards(trajectories.uid, [1.0]),
        )
        .credit
    )
    assert credit.advantage.to_lists() == [[0.0, 0.25, -0.5, 0.75]]  # the first token is inherited
    assert credit.mask.to_lists() == [[False, True, True, True]]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_gae_slow_version(reference, random_values, lam, gamma):
    _, _, values, reward = random_values()
    fast = generalised_advantage(values, reward, gamma, lam).to_lists()
    for row, v, r in zip(fast, values.to_lists(), reward.tolist(), strict=True):
        assert row == pytest.approx(reference.gae(v, r, lam, gamma), abs=1e-6)


def test_td_telescopes_and_its_limit_is_the_return_minus_the_value(random_values):
    _, _, values, reward = random_values()
    filled = values.lengths > 1
    start = values.values[values.offsets[:-1]]
    sums = generalised_advantage(values, reward).sum()
    torch.testing.assert_close(sums[filled], (reward - start)[filled])
    limit = generalised_advantage(values, reward, lam=1.0)
    states = values.slice_rows(torch.zeros_like(values.lengths), values.lengths - 1)
    torch.testing.assert_close(limit.values, reward[limit.row_ids] - states.values)


def test_the_last_step_is_not_discounted_and_lambda_one_is_the_discounted_return(random_values):
    _, _, values, reward = random_values()
    states = values.slice_rows(torch.zeros_like(values.lengths), (values.lengths - 1).clamp(min=0))
    later = (states.lengths - 1)[states.row_ids] - states.positions
    limit = generalised_advantage(values, reward, 0.9, 1.0)
    torch.testing.assert_close(limit.values, 0.9**later * reward[limit.row_ids] - states.values)


def test_lambda_of_each_row_follows_its_length(toolbox, case, reference):
    # α = 0.5: λ = 1 − 2/l, at least 0.
    assert adaptive_lambda(torch.tensor([1, 2, 4, 8]), 0.5).tolist() == [0.0, 0.0, 0.5, 0.75]
    node = toolbox.start(GAE, length_adaptive=0.5, lam=0.1)
    advantage = node.run(**case).credit.advantage.to_lists()
    used = []
    for row, v, r, ends in zip(
        advantage,
        case["values"].values.to_lists(),
        case["rewards"].value.tolist(),
        case["segments"].ends.to_lists(),
        strict=True,
    ):
        used.append(max(0.0, 1 - 2 / max(len(ends), 1)))
        assert [row[end - 1] for end in ends] == pytest.approx(reference.gae(v, r, used[-1]), abs=1e-6)
    assert node.context.metrics["lam"] == pytest.approx(sum(used) / len(used))


def test_credit_is_zero_while_critics_warm_up(toolbox, case):
    first, second = (toolbox.start(GAE, iteration=i, warmup=3, imitation=0.1, whiten=True) for i in (2, 3))
    credit = first.run(**case).credit
    assert not credit.advantage.values.any()
    assert not credit.columns["imitation"].values.any()
    assert first.explain({"credit": credit}, **case)[0] == "no credit: the critic warms up"
    assert first.context.metrics["warming_up"] == 1
    assert second.run(**case).credit.advantage.values.any()
    assert second.context.metrics["warming_up"] == 0


def test_imitation_is_the_mean_over_the_tokens_of_correct_rows(toolbox, case):
    # An invalid row counts in the mean over tokens that the loss is, but is not imitated.
    right = case["rewards"].correct.nonzero()[0, 0]
    case["rewards"].valid[right] = False
    credit = toolbox.start(GAE, imitation=0.1).run(**case).credit
    weights, mask = credit.columns["imitation"].values, credit.mask.values
    chosen = mask & (case["rewards"].correct & case["rewards"].valid)[credit.mask.row_ids]
    assert 0 < int(chosen.sum()) < int(mask.sum())
    assert not weights[~chosen].any()
    # 0.1 · mean over chosen tokens = Σ weight x / trained tokens.
    x = torch.randn(len(weights))
    assert float((weights * x).sum() / mask.sum()) == pytest.approx(0.1 * float(x[chosen].mean()), rel=1e-4, abs=1e-7)


def test_whitening(toolbox, case):
    # Trained 1, 3: mean 2, unbiased variance 2; the masked 9 does not count.
    mask = Jagged.from_rows([[True, False], [True]], torch.bool)
    by_hand = whitened(Jagged.from_rows([[1.0, 9.0], [3.0]], torch.float32), mask)
    assert by_hand.to_lists() == [[pytest.approx(-(0.5**0.5)), 0.0], [pytest.approx(0.5**0.5)]]
    out = toolbox.start(GAE, lam=0.0, whiten=True).run(**case).credit.advantage.values
    assert out.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert out.std().item() == pytest.approx(1.0, abs=1e-5)


def test_additive_by_hand_and_without_weight(toolbox, case, with_credit):
    full = with_credit(case, normalize="mean")
    out = toolbox.start(AdditiveAdvantage).run(**full).credit
    ends, values = case["segments"].ends.to_lists(), case["values"].values.to_lists()
    for row, before, cuts, v in zip(
        out.advantage.to_lists(), full["credit"].advantage.to_lists(), ends, values, strict=True
    ):
        expected, begin = [], 0
        for k, end in enumerate(cuts):
            expected += [a + 1.2 * (v[k + 1] - v[k]) for a in before[begin:end]]
            begin = end
        assert row == pytest.approx(expected, abs=1e-5)
    assert toolbox.start(AdditiveAdvantage, alpha=0.0).run(**full).credit.advantage.equal(full["credit"].advantage)


@pytest.mark.parametrize("kind", [GAE, AdditiveAdvantage, Redistribute])
def test_invalid_rewards_get_no_credit_and_empty_batches_pass(toolbox, case, with_credit, kind):
    invalid = case["rewards"].replace(valid=torch.zeros(40, dtype=torch.bool))
    inputs = with_credit({**case, "rewards": invalid})
    if kind is GAE:
        del inputs["credit"]
    assert not toolbox.start(kind).run(**inputs).credit.advantage.values.any()
    none = torch.zeros(0, dtype=torch.int64)
    empty = {name: batch.select(none) for name, batch in inputs.items()}
    assert len(toolbox.start(kind).run(**empty).credit) == 0


def test_wrong_segments_and_values_are_reported(toolbox, case):
    node = toolbox.start(GAE, lam=0.0)
    ends = case["segments"].ends
    short = ends.with_values(ends.values - 1)
    with pytest.raises(
        AlignmentError, match=r"the last segment of trajectory 1001 ends at \d+ and its response has \d+ tokens"
    ):
        node.run(**{**case, "segments": Segments(uid=case["trajectories"].uid, ends=short)})
    with pytest.raises(
        AlignmentError, match=r"expected one value per boundary .* got 0 values for 0 segments of trajectory 1000"
    ):
        node.run(
            **{**case, "values": SegmentValues(uid=case["trajectories"].uid, values=ends.to(torch.float32))}
            | {"segments": case["segments"]}
        )


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        (GAE, {"lam": 1.5}, "expected 0 ≤ lam ≤ 1 and 0 ≤ gamma ≤ 1, got 1.5 and 1.0"),
        (Redistribute, {"floor": 2.0}, "temperature > 0 and max_factor > 1, got 2.0, 0.5 and 10.0"),
        (Redistribute, {"temperature": 0.0}, "temperature > 0 and max_factor > 1, got 0.1, 0.0 and 10.0"),
        (Redistribute, {"max_factor": 1.0}, "temperature > 0 and max_factor > 1, got 0.1, 0.5 and 1.0"),
    ],
)
def test_impossible_settings_are_reported(kind, settings, text):
    with pytest.raises(ValueError, match=text):
        kind.Config(**settings)
