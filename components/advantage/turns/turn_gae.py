"""Generalised advantage estimation over the turns of an episode."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from creditgraph.components.advantage.explanations import decimal, signed
from creditgraph.components.advantage.turns.base import ValuedTurnAdvantage, start_values
from creditgraph.components.rollouts.turn_rows import by_episode, turn_gae
from creditgraph.pipeline.core.payloads import Rewards, SegmentValues, Trajectories, Turns


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
