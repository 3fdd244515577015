"""Objective "shaped", and the per-token weight of the KL penalty."""

import pytest
import torch

from creditgraph.components.learner.objective import KL, LossInputs, Meters, ObjectiveSettings, loss_terms
from creditgraph.pipeline.core.jagged import Jagged


def make_inputs(gamma=None, kl_weight=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    old = Jagged.from_lengths(-3 * torch.rand(12, generator=g), torch.tensor([5, 4, 3]))
    new = (old.values + 0.4 * torch.randn(12, generator=g)).clamp(max=-0.01).requires_grad_()
    columns = {k: old.with_values(v) for k, v in (("shaping", gamma), ("kl_weight", kl_weight)) if v is not None}
    return LossInputs(
        logprobs=old.with_values(new),
        old_logprobs=old,
        engine_logprobs=old,
        advantage=old.spread(torch.tensor([0.7, -0.3, -1.2])),
        mask=old.with_values(torch.ones(12, dtype=torch.bool)),
        group=torch.zeros(3, dtype=torch.int64),
        old_entropies=old,
        reference_logprobs=old,
        columns=columns,
    )


def losses(inputs, settings):
    """Loss per token, and metrics."""
    meters = Meters()
    loss = loss_terms(inputs, settings, meters)
    return loss, meters.values()


def test_one_token_by_hand():
    # p = .1, γ = .1: f = 1/2; f' p = γ p/(p + γ)² = .01/.04 = 1/4.
    row = Jagged.from_rows([[0.0]], torch.float32)
    logprob = torch.tensor([0.1]).log().requires_grad_()
    inputs = make_inputs().replace(
        logprobs=row.with_values(logprob),
        old_logprobs=row,
        engine_logprobs=row,
        advantage=row.with_values(torch.tensor([2.0])),
        mask=row.with_values(torch.tensor([True])),
        group=torch.zeros(1, dtype=torch.int64),
        old_entropies=row,
        columns={"shaping": row.with_values(torch.tensor([0.1]))},
    )
    loss, metrics = losses(inputs, ObjectiveSettings(use="shaped_probability"))
    loss.values.sum().backward()
    assert loss.values.item() == pytest.approx(-1.0)
    assert logprob.grad.item() == pytest.approx(-0.5)
    assert metrics["shaped_weight"] == pytest.approx(0.5)


def test_equals_the_slow_version_in_value_and_gradient(reference):
    gamma = torch.tensor([0.0] * 5 + [0.1] * 4 + [0.0, 0.3, 0.0])
    inputs = make_inputs(gamma)
    loss, metrics = losses(inputs, ObjectiveSettings(use="shaped_probability"))
    leaf = inputs.logprobs.values.detach().clone().requires_grad_()
    advantage, old = inputs.advantage.values.tolist(), list(inputs.old_logprobs.values)
    slow = torch.stack(
        [torch.as_tensor(x) for x in reference.shaped_loss(list(leaf), old, advantage, gamma.tolist(), 0.2, 0.2)]
    )
    torch.testing.assert_close(loss.values, slow)
    weight = torch.arange(1.0, 13.0)
    (loss.values * weight).sum().backward()
    (slow * weight).sum().backward()
    torch.testing.assert_close(inputs.logprobs.values.grad, leaf.grad)
    assert metrics["shaped_share"] == pytest.approx(5 / 12)


@pytest.mark.parametrize("gamma", [None, torch.zeros(12)])
def test_without_shaping_it_is_the_token_objective(gamma):
    shaped, plain = make_inputs(gamma), make_inputs()
    a, b = losses(shaped, ObjectiveSettings(use="shaped_probability")), losses(plain, ObjectiveSettings(use="ppo_clip"))
    assert torch.equal(a[0].values, b[0].values)
    a[0].values.sum().backward()
    b[0].values.sum().backward()
    assert torch.equal(shaped.logprobs.values.grad, plain.logprobs.values.grad)
    assert a[1]["clip_fraction"] == b[1]["clip_fraction"]


def test_no_ratio_no_overflow():
    # A refinement token that the sampling prompt made likely and the problem does not: its ratio would be e^−30, f does
    # not see it.
    inputs = make_inputs(torch.full((12,), 0.1))
    far = inputs.replace(old_logprobs=inputs.old_logprobs.with_values(inputs.old_logprobs.values + 30))
    a, b = (losses(x, ObjectiveSettings(use="shaped_probability")) for x in (inputs, far))
    assert torch.equal(a[0].values, b[0].values)
    assert b[1]["ratio_overflow"] == 0


def test_kl_weight_multiplies_the_penalty_per_token():
    weight = torch.tensor([10.0] * 5 + [1.0] * 4 + [0.0] * 3)
    objective = ObjectiveSettings(use="reinforce", kl=KL(coefficient=0.5, estimator="k3"))
    without = losses(make_inputs(), ObjectiveSettings(use="reinforce"))[0].values
    plain = losses(make_inputs(), objective)[0].values - without
    weighted = losses(make_inputs(kl_weight=weight), objective)[0].values - without
    torch.testing.assert_close(weighted, plain * weight, atol=1e-6, rtol=1e-4)
    ones = losses(make_inputs(kl_weight=torch.ones(12)), objective)[0].values - without
    assert torch.equal(ones, plain)
