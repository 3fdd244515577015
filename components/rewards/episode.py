"""Rewards of episodes: what an environment gave for all turns together."""

from dataclasses import dataclass
from typing import Annotated

import torch

from creditgraph.components.rollouts.played import FAULTS
from creditgraph.components.rollouts.turn_rows import episode_returns
from creditgraph.pipeline.core.component import Component, Count, same_rows
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Rewards, Turns


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """One reward per turn, the same for all turns of an episode."""

    rewards: Annotated[Rewards, same_rows("turns")]


class EpisodeRewards(Component):
    """Gives each turn the return of its episode: the sum of the rewards of all its turns.

    An episode with a fault is invalid (zero credit), since its return is not that of the policy. Kinds of faults in
    `keep` count as an end like any other.
    """

    metrics = (
        Metric("mean", "reward", "return of an episode, mean over valid ones"),
        Metric("correct", "share", "episodes whose return is `threshold` or more"),
        Metric("invalid", "episodes", "episodes that a fault cut off; they get no credit"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """What counts as correct, and which faults do not matter."""

        threshold: float = 1.0
        """returns from here on count as correct"""
        keep: tuple[str, ...] = ()
        """kinds of faults, such as turns and context, after which the return so far counts"""

        def __post_init__(self) -> None:
            unknown = [kind for kind in self.keep if kind not in FAULTS]
            if unknown:
                raise ValueError(f"keep: expected kinds of {', '.join(FAULTS)}, got {', '.join(unknown)}.")

    config: Config

    def run(self, *, turns: Turns) -> Outputs:
        """Sums the rewards of each episode."""
        value, first = episode_returns(turns)
        valid = torch.tensor([not f or f.partition(":")[0] in self.config.keep for f in turns.fault], dtype=torch.bool)
        # Sums of decimals such as ten times 0.1 end just below their value.
        correct = valid & (value >= self.config.threshold - 1e-6)
        count = max(int(first.sum()), 1)
        self.context.log(
            mean=float(value[first & valid].sum()) / max(int((first & valid).sum()), 1),
            correct=float((first & correct).sum()) / count,
            invalid=Count((first & ~valid).sum()),
        )
        return Outputs(
            rewards=Rewards(
                uid=turns.uid,
                value=torch.where(valid, value, 0.0).float(),
                correct=correct,
                valid=valid,
                detail=list(turns.fault),
            )
        )
