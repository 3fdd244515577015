"""Objective "fipo": PPO's clip on advantages that are weighed by the tokens after each."""

import math

import pytest
import torch
from loss_inputs import by_hand, gradient, losses, make_inputs

from creditgraph.components.learner.objective import ObjectiveSettings
from creditgraph.components.learner.objective.fipo import FIPO, future_sum
from creditgraph.pipeline.core.jagged import Jagged


def settings(use="fipo", **config):
    return ObjectiveSettings(use=use, config=config, aggregate="seq_mean_token_sum")


def test_by_hand():
    # Half-life 1: γ = 1/2. log ρ = (.1, .2, −.4): F = (.1 + .1 − .1, .2 − .2, −.4) = (.1, 0, −.4).
    # f = (e^.1 = 1.10517, 1, max(e^−.4, .8) = .8); the gradient of −ρ f A is −ρ f A inside the clip.
    inputs = by_hand([0.1, 0.2, -0.4], [1.0, 1.0, 2.0])
    ours = settings(half_life=1.0, weight_low=0.8, weight_high=1.2, clip_low=0.5, clip_high=0.5)
    expected = [-math.exp(0.1) * math.exp(0.1), -math.exp(0.2), -math.exp(-0.4) * 0.8 * 2]
    assert gradient(inputs, ours).tolist() == pytest.approx(expected, rel=1e-5)
    metrics = losses(inputs, ours)[2]
    assert metrics["future_weight"] == pytest.approx((math.exp(0.1) + 1 + 0.8) / 3)
    assert metrics["future_bounded"] == pytest.approx(1 / 3)


def test_outliers_and_unsafe_tokens():
    # Token 2 has ratio 11 and takes no part, so token 1 has F = log 5; f = 1.2 is cut to 1, since A < 0 and 5 > 4.
    inputs = by_hand([math.log(5), math.log(11)], [-1.0, -1.0])
    assert gradient(inputs, settings(half_life=1.0)).tolist() == pytest.approx([5.0, 11.0], rel=1e-5)
    inputs = by_hand([math.log(3), math.log(11)], [-1.0, -1.0])
    assert gradient(inputs, settings(half_life=1.0)).tolist() == pytest.approx([3.6, 11.0], rel=1e-5)


def test_equals_a_slow_loop():
    inputs = make_inputs(spread=0.8)
    result = gradient(inputs, settings(half_life=3.0, weight_low=0.7, weight_high=1.5))
    flat = 0
    for new, old, mask, advantage in zip(
        *(part.rows() for part in (inputs.logprobs, inputs.old_logprobs, inputs.mask, inputs.advantage)), strict=True
    ):
        moved = (new - old).detach().tolist()
        for t in range(len(moved)):
            future = sum(
                2 ** (-(k - t) / 3) * moved[k] for k in range(t, len(moved)) if mask[k] and math.exp(moved[k]) <= 10
            )
            ratio, a = math.exp(moved[t]), float(advantage[t])
            weight = min(max(math.exp(future), 0.7), 1.5)
            if a < 0 and ratio > 4:
                weight = min(weight, 1.0)
            stopped = (a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.8)
            slow = 0.0 if stopped or not mask[t] else -ratio * weight * a / len(inputs)
            assert float(result[flat]) == pytest.approx(slow, rel=1e-4, abs=1e-6)
            flat += 1


def test_the_sum_over_long_rows():
    draws = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, generator=draws, dtype=torch.float64) for n in (1, 200, 67)]
    found = Jagged.from_rows([row.tolist() for row in rows], torch.float64)
    found = found.with_values(future_sum(found, 0.97))
    for i, row in enumerate(rows):
        slow = [sum(0.97 ** (k - t) * float(row[k]) for k in range(t, len(row))) for t in range(len(row))]
        torch.testing.assert_close(found.row(i), torch.tensor(slow, dtype=torch.float64))


def test_on_policy_and_with_bounds_of_one_it_is_ppo_clip():
    for inputs, ours in ((make_inputs(spread=0.0), settings()), (make_inputs(spread=0.8), settings(weight_high=1.0))):
        torch.testing.assert_close(gradient(inputs, ours), gradient(inputs, settings("ppo_clip")), rtol=0, atol=0)


def test_bounds_are_checked():
    with pytest.raises(ValueError, match=r"weight_low ≤ 1 ≤ weight_high, got 32.0, 1.1 and 1.2"):
        FIPO.Config(weight_low=1.1)
