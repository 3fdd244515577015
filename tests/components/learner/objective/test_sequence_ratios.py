"""Objectives of one ratio per sequence: GSPO, with and without a gate."""

import dataclasses
import math

import pytest
import torch
from loss_inputs import by_hand, gradient, gspo, losses, make_inputs


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
