"""Resets to the prefix before the first error."""

import pytest
import torch

from creditgraph.components.expander.reset import Reset, reset_length
from creditgraph.pipeline.core.errors import AlignmentError
from creditgraph.pipeline.core.handles import ThoughtLimits
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import StepErrors

THREE = "a</thought>b</thought>c</thought>"


def _errors(failures, steps):
    return StepErrors(uid=failures.uid, step=torch.tensor(steps, dtype=torch.int64), source=["uniform"] * len(steps))


def test_prefix_lengths():
    ends = Jagged.from_rows([[3, 5, 9]] * 5 + [[], [4]], torch.int32)
    # Step 1 → nothing; 2 → thought 1; 3 → thoughts 1 and 2; beyond the last → as for the last.
    assert reset_length(ends, torch.tensor([1, 2, 3, 9, 0, 2, 2])).tolist() == [0, 3, 5, 5, 0, 0, 0]


def test_suffixes_continue_the_exact_prefix(toolbox):
    failures = toolbox.trajectories([THREE, THREE])
    policy = toolbox.policy(lambda context, n: f"new{n}</thought>\\boxed{{1}}</thought>")
    node = toolbox.start(Reset, suffixes=2, thoughts=ThoughtLimits(max_thoughts=5), max_tokens=100)
    out = node.run(
        prompts=toolbox.prompts(["P"]), failures=failures, errors=_errors(failures, [3, 1]), policy=policy
    ).trajectories
    assert out.text[:2] == [f"a</thought>b</thought>new{n}</thought>\\boxed{{1}}</thought>" for n in (0, 1)]
    assert out.text[2:] == [f"new{n}</thought>\\boxed{{1}}</thought>" for n in (0, 1)]
    assert out.response_tokens.row(0)[:22].tolist() == failures.response_tokens.row(0)[:22].tolist()
    assert out.inherited.tolist() == [22, 22, 0, 0]
    assert out.parent.tolist() == out.group.tolist() == [1000, 1000, 1001, 1001]
    assert out.prompt_uid.tolist() == [100] * 4
    assert out.thought_ends.row(0).tolist() == [11, 22, 36, 55]
    assert out.finish_reason == ["final"] * 4
    assert len(out.uid.unique()) == 4
    request = policy.calls[0]
    assert request.max_thoughts.tolist() == [3, 3, 5, 5]
    assert request.max_tokens.tolist() == [78, 78, 100, 100]
    assert len(request.seed.unique()) == 4
    metrics = node.context.metrics
    assert metrics["inherited_tokens"] == 44
    assert metrics["prefix_share"] == pytest.approx(22 / 33 / 2)
    assert metrics["empty_prefix_share"] == 0.5
    assert metrics["sampled_tokens"] == 4 * 33


def test_engine_numbers_of_the_prefix_are_the_parents(toolbox):
    failures = toolbox.trajectories(["xx", THREE])
    policy = toolbox.policy(lambda context, n: "q")
    out = (
        toolbox.start(Reset, suffixes=1)
        .run(prompts=toolbox.prompts(["P"]), failures=failures, errors=_errors(failures, [1, 2]), policy=policy)
        .trajectories
    )
    assert torch.equal(out.engine_logprobs.row(1)[:11], failures.engine_logprobs.row(1)[:11])
    assert torch.equal(out.entropies.row(1)[:11], failures.entropies.row(1)[:11])
    assert len(out.engine_logprobs.row(1)) == 12


def test_no_failures(toolbox):
    failures = toolbox.trajectories([])
    policy = toolbox.policy(lambda context, n: "q")
    node = toolbox.start(Reset)
    assert (
        len(
            node.run(
                prompts=toolbox.prompts(["P"]), failures=failures, errors=_errors(failures, []), policy=policy
            ).trajectories
        )
        == 0
    )
    assert policy.calls == []
    assert node.context.metrics["sampled_tokens"] == 0


def test_errors_of_other_failures_are_refused(toolbox):
    failures = toolbox.trajectories([THREE])
    other = StepErrors(uid=torch.tensor([5]), step=torch.tensor([1]), source=["uniform"])
    with pytest.raises(AlignmentError, match="describe different populations"):
        toolbox.start(Reset).run(
            prompts=toolbox.prompts(["P"]), failures=failures, errors=other, policy=toolbox.policy(lambda c, n: "q")
        )


def test_impossible_settings_are_reported():
    with pytest.raises(ValueError, match="expected suffixes ≥ 1, got 0"):
        Reset.Config(suffixes=0)
