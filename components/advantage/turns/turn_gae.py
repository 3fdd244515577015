"""Generalised advantage estimation over the turns of an episode."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.advantage.explanations import decimal, signed
from creditgraph.components.advantage.turns.base import ValuedTurnAdvantage, start_values
from creditgraph.components.rollouts.turn_rows import by_episode, last_turns, returns_to_go
from creditgraph.pipeline.core.jagged import Jagged, takes_lists
from creditgraph.pipeline.core.payloads import Rewards, SegmentValues, Trajectories, Turns


@takes_lists
def turn_gae(reward: Jagged, value: Tensor, gamma: float, lam: float) -> Tensor:
    """A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ v(s_{t+1}) − v(s_t), v = 0 after the last turn; float64 [N].

    With γ = 1, exact values and states that determine what follows, E[Σ A ∇log π] = ∇J for every λ. λ = 1 gives
    Σ_{k ≥ t} r_k − v(s_t), unbiased for any v that does not depend on the episode's actions from t on.

    Args:
        reward: one row per episode.
        value: [N], at the start of each turn.
        gamma, lam: discount and trace per turn.
    """
    following = torch.cat([value[1:], value[:1]]).where(~last_turns(reward), 0.0)
    delta = reward.values + gamma * following - value
    return returns_to_go(reward.with_values(delta), gamma * lam).values


class TurnGAE(ValuedTurnAdvantage):
    """Credits each turn with generalised advantages over turns, from the values at the turns' starts.

    The value at a turn's start is the first value of its row: from a critic, or the mean of other episodes
    (value.state_mean). An episode with a value that is not finite gets zero credit.
    """

    paper = "1506.02438"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Discount and trace."""

        gamma: float = 1.0
        """γ, discount per turn"""
        lam: float = 1.0
        """λ over turns: 0 trusts the value of the next turn's start, 1 only the rewards that followed"""

        def __post_init__(self) -> None:
            if not 0 <= min(self.gamma, self.lam) <= max(self.gamma, self.lam) <= 1:
                raise ValueError(f"expected gamma and lam from 0 to 1, got {self.gamma} and {self.lam}.")

    config: Config

    def advantage(self, trajectories: Trajectories, turns: Turns, values: SegmentValues, rewards: Rewards) -> Tensor:
        """As `turn_gae`; of `rewards` only their validity counts, the rewards being those of the turns."""
        return turn_gae(by_episode(trajectories, turns), start_values(values), self.config.gamma, self.config.lam)

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The reward of each turn and the value at its start."""
        episodes = by_episode(inputs["trajectories"], inputs["turns"])
        value = start_values(inputs["values"])
        gamma, lam = self.config.gamma, self.config.lam

        def line(a: float, r: float, v: float) -> str:
            formula = f"A = r + {decimal(gamma)}·v(next) − v + {decimal(gamma * lam)}·A(next) = {signed(a)}"
            return f"{formula}\nr = {decimal(r)}, v = {decimal(v)}"

        advantage = turn_gae(episodes, value, gamma, lam)
        return self.explained(inputs["rewards"], line, advantage, episodes.values, value)
