"""Redistribution: by hand, a slow loop, identities, the unit of values, bounded factors."""

import dataclasses
import math

import pytest
import torch

from creditgraph.components.advantage.redistribute import Redistribute, Shares, redistributed_rewards, segment_shares
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Segments, SegmentValues

HEADS = ("clip_floor", "softmax", "signed")


def shares(values, sizes, reward=1.0, sign=1.0, **form):
    """Shares of one row."""
    result = segment_shares(
        Jagged.from_rows([values], torch.float64),
        Jagged.from_rows([sizes], torch.int64),
        torch.tensor([reward]),
        torch.tensor([sign]),
        Shares(**form),
    )
    return result.to_lists()[0]


def test_redistributed_rewards_sum_to_the_return(random_values):
    _, ends, values, reward = random_values()
    parts = redistributed_rewards(values, reward)
    filled = ends.lengths > 0
    torch.testing.assert_close(parts.sum()[filled], reward.double()[filled], rtol=0, atol=1e-12)
    assert parts.lengths.tolist() == ends.lengths.tolist()


def test_redistribution_by_hand():
    # Values 0.2, 0.6, 0.4, 0.8, return 1: gains 0.4, −0.2, 0.4 leave 0.4.
    values, reward = Jagged.from_rows([[0.2, 0.6, 0.4, 0.8]], torch.float64), torch.tensor([1.0])
    equal = redistributed_rewards(values, reward).to_lists()[0]
    assert equal == pytest.approx([0.4 + 0.4 / 3, -0.2 + 0.4 / 3, 0.4 + 0.4 / 3])
    v, n = values.to_lists()[0], [1, 1, 2]
    # Positive gains 0.4, 0, 0.4 → 1/2, 0, 1/2, nine tenths of them, and a tenth by length.
    assert shares(v, n, per="segment") == pytest.approx([0.45 + 0.025, 0.025, 0.45 + 0.05])
    assert shares(v, n, head="signed", per="segment") == pytest.approx([0.4 / 0.6, -0.2 / 0.6, 0.4 / 0.6])
    # Per token the third counts twice: 0.4, 0, 0.8 → 1/3, 0, 2/3; signed 0.4, −0.2, 0.8, divided by 1.
    assert shares(v, n) == pytest.approx([0.3 + 0.025, 0.025, 0.6 + 0.05])
    assert shares(v, n, head="signed") == pytest.approx([0.4, -0.2, 0.8])
    # Softmax of gains 1, −0.5, 1 in units of the largest, at temperature 0.5, times n: e², e⁻¹, 2e².
    raw = [math.exp(2), math.exp(-1), 2 * math.exp(2)]
    assert shares(v, n, head="softmax") == pytest.approx([w / sum(raw) for w in raw])
    # Turned around, the loss of 0.2 carries all.
    assert shares(v, n, sign=-1.0, floor=0.0) == pytest.approx([0, 1, 0])


@pytest.mark.parametrize("per", ["token", "segment"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("head", HEADS)
def test_redistribution_slow_version(reference, random_values, head, sign, per):
    sizes, ends, values, reward = random_values(3)
    trained = [s.clone() for s in sizes]
    trained[2][0] = 0
    signs = torch.full((len(sizes),), sign)
    form = Shares(head=head, floor=0.2, temperature=0.4, per=per, max_factor=2.5)
    result = segment_shares(values, ends.with_values(torch.cat(trained)), reward, signs, form)
    drawn = 0
    for i in range(1, len(sizes)):
        parts, slow, part = reference.redistribution(
            values.to_lists()[i], reward[i].item(), trained[i].tolist(), sign, form
        )
        assert redistributed_rewards(values, reward).row(i).tolist() == pytest.approx(parts, abs=1e-6)
        drawn += part < 1
        assert sum(result.row(i).tolist()) == pytest.approx(1.0)
        # The reference goes in steps of a thousandth, and unbounded shares of `signed` may be large.
        assert result.row(i).tolist() == pytest.approx(slow, abs=1e-5 if part == 1 else 1e-2 / max(part, 1e-3))
    assert drawn > 0 or head == "softmax"


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_the_unit_of_values_changes_no_share(random_values, head, reward):
    sizes, ends, values, _ = random_values(5, rows=200)
    counts = ends.with_values(torch.cat(sizes))
    sign = torch.full((200,), 1.0 if reward else -1.0)
    returns = torch.full((200,), reward)
    form = Shares(head=head)
    expected = segment_shares(values, counts, returns, sign, form)
    for factor in (0.01, 1e-6, 1e-30):
        scaled = values.with_values(values.values.double() * factor)
        torch.testing.assert_close(segment_shares(scaled, counts, returns, sign, form).values, expected.values)
    shifted = values.with_values(values.values.double() + 0.5)
    torch.testing.assert_close(segment_shares(shifted, counts, returns, sign, form).values, expected.values)


def test_the_unit_of_values_changes_no_credit(toolbox, case, with_credit):
    full = with_credit(case, normalize="std")
    before = toolbox.start(Redistribute).run(**full).credit
    assert bool((before.advantage.values < 0).any())
    assert not torch.allclose(before.advantage.values, full["credit"].advantage.values)
    small = case["values"].values
    full["values"] = case["values"].replace(values=small.with_values(small.values * 0.01))
    after = toolbox.start(Redistribute).run(**full).credit
    torch.testing.assert_close(after.advantage.values, before.advantage.values, rtol=1e-4, atol=1e-5)


def test_signed_shares_of_failures_are_uniform_and_all_factors_bounded(random_values):
    sizes, ends, values, _ = random_values(7, rows=2000)
    counts = ends.with_values(torch.cat(sizes))
    uniform = counts.values.double() / counts.sum().clamp(min=1)[counts.row_ids]
    failed = segment_shares(values, counts, torch.zeros(2000), torch.full((2000,), -1.0), Shares(head="signed"))
    # Rewards of 0 have r_k that sum to 0.
    torch.testing.assert_close(failed.values, uniform)
    for head in HEADS:
        for bound in (3.0, 10.0):
            form = Shares(head=head, max_factor=bound)
            share = segment_shares(values, counts, torch.ones(2000), None, form)
            factor = share.values / uniform
            assert float(factor.abs().max()) <= bound + 1e-9
            assert float((factor - 1.0).abs().max()) > 0.5
    # Gains 1, −0.998 on one token each: factors 2 · 500 and −2 · 499, drawn to 1 ± 9 · part.
    close = shares([0.0, 1.0, 0.002], [1, 1], head="signed")
    part = min(9 / 999, 11 / 999)
    assert close == pytest.approx([(1 + 999 * part) / 2, (1 - 999 * part) / 2], rel=1e-6)


def test_values_too_small_for_a_float_count_by_their_logs(toolbox, with_credit):
    trajectories = toolbox.trajectories(["abc", "abc"])
    logs = Jagged.from_rows([[-900.0, -899.0, -901.0, -math.inf], [-900.0, -899.0, -901.0, 0.0]], torch.float64)
    values = SegmentValues(uid=trajectories.uid, values=logs.with_values(logs.values.exp().float()), logs=logs)
    assert values.values.to_lists() == [[0, 0, 0, 0], [0, 0, 0, 1]]
    inputs = with_credit(
        {
            "trajectories": trajectories,
            "segments": Segments(uid=trajectories.uid, ends=Jagged.from_rows([[1, 2, 3]] * 2, torch.int32)),
            "values": values,
            "rewards": toolbox.rewards(trajectories.uid, [0.0, 1.0]),
        },
        normalize="std_exact",
    )
    node = toolbox.start(Redistribute, floor=0.0)
    failed, solved = node.run(**inputs).credit.advantage.to_lists()
    # The failure loses 1 − e⁻² in the second segment and e⁻² in the third; without logs it would be GRPO's −1 each.
    assert failed == pytest.approx([0.0, -3 * (1 - math.exp(-2)), -3 * math.exp(-2)])
    assert solved == [0, 0, 3]
    assert node.context.metrics["uniform_share"] == 0.0
    node.run(**{**inputs, "values": values.replace(logs=None)})
    assert node.context.metrics["uniform_share"] == 0.5
    zeros = values.replace(logs=logs.with_values(torch.full_like(logs.values, -math.inf)))
    assert zeros.relative().values.tolist() == [0.0] * 8


@pytest.mark.parametrize("head", HEADS)
def test_the_mean_credit_over_trained_tokens_is_kept(toolbox, case, with_credit, head):
    trajectories = case["trajectories"]
    case = {**case, "trajectories": trajectories.replace(inherited=(trajectories.response_tokens.lengths // 2))}
    full = with_credit(case, normalize="std_exact")
    out = toolbox.start(Redistribute, head=head).run(**full).credit
    mask = out.mask.values
    before = full["credit"].advantage.with_values(full["credit"].advantage.values * mask).sum()
    after = out.advantage.with_values(out.advantage.values * mask).sum()
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    parts = out.columns["redistributed"]
    assert parts.lengths.tolist() == trajectories.response_tokens.lengths.tolist()


@pytest.mark.parametrize("head", HEADS)
def test_one_segment_is_grpo(toolbox, case, with_credit, head):
    trajectories, lengths = case["trajectories"], case["trajectories"].response_tokens.lengths
    one = Jagged.from_lengths(lengths[lengths > 0].to(torch.int32), (lengths > 0).long())
    values = Jagged.from_lengths(torch.rand(int((lengths > 0).sum()) + 40), (lengths > 0).long() + 1)
    full = with_credit(case, normalize="std")
    full |= {
        "segments": Segments(uid=trajectories.uid, ends=one),
        "values": SegmentValues(uid=trajectories.uid, values=values),
    }
    out = toolbox.start(Redistribute, head=head).run(**full).credit
    torch.testing.assert_close(out.advantage.values, full["credit"].advantage.values)


def test_small_gains_count_beside_a_large_loss():
    # As with products over long references: only the start has a value that a float32 can hold.
    assert shares([1.0, 1e-50, 3e-50, 4e-50], [1, 1, 1], floor=0.0) == pytest.approx([0, 2 / 3, 1 / 3])
    assert shares([1.0, 1e-50, 3e-50, 4e-50], [1, 1, 1], sign=-1.0, floor=0.0) == pytest.approx([1, 0, 0])
    assert shares([1.0, 1.0 - 1e-8, 1.0, 1.0], [1, 1, 2], floor=0.0) == pytest.approx([0.25, 0.25, 0.5])


def test_nothing_gained_falls_back_to_uniform():
    assert shares([1.0, 0.5, 0.5], [1, 3]) == [0.25, 0.75]
    assert shares([0.0, 0.0, 0.0], [2, 2]) == [0.5, 0.5]
    assert shares([0.0, 1.0, 0.0], [1, 1], head="signed") == [0.5, 0.5]
    # A success whose summed value fell: signed shares would reward what lost.
    assert shares([1.0, 0.5, 0.6], [1, 1], head="signed") == [0.5, 0.5]


@pytest.mark.parametrize("head", HEADS)
def test_equal_gains_are_uniform_over_tokens(toolbox, case, with_credit, head):
    # No information: constant values, up to the rounding of a float32.
    values = case["values"].values
    full = with_credit(case, normalize="std")
    constant = 0.3 + 1e-8 * torch.arange(len(values.values))
    full["values"] = SegmentValues(uid=case["values"].uid, values=values.with_values(constant.float()))
    node = toolbox.start(Redistribute, head=head)
    torch.testing.assert_close(node.run(**full).credit.advantage.values, full["credit"].advantage.values)
    assert node.context.metrics["uniform_share"] == 1.0
    assert shares([0.0, 0.5, 1.0], [1, 3], head=head) == pytest.approx([0.25, 0.75])


def test_a_row_without_trained_tokens_gets_none(toolbox, with_credit):
    trajectories = toolbox.trajectories(["ab", "cd"], inherited=[2, 0])
    case = {
        "trajectories": trajectories,
        "segments": Segments(uid=trajectories.uid, ends=Jagged.from_rows([[1, 2], [1, 2]], torch.int32)),
        "values": SegmentValues(uid=trajectories.uid, values=Jagged.from_rows([[0.0, 0.5, 1.0]] * 2, torch.float32)),
        "rewards": toolbox.rewards(trajectories.uid, [1.0, 0.0]),
    }
    out = toolbox.start(Redistribute).run(**with_credit(case, normalize="std_exact")).credit
    assert out.advantage.to_lists()[0] == [0, 0]
    assert out.mask.to_lists()[0] == [False, False]


def test_flipped_shares_put_the_blame_on_losses(toolbox, with_credit):
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
    full = with_credit(case, normalize="std_exact")
    same = toolbox.start(Redistribute, floor=0.0, negative="same").run(**full).credit.advantage.to_lists()
    flipped = toolbox.start(Redistribute, floor=0.0).run(**full).credit.advantage.to_lists()
    assert same == [[1, 1], [-2, 0]]
    assert flipped == [[1, 1], [0, -2]]


def test_the_share_of_bounded_trajectories_is_logged(toolbox, case, with_credit):
    full = with_credit(case, normalize="std")
    shares_drawn = {}
    for bound in (1.5, 1000.0):
        node = toolbox.start(Redistribute, **dataclasses.asdict(Shares(max_factor=bound)))
        node.run(**full)
        shares_drawn[bound] = node.context.metrics["bounded_share"]
        assert node.context.metrics["factor_max"] <= bound + 1e-9
    assert shares_drawn[1.5] > 0.2
    assert shares_drawn[1000.0] == 0.0
