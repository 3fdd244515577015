"""Localisation quality and correction rates."""

import pytest
import torch

from creditgraph.components.evaluator.resets import Resets, reset_metrics
from creditgraph.components.tasks import TASKS
from creditgraph.pipeline.core.errors import AlignmentError
from creditgraph.pipeline.core.payloads import StepErrors, Trajectories

CHAINS = TASKS["chains"]

PROBLEM = {
    "task": "chains",
    "template": "chains",
    "question": "7 s1 * 4 s2 + 3",
    "modulus": 13,
    "start": 7,
    "steps": [["*", 4], ["+", 3]],
}


def test_numbers_by_hand():
    # Failures: step 1 of true 2 (clean), 2 of 2 (clean and exact), 3 of 1 (erroneous). Two suffixes each.
    metrics = reset_metrics(
        step=torch.tensor([1, 2, 3]),
        count=torch.tensor([4, 4, 4]),
        correct=torch.tensor([True, True, False, True, False, False]),
        failure_row=torch.tensor([0, 0, 1, 1, 2, 2]),
        true_step=torch.tensor([2, 2, 1]),
    )
    assert metrics == {
        "failures": 3,
        "step_fraction": pytest.approx((0 + 1 / 4 + 2 / 4) / 3),
        "clean": pytest.approx(2 / 3),
        "exact": pytest.approx(1 / 3),
        "correction": 0.5,
        "corrected": pytest.approx(2 / 3),
        "correction_clean": 0.75,
        "corrected_clean": 1.0,
        "correction_erroneous": 0.0,
        "corrected_erroneous": 0.0,
    }


def test_without_oracle_only_what_is_known():
    metrics = reset_metrics(torch.tensor([2]), torch.tensor([3]), torch.tensor([True]), torch.tensor([0]), None)
    assert metrics.keys() == {"failures", "step_fraction", "correction", "corrected"}


def test_shares_of_nothing_are_left_out():
    empty = torch.zeros(0, dtype=torch.int64)
    assert reset_metrics(empty, empty, empty.bool(), empty, None) == {"failures": 0}
    all_clean = reset_metrics(torch.tensor([1]), torch.tensor([3]), empty.bool(), empty, torch.tensor([2]))
    assert all_clean == {"failures": 1, "step_fraction": 0, "clean": 1, "exact": 0}


def _family(toolbox):
    """One failure, localised at step 2 (right), two suffixes, and a base trajectory that only the rewards know."""
    failures = toolbox.trajectories(["s1 7 * 4 2 </thought>s2 2 + 3 6 \\boxed{ 6 } </thought>"])
    errors = StepErrors(uid=failures.uid, step=torch.tensor([2]), source=["boxed"])
    suffixes = toolbox.trajectories(["x", "y"], first_uid=2000, parent=failures.uid.repeat(2), group=[1000, 1000])
    base = toolbox.trajectories(["z"], first_uid=3000)
    return failures, errors, suffixes, Trajectories.concat([base, suffixes])


def test_the_component_looks_rewards_up_by_uid(toolbox):
    failures, errors, suffixes, everything = _family(toolbox)
    node = toolbox.start(Resets)
    node.tokenizer = toolbox.tokenizer()
    prompts = toolbox.prompts(["p"], metadata=[PROBLEM])
    report = node.run(
        prompts=prompts,
        failures=failures,
        errors=errors,
        trajectories=suffixes,
        rewards=toolbox.rewards(everything.uid, [0.0, 1.0, 0.0]),
    ).report
    assert report.metrics["exact"] == report.metrics["clean"] == 1
    assert report.metrics["correction_clean"] == 0.5
    assert report.metrics["step_fraction"] == 0.5
    assert node.context.metrics == report.metrics
    assert CHAINS.first_error(PROBLEM, ["s1 7 * 4 2 </thought>", "s2 2 + 3 6 \\boxed{ 6 } </thought>"]) == 2


def test_invalid_suffixes_do_not_count_and_tasks_without_oracle_say_less(toolbox):
    failures, errors, suffixes, everything = _family(toolbox)
    rewards = toolbox.rewards(everything.uid, [0.0, 1.0, 0.0], [True, True, False])
    report = (
        toolbox.start(Resets)
        .run(prompts=toolbox.prompts(["p"]), failures=failures, errors=errors, trajectories=suffixes, rewards=rewards)
        .report
    )
    assert report.metrics == {"failures": 1, "step_fraction": 0.5, "correction": 1, "corrected": 1}


def test_no_failures(toolbox):
    none = toolbox.trajectories([])
    errors = StepErrors(uid=none.uid, step=none.uid, source=[])
    report = (
        toolbox.start(Resets)
        .run(
            prompts=toolbox.prompts(["p"]),
            failures=none,
            errors=errors,
            trajectories=none,
            rewards=toolbox.rewards(torch.tensor([4]), [1.0]),
        )
        .report
    )
    assert report.metrics == {"failures": 0}


def test_rewards_that_miss_a_suffix_are_reported(toolbox):
    failures, errors, suffixes, _ = _family(toolbox)
    with pytest.raises(AlignmentError, match="no row for uid \\[2001\\]"):
        toolbox.start(Resets).run(
            prompts=toolbox.prompts(["p"]),
            failures=failures,
            errors=errors,
            trajectories=suffixes,
            rewards=toolbox.rewards(suffixes.uid[:1], [1.0]),
        )
