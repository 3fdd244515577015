"""The value of a turn's start as the mean return of other episodes from the same state."""

from __future__ import annotations

from typing import Annotated, Any

import torch

from creditgraph.components.rollouts.turn_rows import (
    by_episode,
    mean_of_others,
    next_values,
    returns_to_go,
    state_groups,
)
from creditgraph.components.value.boundaries import VALUE_METRICS, Outputs
from creditgraph.pipeline.core.component import Component, same_rows
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Rewards, SegmentValues, Trajectories, Turns, check_aligned


class StateMean(Component):
    """v̂(s) = mean of Σ_{k ≥ t} r_k over the turns of the group's other episodes that start in the same state.

    Where no other episode was in the state, or it is unknown, the mean of their whole returns, without what the own
    episode has received before; 0 without another valid episode. No value depends on the own actions from s on, so
    advantages Σ_{k ≥ t} r_k − v̂(s_t) are unbiased. The second value of a row is that of the next turn's start, 0 after
    the last turn.
    """

    metrics = (
        *VALUE_METRICS,
        Metric(
            "fallback_share",
            "share",
            "turns whose state no other episode visited; they have the group's mean",
            alarm="no state was visited twice, so every value was the group's mean. The environment's `state` is "
            "missing or too fine (docs/turns.md).",
        ),
    )

    @classmethod
    def needs_of(cls, config: Any) -> frozenset[str]:
        """States."""
        return frozenset({"states"})

    def run(
        self,
        *,
        trajectories: Trajectories,
        turns: Annotated[Turns, same_rows("trajectories")],
        rewards: Annotated[Rewards, same_rows("trajectories")],
    ) -> Outputs:
        """Estimates the value at both ends of each turn; invalid episodes count for none."""
        check_aligned(trajectories, rewards)
        episodes = by_episode(trajectories, turns)
        returns = returns_to_go(episodes).values
        own, valid, group = episodes.row_ids, rewards.valid, trajectories.group
        states = state_groups(group, turns.state)
        each = torch.ones_like(returns)
        mean, others = mean_of_others(returns, each, states, valid, own)
        first = valid & (episodes.positions == 0)
        whole, episodes_left = mean_of_others(returns, each, group, first, own)
        received = episodes.cumsum().values - episodes.values
        value = torch.where(others > 0, mean, torch.where(episodes_left > 0, whole - received, 0.0))
        both = torch.stack([value, next_values(value, episodes)], 1).float()
        self.context.log(
            mean=float(both.mean()) if len(both) else 0.0,
            boundaries=both.numel(),
            fallback_share=float((others == 0).sum()) / max(len(both), 1),
        )
        place = Jagged.from_lengths(both.reshape(-1), torch.full((len(both),), 2))
        return Outputs(values=SegmentValues(uid=trajectories.uid, values=place))
