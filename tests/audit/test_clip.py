"""Losses away from equal policies: the clip, the dual clip, and ∇J after a step."""

import dataclasses

import pytest
import torch

from creditgraph.components.learner.objective import ObjectiveSettings
from creditgraph.pipeline.app.audit.loss import clipping, later_steps
from creditgraph.pipeline.app.audit.loss_target import loss_function
from creditgraph.pipeline.app.audit.ours import objective_target


def mean(loss, mask):
    return (loss * mask).sum() / mask.sum()


def clipped(logprobs, old_logprobs, advantages, mask, clip: float = 0.2):
    ratio = (logprobs - old_logprobs).exp()
    return mean(-torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages), mask)


def one_sided(logprobs, old_logprobs, advantages, mask, clip: float = 0.2):
    """The minimum is left out, and only ratios above 1 are clipped."""
    return mean(-(logprobs - old_logprobs).exp().clamp(max=1 + clip) * advantages, mask)


def weighted(logprobs, old_logprobs, advantages, mask, clip: float = 0.2):
    """The clipped ratio is a weight without a gradient, as in CISPO."""
    ratio = (logprobs - old_logprobs).exp().clamp(max=1 + clip).detach()
    return mean(-ratio * advantages * logprobs, mask)


def dual(logprobs, old_logprobs, advantages, mask, clip: float = 0.2, dual_clip: float = 3.0):
    ratio = (logprobs - old_logprobs).exp()
    lower = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return mean(-torch.where(advantages < 0, torch.maximum(lower, dual_clip * advantages), lower), mask)


def single(logprobs, old_logprobs, advantages, mask, clip: float = 0.2, dual_clip: float = 3.0):
    return clipped(logprobs, old_logprobs, advantages, mask, clip) + 0.0 * dual_clip


def target(function):
    return loss_function(function, function.__name__, {}, {})


@pytest.mark.parametrize(
    ("function", "verdict"),
    [(clipped, "pass"), (one_sided, "fail"), (weighted, "fail"), (dual, "pass"), (single, "fail")],
)
def test_the_clip_holds(function, verdict):
    assert clipping(target(function)).verdict == verdict


def test_what_is_said_of_a_dual_clip_that_does_nothing():
    finding = clipping(target(single))
    assert "tokens of negative advantage at ratios of e⁴ still have a gradient" in finding.message


def test_bounds_of_the_log_ratio_are_no_exchanged_bounds():
    def log_space(logprobs, old_logprobs, advantages, mask, clip_low: float = 0.2, clip_high: float = 0.28):
        gap = logprobs - old_logprobs
        bounded = gap.clamp(-clip_low, clip_high)
        return mean(-torch.minimum(gap.exp() * advantages, bounded.exp() * advantages), mask)

    assert clipping(target(log_space)).verdict == "pass"


def test_a_loss_without_a_clip_is_not_judged():
    def plain(logprobs, old_logprobs, advantages, mask):
        return mean(-(logprobs - old_logprobs).exp() * advantages, mask)

    assert clipping(target(plain)).verdict == "not applicable"


def scale(finding):
    return float(finding.message.partition("scale ")[2].partition(",")[0])


def test_ratios_correct_for_the_policy_that_sampled_and_plain_log_probs_do_not():
    corrected, plain = (
        later_steps(objective_target(ObjectiveSettings(use=use), use)) for use in ("ppo_clip", "reinforce")
    )
    assert corrected.verdict == "pass"
    assert scale(corrected) == pytest.approx(1.0, abs=2e-3)
    assert abs(scale(plain) - 1.0) > 0.05


def test_a_loss_that_grows_with_the_advantage_fails_after_a_step():
    def wrong(logprobs, old_logprobs, advantages, mask):
        return -clipped(logprobs, old_logprobs, advantages, mask)

    finding = later_steps(target(wrong))
    assert finding.verdict == "fail"
    assert "not along ∇J of the moved policy: cosine -1.0000" in finding.message


def test_a_loss_without_old_log_probs_has_no_ratio():
    kept = dataclasses.replace(target(clipped), reads=frozenset({"logprobs", "advantages", "mask"}))
    assert later_steps(kept).verdict == "not applicable"
