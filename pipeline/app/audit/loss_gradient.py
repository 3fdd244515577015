"""The expected gradient of a loss against the true one, at equal policies and after a step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import numpy as np

from creditgraph.pipeline.app.audit.batch import Floats
from creditgraph.pipeline.app.audit.checks import Check, Finding, passed, skipped
from creditgraph.pipeline.app.audit.gradient import GROUP, Comparison, judged
from creditgraph.pipeline.app.audit.loss_target import LossInputs, LossTarget
from creditgraph.pipeline.app.audit.problems import PROBLEMS, Problem
from creditgraph.pipeline.app.audit.ratios import numeric_settings

AFTER_A_STEP = 0.99  # cosine: without a correction the direction is off by the size of the step, .08


def later_steps(target: LossTarget) -> Finding:
    """E[−∇ loss] over responses of the old policy, after the policy has moved inside the clip, against its own ∇J."""
    if "old_logprobs" not in target.reads:
        return skipped("takes no old log-probs")
    old = next(problem for problem in PROBLEMS if problem.name == "bandit")
    clip = min([float(target.settings[n]) for n in numeric_settings(target, "clip", "eps")], default=0.2)
    shift = 0.4 * min(clip, 0.2) * np.array([[0.5, -1.0, 0.5]])
    new = dataclasses.replace(old, logits=old.logits + shift)
    estimator = OfLoss(target=target, old=old)
    expected = np.sum([p * estimator.gradient(new, chosen) for p, chosen in old.groups(GROUP)], axis=0)
    comparison = Comparison(expected=expected, true=new.true_gradient(False), noise=0.0)
    numbers = (
        f"cosine {comparison.cosine:.4f}, scale {comparison.scale:.3g}, logits moved by up to {np.abs(shift).max():.2g}"
    )
    if comparison.cosine >= AFTER_A_STEP:
        return passed(numbers)
    example = {"expected": new.by_state(expected), "true": new.by_state(comparison.true)}
    message = f"the expected gradient is not along ∇J of the moved policy: {numbers}"
    return Finding(verdict="fail", message=message, example=example, size=1.0 - comparison.cosine)


@dataclass(frozen=True, kw_only=True)
class OfLoss:
    """g = −∇ loss with advantages R − mean R of the group.

    Attributes:
        target: the loss.
        old: the policy that sampled; None: the present one.
    """

    target: LossTarget
    old: Problem | None = None

    @property
    def reads(self) -> frozenset[str]:
        """Without rewards of turns: advantages are of the outcome."""
        return frozenset()

    def gradient(self, problem: Problem, chosen: tuple[int, ...]) -> Floats:
        """From one group."""
        batch = problem.batch(chosen)
        logprobs = _of_responses(problem, chosen, batch.mask.shape)
        old = logprobs if self.old is None else _of_responses(self.old, chosen, batch.mask.shape)
        centred = (batch.rewards - batch.rewards.mean()) * len(chosen) / (len(chosen) - 1)
        inputs = LossInputs(
            batch=batch,
            logprobs=logprobs,
            old_logprobs=old,
            reference_logprobs=logprobs,
            advantages=np.where(batch.mask, centred[:, None], 0.0),
        )
        _, by_token = self.target.value_and_gradient(inputs)
        scores = problem.scores()
        total = np.zeros_like(problem.logits)
        for row, response in enumerate(chosen):
            own = scores[response]
            total -= np.tensordot(by_token[row, : len(own)], own, axes=1)
        return total


def _of_responses(problem: Problem, chosen: tuple[int, ...], shape: tuple[int, ...]) -> Floats:
    """float64 [N, T]: log-probs of the tokens of these responses."""
    table = problem.logprobs()
    out = np.full(shape, -0.7)
    for row, response in enumerate(chosen):
        for t, decision in enumerate(problem.responses[response].decisions):
            if decision:
                out[row, t] = table[decision]
    return out


def expected_gradient(target: LossTarget, problem: Problem) -> Finding:
    """The check of one problem; a mean over the tokens of each row weighs rows by their length, which is a choice."""
    even = len(set(problem.lengths())) == 1
    others = {} if even else {"∇J with each response weighted by 1 / its length": problem.row_mean_gradient()}
    return judged(OfLoss(target=target), problem, others)


EXPECTED = tuple(
    Check(
        name=f"loss_{problem.name}",
        layer="loss",
        title=f"E[−∇ loss] is along ∇J: {problem.title}.",
        run=partial(expected_gradient, problem=problem),
    )
    for problem in PROBLEMS
    if problem.name in ("bandit", "chain", "lengths")
)
