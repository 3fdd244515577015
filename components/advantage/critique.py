"""Credit for groups of original responses and refinements (Critique-GRPO)."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch

from creditgraph.components.advantage.explanations import decimal
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
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Rewards, Trajectories, check_aligned


class CritiqueAdvantage(Component):
    """Credits originals and refinements with r − mean of their group, and marks refinement tokens for the objective.

    Column "shaping" is γ on the tokens of refinements (`parent` ≥ 0) and 0 elsewhere. Objective `shaped_probability`
    weighs them by f(p) = p/(p + γ), p being the current probability of the token, instead of a ratio: rare tokens of a
    refinement get the larger gradient, and the prompt they were sampled from does not matter (second-hand, and the
    authors' code). Without a refinement this is Dr.GRPO's advantage.
    """

    paper = "2506.03106"
    metrics = (
        *GROUP_METRICS,
        Metric("refined", "rows", "refinements among the trajectories"),
        Metric("refined_advantage", "reward", "mean advantage of a refinement"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Normalisation and the shape of f."""

        gamma: float = 0.1
        """γ of f(p) = p/(p + γ) on refinement tokens; larger is closer to p itself, scaled by 1/γ"""
        normalize: Normalize = "mean"
        """normalisation of the rewards within their group, see advantage.group"""

        def __post_init__(self) -> None:
            if self.gamma <= 0:
                raise ValueError(f"expected gamma > 0 (γ = 0 has no gradient), got {self.gamma}.")

    config: Config

    def run(self, *, trajectories: Trajectories, rewards: Annotated[Rewards, same_rows("trajectories")]) -> Outputs:
        """Credits one batch."""
        check_aligned(trajectories, rewards)
        group = trajectories.group
        advantage = group_advantage(rewards.value, group, rewards.valid, normalize=self.config.normalize)
        refined = trajectories.parent >= 0
        self.context.log(
            **group_metrics(rewards, group, zero_groups(advantage, group)),
            refined=float(refined.sum()),
            refined_advantage=float(advantage[refined].sum()) / max(int(refined.sum()), 1),
        )
        # A column and not an advantage, because the objective decides how to use it.
        shaping = torch.where(refined, self.config.gamma, 0.0)
        return Outputs(credit=trajectory_credit(trajectories, advantage, shaping=shaping))

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The formula of the group with its numbers; refinements name the objective's weight."""
        trajectories: Trajectories = inputs["trajectories"]
        rewards: Rewards = inputs["rewards"]
        texts = group_explanation(rewards.value, trajectories.group, rewards.valid, normalize=self.config.normalize)
        weight = f"\na refinement: the objective weighs its tokens by p/(p + {decimal(self.config.gamma)})"
        return [t + (weight if p >= 0 else "") for t, p in zip(texts, trajectories.parent.tolist(), strict=True)]
