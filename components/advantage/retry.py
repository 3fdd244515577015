"""Credit for pairs of attempts: learn to improve, without unlearning the first attempt (SCoRe)."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from creditgraph.components.advantage.explanations import decimal, minus
from creditgraph.components.advantage.group import (
    GROUP_METRICS,
    Normalize,
    Outputs,
    group_advantage,
    group_explanation,
    group_metrics,
    trajectory_credit,
    zero_groups,
)
from creditgraph.pipeline.core.component import Component, same_rows
from creditgraph.pipeline.core.jagged import takes_lists
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Rewards, Trajectories, check_aligned


def first_of(trajectories: Trajectories) -> Tensor:
    """int64 [N]: the row of each second attempt's first attempt, −1 for first attempts (`parent` −1)."""
    first = torch.full_like(trajectories.uid, -1)
    second = trajectories.parent >= 0
    first[second] = trajectories.index_of(trajectories.parent[second])
    return first


@takes_lists
def improvement_reward(reward: Tensor, valid: Tensor, first: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """R(y2) + α (R(y2) − R(y1)) for second attempts and R(y1) for first ones, [N]; and which of them are valid.

    A second attempt whose first one could not be verified is invalid too.

    Args:
        reward: float [N].
        valid: bool [N].
        first: int64 [N], row of the first attempt, −1 for first attempts.
        alpha: weight of the improvement.
    """
    second = first >= 0
    # Row 0 instead of −1 for first attempts, whose value is not used.
    before = first.clamp(min=0)
    shaped = torch.where(second, reward + alpha * (reward - reward[before]), reward)
    return shaped, valid & (~second | valid[before])


class RetryAdvantage(Component):
    """Credits second attempts y2 with R(y2) in stage I, and with R(y2) + α (R(y2) − R(y1)) in stage II.

    Stage I is the first `stage_one_iterations` iterations of the run. In it, first attempts y1 have advantage 0, stay
    in the mask, and get only a strong KL term: column "kl_weight" multiplies the objective's `kl.coefficient` per
    token, by `first_kl_weight` on them and by 1 everywhere else (second-hand). In stage II they are credited with
    R(y1). Rewards are normalised within the group of their turn.

    The paper trains both attempts in stage II (second-hand); that each is credited with its own turn's reward, and that
    baselines are per turn, is our reading. Without a KL term at the learner stage I leaves first attempts untrained.
    α = 0 gives plain rewards.
    """

    paper = "2409.12917"
    metrics = (
        Metric("stage", "number", "1 or 2: the stage of training"),
        *GROUP_METRICS,
        Metric("first_correct", "share", "first attempts that are correct"),
        Metric("second_correct", "share", "second attempts that are correct"),
        Metric("turned_right", "share", "pairs that went from wrong to correct"),
        Metric("turned_wrong", "share", "pairs that went from correct to wrong"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Stages, improvement bonus, normalisation."""

        stage_one_iterations: int = 0
        """iterations of stage I at the start of the run; 0 is stage II alone"""
        alpha: float = 10.0
        """α, weight of the improvement R(y2) − R(y1) in stage II; 0 gives plain rewards"""
        first_kl_weight: float = 10.0
        """β₂/β₁: multiplies the learner's kl.coefficient on first attempts in stage I"""
        train_first: bool = True
        """credit first attempts with R(y1) in stage II; false leaves them to the KL term"""
        normalize: Normalize = "mean"
        """normalisation of rewards within their turn's group, see advantage.group; "std" divides out the scale of α"""
        eps: float = 1e-6
        """added to the standard deviation in `std`"""

        def __post_init__(self) -> None:
            if min(self.stage_one_iterations, self.alpha, self.first_kl_weight) < 0:
                raise ValueError(
                    "expected stage_one_iterations, alpha and first_kl_weight ≥ 0, got "
                    f"{self.stage_one_iterations}, {self.alpha} and {self.first_kl_weight}."
                )

    config: Config

    def run(self, *, trajectories: Trajectories, rewards: Annotated[Rewards, same_rows("trajectories")]) -> Outputs:
        """Credits one batch in the stage of the present iteration."""
        check_aligned(trajectories, rewards)
        settings = self.config
        group = trajectories.group
        stage_one = self.context.iteration < settings.stage_one_iterations
        first = first_of(trajectories)
        second = first >= 0
        shaped, valid = improvement_reward(rewards.value, rewards.valid, first, 0.0 if stage_one else settings.alpha)
        advantage = group_advantage(shaped, group, valid, normalize=settings.normalize, eps=settings.eps)
        if stage_one or not settings.train_first:
            advantage = torch.where(second, advantage, 0.0)
        weight = torch.where(second, 1.0, settings.first_kl_weight if stage_one else 1.0)
        self.context.log(
            stage=1.0 if stage_one else 2.0,
            **group_metrics(rewards.replace(value=shaped, valid=valid), group, zero_groups(advantage, group)),
            **turn_metrics(rewards, first),
        )
        return Outputs(credit=trajectory_credit(trajectories, advantage, kl_weight=weight))

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The reward of the turn with its improvement, then the formula of its group."""
        trajectories: Trajectories = inputs["trajectories"]
        rewards: Rewards = inputs["rewards"]
        settings = self.config
        stage_one = self.context.iteration < settings.stage_one_iterations
        alpha = 0.0 if stage_one else settings.alpha
        first = first_of(trajectories)
        shaped, valid = improvement_reward(rewards.value, rewards.valid, first, alpha)
        formulas = group_explanation(
            shaped,
            trajectories.group,
            valid,
            normalize=settings.normalize,
            eps=settings.eps,
            name="R",
            several="R of its group",
        )
        texts = []
        for i, before in enumerate(first.tolist()):
            own = float(rewards.value[i])
            if before < 0 and (stage_one or not settings.train_first):
                stage = f" in stage I, until iteration {settings.stage_one_iterations}" if stage_one else ""
                texts.append(f"a first attempt, which gets no credit of its own{stage}; only the KL term acts on it")
            elif before < 0:
                texts.append(f"a first attempt: R = r = {decimal(own)}\n{formulas[i]}")
            else:
                gain = minus(own, float(rewards.value[before]))
                value = f"{decimal(own)} + {decimal(alpha)}·({gain}) = {decimal(float(shaped[i]))}"
                texts.append(f"a second attempt: R = r2 + α (r2 − r1) = {value}\n{formulas[i]}")
        return texts


def turn_metrics(rewards: Rewards, first: Tensor) -> dict[str, float]:
    """Accuracy of both turns, and the shares of pairs that turn correct and wrong; over pairs with two verdicts."""
    second = (first >= 0) & rewards.valid & rewards.valid[first.clamp(min=0)]
    count = max(int(second.sum()), 1)
    after = rewards.correct[second]
    before = rewards.correct[first[second]]
    return {
        "first_correct": float(before.sum()) / count,
        "second_correct": float(after.sum()) / count,
        "turned_right": float((after & ~before).sum()) / count,
        "turned_wrong": float((before & ~after).sum()) / count,
    }
