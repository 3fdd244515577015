"""Segment-level advantages: TD, additive, redistribution; by hand, slow loops, identities."""

import pytest
import torch

from components.advantage.additive import AdditiveAdvantage
from components.advantage.group import GroupAdvantage
from components.advantage.redistribute import Redistribute, redistributed_rewards, segment_shares
from components.advantage.td import TDAdvantage, td_advantage, whitened
from pipeline.core.errors import AlignmentError
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Segments, SegmentValues


def _random_case(seed=0, rows=40):
    """Random segments, values, rewards; the first two rows are an empty response and one of a single segment."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 7, (rows,), generator=generator)
    counts[0], counts[1] = 0, 1
    sizes = [torch.randint(1, 5, (int(c),), generator=generator) for c in counts]
    ends = Jagged.from_rows([s.cumsum(0) for s in sizes], torch.int32)
    values = Jagged.from_rows([torch.rand(int(c) + 1, generator=generator) for c in counts], torch.float32)
    return sizes, ends, values, torch.randint(0, 2, (rows,), generator=generator).float()


@pytest.fixture
def case(toolbox):
    sizes, ends, values, reward = _random_case()
    trajectories = toolbox.trajectories(["x" * int(s.sum()) for s in sizes], group=[i // 8 for i in range(40)])
    rewards = toolbox.rewards(trajectories.uid, reward.tolist())
    return {
        "trajectories": trajectories,
        "segments": Segments(uid=trajectories.uid, ends=ends),
        "values": SegmentValues(uid=trajectories.uid, values=values),
        "rewards": rewards,
    }


def _with_credit(toolbox, case, **settings):
    credit = (
        toolbox.start(GroupAdvantage, **settings).run(trajectories=case["trajectories"], rewards=case["rewards"]).credit
    )
    return {**case, "credit": credit}


def test_td_by_hand(toolbox):
    # v = 0.5, 0.75, 0.25, end = reward 1: gains 0.25, −0.5, 0.75. With λ = 0.5 from the end: 0.75, −0.125, 0.1875.
    values = Jagged.from_rows([[0.5, 0.75, 0.25, 9.9]], torch.float32)
    assert td_advantage(values, torch.tensor([1.0])).to_lists() == [[0.25, -0.5, 0.75]]
    assert td_advantage(values, torch.tensor([1.0]), 0.5).to_lists() == [[0.1875, -0.125, 0.75]]
    trajectories = toolbox.trajectories(["abcd"], inherited=[1])
    credit = (
        toolbox.start(TDAdvantage)
        .run(
            trajectories=trajectories,
            segments=Segments(uid=trajectories.uid, ends=Jagged.from_rows([[2, 3, 4]], torch.int32)),
            values=SegmentValues(uid=trajectories.uid, values=values),
            rewards=toolbox.rewards(trajectories.uid, [1.0]),
        )
        .credit
    )
    assert credit.advantage.to_lists() == [[0.25, 0.25, -0.5, 0.75]]
    assert credit.mask.to_lists() == [[False, True, True, True]]


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_td_slow_version(reference, lam):
    _, _, values, reward = _random_case()
    fast = td_advantage(values, reward, lam).to_lists()
    for row, v, r in zip(fast, values.to_lists(), reward.tolist(), strict=True):
        assert row == pytest.approx(reference.td_advantage(v, r, lam), abs=1e-6)


def test_td_telescopes_and_its_limit_is_the_return_minus_the_value():
    _, _, values, reward = _random_case()
    filled = values.lengths > 1
    start = values.values[values.offsets[:-1]]
    sums = td_advantage(values, reward).sum()
    torch.testing.assert_close(sums[filled], (reward - start)[filled])
    limit = td_advantage(values, reward, 1.0)
    states = values.slice_rows(torch.zeros_like(values.lengths), values.lengths - 1)
    torch.testing.assert_close(limit.values, reward[limit.row_ids] - states.values)


def test_whitening(toolbox, case):
    # Trained 1, 3: mean 2, unbiased variance 2; the masked 9 does not count.
    mask = Jagged.from_rows([[True, False], [True]], torch.bool)
    by_hand = whitened(Jagged.from_rows([[1.0, 9.0], [3.0]], torch.float32), mask)
    assert by_hand.to_lists() == [[pytest.approx(-(0.5**0.5)), 0.0], [pytest.approx(0.5**0.5)]]
    out = toolbox.start(TDAdvantage, whiten=True).run(**case).credit.advantage.values
    assert out.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert out.std().item() == pytest.approx(1.0, abs=1e-5)


def test_additive_by_hand_and_without_weight(toolbox, case):
    full = _with_credit(toolbox, case, normalize="mean")
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


@pytest.mark.parametrize("residual", ["equal", "last"])
def test_redistributed_rewards_sum_to_the_return(residual):
    _, ends, values, reward = _random_case()
    parts = redistributed_rewards(values, reward, residual)
    filled = ends.lengths > 0
    torch.testing.assert_close(parts.sum()[filled], reward.double()[filled], rtol=0, atol=1e-12)
    assert parts.lengths.tolist() == ends.lengths.tolist()


def test_redistribution_by_hand():
    # Values 0.2, 0.6, 0.4, 0.8, return 1: gains 0.4, −0.2, 0.4 leave 0.4.
    values, reward = Jagged.from_rows([[0.2, 0.6, 0.4, 0.8]], torch.float64), torch.tensor([1.0])
    equal = redistributed_rewards(values, reward, "equal").to_lists()[0]
    assert equal == pytest.approx([0.4 + 0.4 / 3, -0.2 + 0.4 / 3, 0.4 + 0.4 / 3])
    last = redistributed_rewards(values, reward, "last")
    assert last.to_lists()[0] == pytest.approx([0.4, -0.2, 0.8])
    sizes = Jagged.from_rows([[1, 1, 2]], torch.int64)
    # Positive parts 0.4, 0, 0.8 → 1/3, 0, 2/3, nine tenths of them, and a tenth by length.
    assert segment_shares(last, sizes, per="segment").to_lists()[0] == pytest.approx([0.3 + 0.025, 0.025, 0.6 + 0.05])
    assert segment_shares(last, sizes, "signed", per="segment").to_lists()[0] == pytest.approx([0.4, -0.2, 0.8])
    # Per token the third counts twice: 0.4, 0, 1.6 → 0.2, 0, 0.8; signed 0.4, −0.2, 1.6, divided by 1.8.
    assert segment_shares(last, sizes).to_lists()[0] == pytest.approx([0.18 + 0.025, 0.025, 0.72 + 0.05])
    assert segment_shares(last, sizes, "signed").to_lists()[0] == pytest.approx([0.4 / 1.8, -0.2 / 1.8, 1.6 / 1.8])


@pytest.mark.parametrize("per", ["token", "segment"])
@pytest.mark.parametrize("residual", ["equal", "last"])
@pytest.mark.parametrize("head", ["clip_floor", "softmax", "signed"])
def test_redistribution_slow_version(reference, head, residual, per):
    sizes, ends, values, reward = _random_case(3)
    trained = [s.clone() for s in sizes]
    trained[2][0] = 0
    counts = ends.with_values(torch.cat(trained))
    parts = redistributed_rewards(values, reward, residual)
    shares = segment_shares(parts, counts, head, 0.2, 0.5, per)
    for i in range(1, len(sizes)):
        slow_parts, slow_shares = reference.redistribution(
            values.to_lists()[i], reward[i].item(), residual, trained[i].tolist(), head, 0.2, 0.5, per
        )
        assert parts.row(i).tolist() == pytest.approx(slow_parts, abs=1e-6)
        assert shares.row(i).tolist() == pytest.approx(slow_shares, abs=1e-5)
        assert sum(shares.row(i).tolist()) == pytest.approx(1.0)


@pytest.mark.parametrize("head", ["clip_floor", "softmax", "signed"])
def test_the_mean_credit_over_trained_tokens_is_kept(toolbox, case, head):
    trajectories = case["trajectories"]
    case = {**case, "trajectories": trajectories.replace(inherited=(trajectories.response_tokens.lengths // 2))}
    full = _with_credit(toolbox, case, normalize="std_exact")
    out = toolbox.start(Redistribute, head=head).run(**full).credit
    mask = out.mask.values
    before = full["credit"].advantage.with_values(full["credit"].advantage.values * mask).sum()
    after = out.advantage.with_values(out.advantage.values * mask).sum()
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    parts = out.columns["redistributed"]
    assert parts.lengths.tolist() == trajectories.response_tokens.lengths.tolist()


@pytest.mark.parametrize("head", ["clip_floor", "softmax", "signed"])
def test_one_segment_is_grpo(toolbox, case, head):
    trajectories, lengths = case["trajectories"], case["trajectories"].response_tokens.lengths
    one = Jagged.from_lengths(lengths[lengths > 0].to(torch.int32), (lengths > 0).long())
    values = Jagged.from_lengths(torch.rand(int((lengths > 0).sum()) + 40), (lengths > 0).long() + 1)
    full = _with_credit(toolbox, case, normalize="std")
    full |= {
        "segments": Segments(uid=trajectories.uid, ends=one),
        "values": SegmentValues(uid=trajectories.uid, values=values),
    }
    out = toolbox.start(Redistribute, head=head).run(**full).credit
    torch.testing.assert_close(out.advantage.values, full["credit"].advantage.values)


def test_nothing_gained_falls_back_to_uniform(toolbox):
    flat = Jagged.from_rows([[-1.0, -0.5], [0.0, 0.0]], torch.float64)
    sizes = Jagged.from_rows([[1, 3], [2, 2]], torch.int64)
    assert segment_shares(flat, sizes).to_lists() == [[0.25, 0.75], [0.5, 0.5]]
    cancelling = Jagged.from_rows([[1.5, -0.5], [0.0, 0.0]], torch.float64)
    assert segment_shares(cancelling, sizes, "signed").to_lists() == [[0.25, 0.75], [0.5, 0.5]]


@pytest.mark.parametrize("head", ["clip_floor", "softmax", "signed"])
def test_equal_rewards_are_uniform_over_tokens(toolbox, case, head):
    # No information: constant values, so the residual gives every segment r/K, whatever r is.
    values = case["values"].values
    full = _with_credit(toolbox, case, normalize="std")
    full["values"] = SegmentValues(
        uid=case["values"].uid, values=values.with_values(torch.full_like(values.values, 0.3))
    )
    node = toolbox.start(Redistribute, head=head)
    torch.testing.assert_close(node.run(**full).credit.advantage.values, full["credit"].advantage.values)
    assert node.context.metrics["uniform_share"] == 1.0
    sizes = Jagged.from_rows([[1, 3]], torch.int64)
    assert segment_shares(Jagged.from_rows([[0.5, 0.5]], torch.float64), sizes, head).to_lists() == [[0.25, 0.75]]


def test_a_row_without_trained_tokens_gets_none(toolbox):
    trajectories = toolbox.trajectories(["ab", "cd"], inherited=[2, 0])
    case = {
        "trajectories": trajectories,
        "segments": Segments(uid=trajectories.uid, ends=Jagged.from_rows([[1, 2], [1, 2]], torch.int32)),
        "values": SegmentValues(uid=trajectories.uid, values=Jagged.from_rows([[0.0, 0.5, 1.0]] * 2, torch.float32)),
        "rewards": toolbox.rewards(trajectories.uid, [1.0, 0.0]),
    }
    out = toolbox.start(Redistribute).run(**_with_credit(toolbox, case, normalize="std_exact")).credit
    assert out.advantage.to_lists()[0] == [0, 0]
    assert out.mask.to_lists()[0] == [False, False]


def test_flipped_shares_put_the_blame_on_losses(toolbox):
    trajectories = toolbox.trajectories(["ab", "cd"])
    case = {
        "trajectories": trajectories,
        "segments": Segments(uid=trajectories.uid, ends=Jagged.from_rows([[1, 2], [1, 2]], torch.int32)),
        # The wrong one gains 0.5, then loses all of it.
        "values": SegmentValues(
            uid=trajectories.uid, values=Jagged.from_rows([[0.0, 0.5, 1.0], [0.0, 0.5, 0.0]], torch.float32)
        ),
        "rewards": toolbox.rewards(trajectories.uid, [1.0, 0.0]),
    }
    full = _with_credit(toolbox, case, normalize="std_exact")
    same = toolbox.start(Redistribute, floor=0.0, negative="same").run(**full).credit.advantage.to_lists()
    flipped = toolbox.start(Redistribute, floor=0.0).run(**full).credit.advantage.to_lists()
    assert same == [[1, 1], [-2, 0]]
    assert flipped == [[1, 1], [0, -2]]


@pytest.mark.parametrize("kind", [TDAdvantage, AdditiveAdvantage, Redistribute])
def test_invalid_rewards_get_no_credit_and_empty_batches_pass(toolbox, case, kind):
    invalid = case["rewards"].replace(valid=torch.zeros(40, dtype=torch.bool))
    inputs = _with_credit(toolbox, {**case, "rewards": invalid})
    if kind is TDAdvantage:
        del inputs["credit"]
    assert not toolbox.start(kind).run(**inputs).credit.advantage.values.any()
    none = torch.zeros(0, dtype=torch.int64)
    empty = {name: batch.select(none) for name, batch in inputs.items()}
    assert len(toolbox.start(kind).run(**empty).credit) == 0


def test_wrong_segments_and_values_are_reported(toolbox, case):
    node = toolbox.start(TDAdvantage)
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
        (TDAdvantage, {"lam": 1.5}, "expected 0 ≤ lam ≤ 1, got 1.5"),
        (Redistribute, {"floor": 2.0}, "expected 0 ≤ floor ≤ 1 and temperature > 0, got 2.0 and 0.1"),
        (Redistribute, {"temperature": 0.0}, "expected 0 ≤ floor ≤ 1 and temperature > 0, got 0.1 and 0.0"),
    ],
)
def test_impossible_settings_are_reported(kind, settings, text):
    with pytest.raises(ValueError, match=text):
        kind.Config(**settings)
