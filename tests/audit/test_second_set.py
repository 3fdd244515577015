"""Plausible faults that the audit once missed, and right functions that it once called wrong."""

import pytest
import torch

from creditgraph.pipeline.app.audit.audit import failures, run_checks, table
from creditgraph.pipeline.app.audit.contract import CONTRACT
from creditgraph.pipeline.app.audit.loss import LOSS
from creditgraph.pipeline.app.audit.loss_target import loss_function
from creditgraph.pipeline.app.audit.metamorphic import METAMORPHIC
from creditgraph.pipeline.app.audit.targets import advantage_function


def mean(loss, mask):
    return (loss * mask).sum() / mask.sum()


def one_sided(logprobs, old_logprobs, advantages, mask, clip: float = 0.2):
    """The clamp alone, without the minimum."""
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    return mean(-ratio.clamp(1 - clip, 1 + clip) * advantages, mask)


def bounds_exchanged(logprobs, old_logprobs, advantages, mask, clip_low: float = 0.2, clip_high: float = 0.28):
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    return mean(-torch.min(ratio * advantages, ratio.clamp(1 - clip_high, 1 + clip_low) * advantages), mask)


def credit_averaged(logprobs, old_logprobs, advantages, mask, clip: float = 0.2):
    """Token credit becomes credit of the response."""
    advantages = ((advantages * mask).sum(1) / mask.sum(1).clamp(min=1)).unsqueeze(1).expand_as(logprobs)
    return surrogate(logprobs, old_logprobs, advantages, mask, clip)


def credit_shifted(logprobs, old_logprobs, advantages, mask, clip: float = 0.2):
    return surrogate(logprobs, old_logprobs, advantages.roll(1, 1), mask, clip)


def first_token_of_the_row(logprobs, old_logprobs, advantages, mask, clip: float = 0.2):
    return surrogate(logprobs, old_logprobs, advantages[:, :1].expand_as(logprobs), mask, clip)


def product_of_ratios(logprobs, old_logprobs, advantages, mask):
    """Beyond float32 where the logs of a row add up."""
    ratio = torch.where(mask, (logprobs - old_logprobs).clamp(-40, 40).exp(), 1.0).prod(1, keepdim=True)
    return mean(-ratio * advantages, mask)


def writes_into_advantages(logprobs, old_logprobs, advantages, mask, clip: float = 0.2):
    advantages /= advantages.abs().max()
    return surrogate(logprobs, old_logprobs, advantages, mask, clip)


def surrogate(logprobs, old_logprobs, advantages, mask, clip: float = 0.2):
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    return mean(-torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages), mask)


def two_bounds(logprobs, old_logprobs, advantages, mask, clip_low: float = 0.2, clip_high: float = 0.28):
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    return mean(-torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages), mask)


def cispo(logprobs, old_logprobs, advantages, mask, epsilon_high: float = 5.0):
    weight = (logprobs - old_logprobs).clamp(-20, 20).exp().clamp(max=epsilon_high).detach()
    return mean(-weight * advantages * logprobs, mask)


def reinforce_with_ratio(logprobs, old_logprobs, advantages, mask):
    weight = (logprobs - old_logprobs).clamp(-20, 20).exp().detach()
    return mean(-weight * advantages * logprobs, mask)


def cispo_with_kl(logprobs, old_logprobs, ref_logprobs, advantages, mask, beta: float = 0.1):
    weight = (logprobs - old_logprobs).clamp(-20, 20).exp().clamp(max=5.0).detach()
    gap = (ref_logprobs - logprobs).clamp(-20, 20)
    return mean(-weight * advantages * logprobs + beta * (gap.exp() - gap - 1), mask)


def reinforce(logprobs, advantages, mask):
    return mean(-advantages * logprobs, mask)


WRONG = {
    one_sided: ("loss_clip", "is the minimum with the unclipped term missing?"),
    bounds_exchanged: ("loss_clip", "are the two bounds exchanged?"),
    credit_averaged: ("loss_token_credit", "does it average the advantages over the row?"),
    credit_shifted: ("loss_token_credit", "are advantages shifted"),
    first_token_of_the_row: ("loss_token_credit", "does it average the advantages over the row?"),
    product_of_ratios: ("loss_overflow", "gradients are no numbers"),
    writes_into_advantages: ("loss_returns", "it writes into advantages"),
}


def of_loss(function):
    return run_checks(loss_function(function, function.__name__, {}, {}), LOSS)


@pytest.mark.parametrize("function", WRONG, ids=lambda f: f.__name__)
def test_wrong_losses_are_found_and_the_likely_fault_is_named(function):
    check, words = WRONG[function]
    found = {result.check.name: result.finding.message for result in failures(of_loss(function))}
    assert words in found.get(check, ""), found


@pytest.mark.parametrize(
    "function", [surrogate, two_bounds, cispo, cispo_with_kl, reinforce_with_ratio, reinforce], ids=lambda f: f.__name__
)
def test_right_losses_pass(function):
    assert [(r.check.name, r.finding.message) for r in failures(of_loss(function))] == []


def centred(rewards, groups, eps):
    rewards = rewards.float()
    out = torch.zeros_like(rewards)
    for group in groups.unique():
        own = rewards[groups == group]
        out[groups == group] = (own - own.mean()) / (own.std(correction=0) + eps)
    return out


def grpo(rewards, groups):
    return centred(rewards, groups, 1e-4)


def tiny_epsilon(rewards, groups):
    return centred(rewards, groups, 1e-9)


def of_four_rows(rewards, groups):
    assert groups.tolist() == [0, 0, 1, 1], "two groups of two"
    return grpo(rewards, groups)


def of_advantage(function):
    return run_checks(advantage_function(function, function.__name__, {}, {}), (*CONTRACT, *METAMORPHIC))


def test_rounding_that_an_epsilon_makes_a_signal_is_found():
    found = {result.check.name: result.finding for result in failures(of_advantage(tiny_epsilon))}
    assert "with equal rewards 0.1 and 0.333 have advantages" in found["no_signal"].message
    assert [r.check.name for r in failures(of_advantage(grpo))] == []


def test_a_check_that_raised_on_nearly_all_batches_is_no_pass():
    results = of_advantage(of_four_rows)
    passed = {r.check.name for r in results if r.finding.verdict == "pass"}
    assert not passed & {"row_order", "relabelled_groups", "copies", "padding"}
    said = {r.check.name: r.finding.message for r in results}
    assert said["padding"].startswith("not judged: raises AssertionError: two groups of two")
    assert "of 32 batches" in said["padding"]
    assert "not judged" in table(results)
