"""Objective "cispo": the clipped weight has no gradient of its own."""

import math

import pytest
import torch
from loss_inputs import by_hand, gradient, losses, make_inputs

from creditgraph.components.learner.objective import ObjectiveSettings
from creditgraph.components.learner.objective.cispo import CISPO


def cispo(**config):
    return ObjectiveSettings(use="cispo", config=config, aggregate="seq_mean_token_sum")


def test_by_hand():
    # Ratios 2, 1/2, 1: weights 1.5, 0.6, 1 with bounds 0.6 to 1.5; the gradient is −weight · A.
    inputs = by_hand([math.log(2), -math.log(2), 0.0], [1.0, -2.0, 3.0])
    settings = cispo(clip_low=0.4, clip_high=0.5)
    assert gradient(inputs, settings).tolist() == pytest.approx([-1.5, 1.2, -3.0])
    _, loss, metrics = losses(inputs, settings)
    assert loss.values.tolist() == pytest.approx([-1.5 * math.log(2), 2 * 0.6 * -math.log(2), 0.0])
    assert metrics["weight_clipped"] == pytest.approx(2 / 3)
    plain = ObjectiveSettings(use="ppo_clip", config={"clip_low": 0.4, "clip_high": 0.5}, aggregate=settings.aggregate)
    assert gradient(inputs, plain).tolist() == pytest.approx([0.0, 0.0, -3.0])  # PPO's clip stops both


def test_equals_a_slow_loop():
    inputs = make_inputs(spread=0.8)
    result = gradient(inputs, cispo(clip_high=0.5))
    for i, (new, old) in enumerate(zip(inputs.logprobs.values.detach(), inputs.old_logprobs.values, strict=True)):
        weight = min(math.exp(float(new - old)), 1.5)
        slow = -weight * float(inputs.advantage.values[i]) / len(inputs) * bool(inputs.mask.values[i])
        assert float(result[i]) == pytest.approx(slow, rel=1e-5, abs=1e-7)


def test_on_policy_it_is_reinforce():
    inputs = make_inputs(spread=0.0)
    plain = ObjectiveSettings(use="reinforce", aggregate="seq_mean_token_sum")
    torch.testing.assert_close(gradient(inputs, cispo()), gradient(inputs, plain), rtol=0, atol=0)


def test_bounds_are_checked():
    with pytest.raises(ValueError, match=r"expected 0 ≤ clip_low ≤ 1 .* got clip_low 2"):
        CISPO.Config(clip_low=2.0)
