"""How much a turn raises the likelihood of the reference answer, as its reward (IGPO)."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from creditgraph.components.advantage.explanations import signed
from creditgraph.components.advantage.group import group_advantage
from creditgraph.components.advantage.turns.base import (
    NormalizeSettings,
    ValuedTurnAdvantage,
    finite_episodes,
    start_values,
)
from creditgraph.components.rollouts.turn_rows import by_episode, last_turns, next_values, returns_to_go
from creditgraph.pipeline.core.jagged import Jagged, takes_lists
from creditgraph.pipeline.core.payloads import Rewards, SegmentValues, Trajectories, Turns


@takes_lists
def gains(value: Tensor, outcome: Tensor, episodes: Jagged) -> Tensor:
    """r_t = v(s_{t+1}) − v(s_t) for each turn but an episode's last, whose r is the episode's outcome; float64 [N].

    Args:
        value: float64 [N], at the start of each turn; the next turn's start includes what the environment answered.
        outcome: [N], the same on all turns of an episode.
        episodes: one row per episode.
    """
    return torch.where(last_turns(episodes), outcome.double(), next_values(value, episodes) - value)


class InformationGain(ValuedTurnAdvantage):
    """A_t = Σ_{k ≥ t} γ^(k−t) z_k, z being the turns' gains and the outcome, normalised within the group.

    A turn's gain is that of the likelihood of the reference answer (the geometric mean of its tokens' probabilities, as
    value.answer_likelihood scores it) from its start to the next one's; the last turn has the outcome instead.
    Source: 2510.14967; `joint` and `separate` are those of one of two released versions, second-hand. The other one
    centres the returns at each token position without a deviation, and is not built.

    With `log` a gain is that of the logarithm, and with γ = 0 a turn is credited with its own gain alone; read from a
    frozen reference that is TRACE (2607.13988), second-hand (a reader's notes): temporal differences of the reference's
    log-prob of the answer at tool calls. The rest of it is our reading.

    Bias: gains telescope, so with γ = 1 and no normalisation E[Σ A ∇log π] is the gradient of J + E[v(s_T)], v(s_T)
    being the likelihood at the start of the last turn: ∇J if that does not depend on the actions. Subtracting a mean m
    adds −m E[T]: with m > 0 shorter episodes are preferred.

    An episode with a value that is not finite gets zero credit.
    """

    paper = "2510.14967"

    @dataclass(frozen=True, kw_only=True)
    class Config(NormalizeSettings):
        """What a gain is, and what it is compared with."""

        compare: Literal["joint", "separate", "none"] = "joint"
        """normalise gains and outcomes of a group together, each on their own, or not at all"""
        gamma: float = 1.0
        """γ, discount per turn; 0 credits a turn with its own gain alone"""
        log: bool = False
        """a gain is that of the likelihood's logarithm"""

        def __post_init__(self) -> None:
            if not 0 <= self.gamma <= 1:
                raise ValueError(f"expected 0 ≤ gamma ≤ 1, got {self.gamma}.")

    config: Config

    def start_values(self, values: SegmentValues) -> Tensor:
        """The likelihoods, or their logarithms."""
        if not self.config.log:
            return start_values(values)
        logs = values.values.with_values(values.values.values.log()) if values.logs is None else values.logs
        return logs.values[logs.offsets[:-1]].double()

    def advantage(self, trajectories: Trajectories, turns: Turns, values: SegmentValues, rewards: Rewards) -> Tensor:
        """The discounted sums of the normalised gains and outcomes."""
        _, normalised = self._rewards(trajectories, turns, values, rewards)
        return returns_to_go(by_episode(trajectories, turns).with_values(normalised), self.config.gamma).values

    def _rewards(
        self, trajectories: Trajectories, turns: Turns, values: SegmentValues, rewards: Rewards
    ) -> tuple[Tensor, Tensor]:
        config = self.config
        episodes = by_episode(trajectories, turns)
        value = self.start_values(values)
        raw = gains(value, rewards.value, episodes)
        if config.compare == "none":
            return raw, raw
        group = trajectories.group
        if config.compare == "separate":
            group = torch.unique(group, return_inverse=True)[1] * 2 + last_turns(episodes)
        valid = rewards.valid & finite_episodes(value, episodes)
        return raw, group_advantage(raw, group, valid, normalize=config.normalize, eps=config.eps).double()

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The gain (or outcome) of each turn, and what it is after normalisation."""
        rewards: Rewards = inputs["rewards"]
        raw, normalised = self._rewards(inputs["trajectories"], inputs["turns"], inputs["values"], rewards)
        last = last_turns(by_episode(inputs["trajectories"], inputs["turns"]))

        def line(r: float, z: float, final: bool) -> str:
            what = "outcome" if final else "gain"
            return f"{what} {signed(r)}, normalised {signed(z)}; A adds those of the turns after it"

        return self.explained(rewards, line, raw, normalised, last)
