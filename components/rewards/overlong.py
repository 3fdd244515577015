"""Soft punishment of overlong responses (DAPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from components.rollouts.rewards import overlong_punishment
from pipeline.core.component import Component, same_rows
from pipeline.core.metric import Metric
from pipeline.core.payloads import Rewards, Trajectories, check_aligned


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The rewards with the punishment added."""

    rewards: Annotated[Rewards, same_rows("trajectories")]


class Overlong(Component):
    """Adds to each valid reward a punishment of overlong responses, from 0 down to −1; `correct` stays as it is."""

    paper = "2503.14476"
    metrics = (
        Metric("punished_share", "share", "trajectories that are punished"),
        Metric("punishment", "reward", "mean punishment of a trajectory, 0 or less"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Lengths in response tokens."""

        max_length: int = 20480
        """tokens; a longer response gets the full −1. Set it to the sampler's `max_tokens`"""
        buffer: int = 4096
        """tokens before `max_length` over which the punishment grows from 0 to −1"""

        def __post_init__(self) -> None:
            if not 0 <= self.buffer <= self.max_length:
                raise ValueError(f"expected 0 ≤ buffer ≤ max_length ({self.max_length}), got {self.buffer}.")

    config: Config

    def run(self, *, trajectories: Trajectories, rewards: Annotated[Rewards, same_rows("trajectories")]) -> Outputs:
        """Punishes every row."""
        check_aligned(trajectories, rewards)
        added = overlong_punishment(trajectories.response_tokens.lengths, self.config.max_length, self.config.buffer)
        added = added.masked_fill(~rewards.valid, 0.0)
        count = max(len(rewards), 1)
        self.context.log(punished_share=float((added < 0).sum()) / count, punishment=float(added.sum()) / count)
        return Outputs(rewards=rewards.replace(value=rewards.value + added))
