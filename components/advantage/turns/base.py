"""What advantages over turns share: the outcome of each episode against its group, and credit per turn."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from creditgraph.components.advantage.explanations import INVALID
from creditgraph.components.advantage.group import Normalize, Outputs, group_advantage, trajectory_credit
from creditgraph.components.rollouts.turn_rows import by_episode, check_episode_rewards
from creditgraph.pipeline.core.component import Component, Count, same_rows
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Rewards, SegmentValues, Trajectories, Turns, check_aligned

TURN_METRICS = (
    Metric("episodes", "episodes", "episodes whose turns are credited"),
    Metric("advantage_size", "reward", "mean absolute advantage of a turn"),
    Metric("zero_share", "share", "turns whose advantage is 0"),
)
UNVALUED = Metric("unvalued", "episodes", "episodes with a value that is not finite, which get no credit")


@dataclass(frozen=True, kw_only=True)
class NormalizeSettings:
    """How numbers are compared within a group."""

    normalize: Normalize = "std"
    """std: (x − mean)/(std + eps); mean: x − mean; std_exact: population std without eps, 0 where it is 0"""
    eps: float = 1e-6
    """added to the standard deviation in `std`"""


def outcome_advantage(
    outcome: Tensor,
    group: Tensor,
    valid: Tensor,
    episodes: Jagged,
    normalize: Normalize,
    eps: float,
    unbiased: bool = False,
) -> Tensor:
    """The advantage of each turn's episode against the episodes of its group, float32 [N]; every episode counts once.

    With `mean`, E[Σ A ∇log π] over a group of N episodes is (N − 1) ∇J. Over rows instead of episodes the mean would
    weigh an episode by its number of turns, which depends on the actions.

    Args:
        outcome, valid: float and bool [N], the same on all turns of an episode.
        group: int64 [N].
        episodes: one row per episode, see `by_episode`.
        normalize, eps, unbiased: as in `group_advantage`.
    """
    first = episodes.offsets[:-1]
    per_episode = group_advantage(
        outcome[first], group[first], valid[first], normalize=normalize, unbiased=unbiased, eps=eps
    )
    return per_episode[episodes.row_ids]


def start_values(values: SegmentValues) -> Tensor:
    """float64 [N]: the value at the start of each row."""
    return values.values.values[values.values.offsets[:-1]].double()


def finite_episodes(value: Tensor, episodes: Jagged) -> Tensor:
    """bool [N]: whether the values [N] at the starts of all turns of the episode are finite."""
    return (episodes.with_values(~torch.isfinite(value)).sum() == 0)[episodes.row_ids]


class TurnAdvantage(Component):
    """Base of advantages with one number per turn, on all of its tokens. Invalid episodes get zero credit."""

    metrics: ClassVar[tuple[Metric, ...]] = TURN_METRICS

    def episodes(self, trajectories: Trajectories, turns: Turns, rewards: Rewards) -> Jagged:
        """Rewards of the turns by episode; raises AlignmentError where the inputs do not belong together."""
        check_aligned(trajectories, rewards)
        episodes = by_episode(trajectories, turns)
        check_episode_rewards(rewards, turns)
        return episodes

    def explained(self, rewards: Rewards, line: Callable[..., str], *columns: Tensor) -> list[str]:
        """`line` of the entries of each row of the columns [N]; rows of invalid episodes say so."""
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [line(*row) if ok else INVALID for row, ok in zip(rows, rewards.valid.tolist(), strict=True)]

    def outputs(self, trajectories: Trajectories, episodes: Jagged, advantage: Tensor) -> Outputs:
        """Logs and spreads one advantage per turn, float [N]."""
        size = advantage.abs()
        self.context.log(
            episodes=Count(len(episodes)),
            advantage_size=float(size.mean()) if len(size) else 0.0,
            zero_share=float((size == 0).double().mean()) if len(size) else 0.0,
        )
        return Outputs(credit=trajectory_credit(trajectories, advantage.float()))


class ValuedTurnAdvantage(TurnAdvantage):
    """Base of advantages from the values at the starts of turns; an episode without finite ones gets zero credit."""

    metrics: ClassVar[tuple[Metric, ...]] = (*TURN_METRICS, UNVALUED)

    def run(
        self,
        *,
        trajectories: Trajectories,
        turns: Annotated[Turns, same_rows("trajectories")],
        values: Annotated[SegmentValues, same_rows("trajectories")],
        rewards: Annotated[Rewards, same_rows("trajectories")],
    ) -> Outputs:
        """Credits each turn; `rewards` are those of the episodes, the same on all turns of one."""
        check_aligned(trajectories, values)
        episodes = self.episodes(trajectories, turns, rewards)
        valid = rewards.valid & self._valued(trajectories, episodes, self.start_values(values))
        advantage = self.advantage(trajectories, turns, values, rewards)
        return self.outputs(trajectories, episodes, advantage.where(valid, 0.0))

    def start_values(self, values: SegmentValues) -> Tensor:
        """What is compared of the value at the start of each turn, float64 [N]."""
        return start_values(values)

    def advantage(self, trajectories: Trajectories, turns: Turns, values: SegmentValues, rewards: Rewards) -> Tensor:
        """The advantage of each turn, float [N]; of episodes without credit any number."""
        raise NotImplementedError

    def _valued(self, trajectories: Trajectories, episodes: Jagged, value: Tensor) -> Tensor:
        """As `finite_episodes`; other episodes are counted and rejected by the uid of their first turn."""
        finite = finite_episodes(value, episodes)
        lost = trajectories.uid[episodes.offsets[:-1]][~finite[episodes.offsets[:-1]]].tolist()
        for uid in lost:
            self.context.reject({"uid": uid}, "a value at the start of a turn of the episode is not finite")
        self.context.log(unvalued=Count(len(lost)))
        return finite
