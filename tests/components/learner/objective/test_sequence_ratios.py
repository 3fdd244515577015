"""Objectives of one ratio per sequence: GSPO, with and without a gate."""

import dataclasses
import math

import pytest
import torch
from loss_inputs import by_hand, gradient, gspo, losses, make_inputs

from creditgraph.components.learner.objective import EntropyMask, ObjectiveSettings


def test_gspo_by_hand():
    # mean l = .1 and −.2: s = e^{.1}, e^{−.2}
    inputs = by_hand([0.3, -0.1], [2.0, 2.0])
    _, loss, _ = losses(inputs, gspo())
    assert loss.values.tolist() == pytest.approx([-2 * math.exp(0.1)] * 2)


@pytest.mark.parametrize("use", ["gspo", "gspo_gated"])
def test_gspo_equals_loop(use):
    inputs = make_inputs(spread=0.3)
    gate = inputs.mask.with_values(torch.rand(84, generator=torch.Generator().manual_seed(5)) > 0.5)
    inputs = inputs.replace(columns={"gate": gate})
    actual = losses(inputs, gspo(use))[1]
    for row in range(len(actual)):
        logs = (inputs.logprobs.row(row) - inputs.old_logprobs.row(row)).tolist()
        chosen = inputs.mask.row(row) & gate.row(row) if use == "gspo_gated" else inputs.mask.row(row)
        used = [x for x, m in zip(logs, chosen.tolist(), strict=True) if m]
        s = math.exp(sum(used) / len(used)) if used else 1.0
        expected = [-min(s * a, min(max(s, 0.8), 1.2) * a) for a in inputs.advantage.row(row).tolist()]
        assert actual.row(row).tolist() == pytest.approx(expected, rel=1e-4)


def test_gate_of_ones_is_the_sequence_ratio():
    inputs = make_inputs()
    a, b = (gradient(inputs, gspo(use)) for use in ("gspo", "gspo_gated"))
    assert torch.equal(a, b)


def test_token_form_has_the_sequence_value_and_gradient_at_equal_advantages():
    inputs = make_inputs(constant=True)
    a, b = (dataclasses.replace(gspo(form=f), aggregate="seq_mean_token_mean") for f in ("sequence", "token"))
    torch.testing.assert_close(losses(inputs, a)[1].values, losses(inputs, b)[1].values)
    torch.testing.assert_close(gradient(inputs, a), gradient(inputs, b))


def test_token_form_scales_each_token_by_its_own_advantage():
    # s = 1 here (mean l = 0): gradients −A_t/2 per token, where the sequence form spreads −mean(A)/2.
    inputs = by_hand([0.1, -0.1], [1.0, 3.0])
    assert gradient(inputs, gspo(form="token")).tolist() == pytest.approx([-0.5, -1.5])
    assert gradient(inputs, gspo()).tolist() == pytest.approx([-1.0, -1.0])


def test_normalised_trace_without_decay_ends_in_the_sequence_ratio():
    inputs = make_inputs(spread=0.1)
    wide = {"clip_low": 1.0, "clip_high": 1e6}
    ones = inputs.advantage.with_values(torch.ones(84))
    trained_last = inputs.mask.with_values(
        inputs.mask.values | (inputs.mask.positions == inputs.mask.spread(inputs.mask.lengths).values - 1)
    )
    inputs = inputs.replace(advantage=ones, mask=trained_last)
    trace = losses(inputs, ObjectiveSettings(use="trace", config={"decay": 1.0, "clip": "normalised", **wide}))[1]
    sequence = losses(inputs, gspo(**wide))[1]
    last = inputs.mask.offsets[1:] - 1
    torch.testing.assert_close(trace.values[last], sequence.values[last])


def uniform(**config):
    """The trace that weighs every token alike, w = 1/T for all t and k."""
    return ObjectiveSettings(use="trace", config={"style": "uniform", **config})


@pytest.mark.parametrize("clip", [{"clip_low": 3e-4, "clip_high": 4e-4}, {"clip_low": 0.2, "clip_high": 0.2}])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5])
def test_the_uniform_trace_is_gspo_in_value_and_gradient(clip, constant, spread):
    inputs = make_inputs(spread=spread, constant=constant)
    a, b = uniform(**clip), gspo(**clip)
    trained = inputs.mask.values
    (_, one, metrics), (_, other, expected) = losses(inputs, a), losses(inputs, b)
    assert torch.equal(one.values[trained], other.values[trained])
    assert torch.equal(gradient(inputs, a), gradient(inputs, b))
    # Every token of a clipped sequence loses its gradient; signs may differ within a row.
    assert metrics["clipped_terms"] == pytest.approx(expected["clip_fraction"])
    if constant:
        assert metrics["clip_fraction"] == pytest.approx(expected["clip_fraction"])


def test_the_frame_with_equal_weights_is_the_uniform_trace(reference):
    logs, advantage = [0.1, -0.05, 0.3, -0.2], [1.0, 2.0, 1.0, -1.0]
    expected = reference.ratio_frame_gradient(logs, advantage, lambda t, k: 0.25, 0.2, 0.2)
    assert (-4 * gradient(by_hand(logs, advantage), uniform())).tolist() == pytest.approx(expected, rel=1e-5)
    prepared = losses(by_hand(logs, advantage), uniform())[0]
    assert prepared.columns["trace_scale"].values.tolist() == pytest.approx([1.0] * 4)  # uniform credit: C_k = A


def test_the_uniform_sparse_trace_is_the_gated_sequence_ratio():
    inputs = make_inputs(spread=0.1)
    masked = dataclasses.replace(uniform(), entropy_mask=EntropyMask(keep=0.3, scope="sequence"))
    gate = losses(inputs, masked)[0].columns["high_entropy"]
    gated = inputs.replace(columns={"gate": gate})
    torch.testing.assert_close(gradient(inputs, masked), gradient(gated, gspo("gspo_gated")))
