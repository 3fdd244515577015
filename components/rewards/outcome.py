"""Outcome rewards: a verifier applied to trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from pipeline.core.component import Component, Count, same_rows
from pipeline.core.metric import Metric
from pipeline.core.payloads import Prompts, Rewards, Trajectories, Verifier, check_aligned


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """One reward per trajectory."""

    rewards: Annotated[Rewards, same_rows("trajectories")]


class Outcome(Component):
    """r_i = the verifier's verdict on trajectory i.

    A reward that is NaN or infinite becomes 0 and `valid=False` with the reason, so the trajectory gets no credit.
    Every trajectory that could not be verified is written to rejected.jsonl.
    """

    metrics = (
        Metric("mean", "reward", "mean reward of a trajectory, invalid ones as 0"),
        Metric("correct", "share", "trajectories judged right"),
        Metric("invalid", "rows", "trajectories without a usable verdict; they get no credit"),
    )

    def run(self, *, verifier: Verifier, trajectories: Trajectories, prompts: Prompts) -> Outputs:
        """Judges every row; never fails for a bad one."""
        rewards = finite_rewards(verifier.verify(prompts, trajectories))
        check_aligned(trajectories, rewards)
        for row in (~rewards.valid).nonzero(as_tuple=True)[0].tolist():
            self.context.reject(
                {"trajectory": int(rewards.uid[row]), "prompt": int(trajectories.prompt_uid[row])}, rewards.detail[row]
            )
        count, invalid = max(len(rewards), 1), int((~rewards.valid).sum())
        self.context.log(
            mean=float(rewards.value.sum()) / count,
            correct=float(rewards.correct.sum()) / count,
            invalid=Count(invalid),
        )
        return Outputs(rewards=rewards)


def finite_rewards(rewards: Rewards) -> Rewards:
    """Rows with a NaN or infinite value become value 0, incorrect and invalid, with the reason in `detail`."""
    bad = ~torch.isfinite(rewards.value)
    if not bool(bad.any()):
        return rewards
    detail = [
        f"reward is {value}" + (f" ({text})" if text else "") if is_bad else text
        for value, is_bad, text in zip(rewards.value.tolist(), bad.tolist(), rewards.detail, strict=True)
    ]
    return rewards.replace(
        value=rewards.value.masked_fill(bad, 0.0),
        correct=rewards.correct & ~bad,
        valid=rewards.valid & ~bad,
        detail=detail,
    )
