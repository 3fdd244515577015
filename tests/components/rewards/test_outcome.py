"""Outcome rewards from a verifier."""

import math

import pytest

from creditgraph.components.rewards.outcome import Outcome
from creditgraph.pipeline.core.errors import AlignmentError


def _rule(text):
    if text == "hang":
        raise RuntimeError("timed out after 5 s")
    return {"good": 1.0, "half": 0.5, "nan": math.nan, "inf": math.inf}.get(text, 0.0)


def test_values_follow_the_verifier(toolbox):
    node = toolbox.start(Outcome)
    rewards = node.run(
        verifier=toolbox.verifier(_rule),
        trajectories=toolbox.trajectories(["good", "bad", "half", "good"]),
        prompts=toolbox.prompts(["p"]),
    ).rewards
    assert rewards.value.tolist() == [1.0, 0.0, 0.5, 1.0]
    assert rewards.correct.tolist() == [True, False, False, True]
    assert node.context.metrics == {"mean": 0.625, "correct": 0.5, "invalid": 0}
    assert node.context.rejected == []


def test_a_reward_that_is_no_number_is_zero_and_recorded(toolbox):
    node = toolbox.start(Outcome)
    rewards = node.run(
        verifier=toolbox.verifier(_rule),
        trajectories=toolbox.trajectories(["nan", "good", "inf", "hang"]),
        prompts=toolbox.prompts(["p"]),
    ).rewards
    assert rewards.value.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert rewards.correct.tolist() == [False, True, False, False]
    assert rewards.valid.tolist() == [False, True, False, False]
    assert rewards.detail == ["reward is nan", "", "reward is inf", "timed out after 5 s"]
    assert [r["reason"] for r in node.context.rejected] == ["reward is nan", "reward is inf", "timed out after 5 s"]
    assert node.context.metrics["invalid"] == 3


def test_no_rows(toolbox):
    node = toolbox.start(Outcome)
    assert (
        len(
            node.run(
                verifier=toolbox.verifier(_rule), trajectories=toolbox.trajectories([]), prompts=toolbox.prompts([])
            ).rewards
        )
        == 0
    )


def test_a_prompt_that_is_not_there_is_reported(toolbox):
    with pytest.raises(AlignmentError, match="no row for uid \\[100\\]"):
        toolbox.start(Outcome).run(
            verifier=toolbox.verifier(_rule),
            trajectories=toolbox.trajectories(["a"]),
            prompts=toolbox.prompts(["p"], first_uid=7),
        )
