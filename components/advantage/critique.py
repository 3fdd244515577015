"""Credit for groups of original chains and refinements (Critique-GRPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from components.advantage.group import (
    GROUP_METRICS,
    Normalize,
    group_advantage,
    group_metrics,
    training_mask,
    zero_groups,
)
from pipeline.core.component import Component, same_rows
from pipeline.core.metric import Metric
from pipeline.core.payloads import Credit, Rewards, Trajectories, check_aligned


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The same advantage on every token of a trajectory, and column "shaping"."""

    credit: Annotated[Credit, same_rows("trajectories")]


class CritiqueAdvantage(Component):
    """A = r − mean over originals and refinement; refinement tokens (`parent` ≥ 0) carry γ in column "shaping" for objective `shaped_probability`.

    The objective weighs them by f(p) = p/(p + γ), p the current probability of the token, in place of a ratio: rare
    tokens of a refinement get the larger gradient, and the prompt they were sampled from does not matter [S, and the
    authors' code]. Without a refinement this is Dr.GRPO's advantage.
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
        """of the rewards within their group, see advantage.group"""

        def __post_init__(self) -> None:
            if self.gamma <= 0:
                raise ValueError(
                    f"gamma is {self.gamma}; wanted a probability above 0 (0.1 in the paper): γ = 0 has no gradient."
                )

    config: Config

    def run(self, *, trajectories: Trajectories, rewards: Annotated[Rewards, same_rows("trajectories")]) -> Outputs:
        """Credits one batch."""
        check_aligned(trajectories, rewards)
        group, tokens = trajectories.group, trajectories.response_tokens
        advantage = group_advantage(rewards.value, group, rewards.valid, normalize=self.config.normalize)
        refined = trajectories.parent >= 0
        count = max(int(refined.sum()), 1)
        self.context.log(
            **group_metrics(rewards, group, zero_groups(advantage, group)),
            refined=float(refined.sum()),
            refined_advantage=float(advantage[refined].sum()) / count,
        )
        credit = Credit(
            uid=trajectories.uid,
            advantage=tokens.spread(advantage),
            mask=training_mask(tokens, trajectories.inherited),
            columns={"shaping": tokens.spread(torch.where(refined, self.config.gamma, 0.0))},
        )
        return Outputs(credit=credit)
