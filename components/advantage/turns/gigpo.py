"""Episodes compared within their group, and turns compared with those from the same state (GiGPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from creditgraph.components.advantage.explanations import decimal, signed
from creditgraph.components.advantage.group import Outputs, group_advantage
from creditgraph.components.advantage.turns.base import (
    TURN_METRICS,
    NormalizeSettings,
    TurnAdvantage,
    outcome_advantage,
)
from creditgraph.components.rollouts.turn_rows import by_episode, returns_to_go, state_groups
from creditgraph.pipeline.core.component import same_rows
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Rewards, Trajectories, Turns


class _Parts(NamedTuple):
    """Of each turn [N]: the episode's advantage, the step's, R_t, and how many turns start in its state."""

    episode: Tensor
    step: Tensor
    returns: Tensor
    peers: Tensor


class GiGPO(TurnAdvantage):
    """A = A_episode + ω A_step; A_step compares R_t = Σ_{k ≥ t} γ^(k−t) r_k among turns from the same state of a group.

    Both are (x − mean)/std or x − mean. The group's turns with equal `Turns.state` are one step group; a turn whose
    state is unknown, or that is alone in its state, has A_step = 0.

    Bias, with `mean`, γ = 1, states that determine what follows and at most one visit per episode: the gradient's part
    for state s is that of ∇J times (N − 1) + ω (N − (1 − (1 − p)^N) / p), p being the probability that an episode
    visits s and N the group's episodes. So rare states count less, and many episodes make it proportional to ∇J.
    γ < 1 prefers earlier rewards; a state visited again compares a turn with its own future.

    With `std` both deviations divide by n − 1, as the release's forks do (second-hand); `unbiased: false` divides by n,
    which makes the advantages of a pair ±1 instead of ±.707.
    Over episodes each counts once, as in the paper (the release's default counts an episode once per turn).
    """

    paper = "2505.10978"
    metrics: ClassVar[tuple[Metric, ...]] = (
        *TURN_METRICS,
        Metric("state_group_size", "turns", "turns of a group that start in the same state, mean over turns"),
        Metric(
            "alone_share",
            "share",
            "turns whose state no other turn of their group has; no step advantage",
            alarm="no turn shared its state with another of its group, so the method was GRPO over episodes. The "
            "environment's `state` is missing or too fine (docs/turns.md).",
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(NormalizeSettings):
        """The weight of the comparison by states, and the discount."""

        omega: float = 1.0
        """ω, weight of the step advantage; 0 is GRPO over episodes"""
        gamma: float = 0.95
        """γ, discount per turn in the returns that are compared within a state"""
        unbiased: bool = True
        """divide by n − 1 in `std`"""

        def __post_init__(self) -> None:
            if not 0 <= self.gamma <= 1:
                raise ValueError(f"expected 0 ≤ gamma ≤ 1, got {self.gamma}.")

    config: Config

    @classmethod
    def needs_of(cls, config: Any) -> frozenset[str]:
        """States, unless their comparison is off."""
        return frozenset({"states"} if config.omega else ())

    def run(
        self,
        *,
        trajectories: Trajectories,
        turns: Annotated[Turns, same_rows("trajectories")],
        rewards: Annotated[Rewards, same_rows("trajectories")],
    ) -> Outputs:
        """Credits each turn; `rewards` are those of the episodes, the same on all turns of one."""
        episodes = self.episodes(trajectories, turns, rewards)
        parts = self._parts(trajectories, turns, rewards)
        count = max(len(turns), 1)
        self.context.log(
            state_group_size=float(parts.peers.sum()) / count, alone_share=float((parts.peers <= 1).sum()) / count
        )
        return self.outputs(trajectories, episodes, parts.episode + self.config.omega * parts.step)

    def _parts(self, trajectories: Trajectories, turns: Turns, rewards: Rewards) -> _Parts:
        config = self.config
        how: dict[str, Any] = {"normalize": config.normalize, "eps": config.eps, "unbiased": config.unbiased}
        episodes = by_episode(trajectories, turns)
        group, valid = trajectories.group, rewards.valid
        returns = returns_to_go(episodes, config.gamma).values
        states = state_groups(group, turns.state)
        _, place, peers = torch.unique(states, return_inverse=True, return_counts=True)
        return _Parts(
            outcome_advantage(rewards.value, group, valid, episodes, **how),
            group_advantage(returns, states, valid, **how),
            returns,
            peers[place],
        )

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """Both parts of each turn's advantage."""
        rewards: Rewards = inputs["rewards"]
        parts = self._parts(inputs["trajectories"], inputs["turns"], rewards)
        total = parts.episode + self.config.omega * parts.step

        def line(e: float, s: float, r: float, n: int, a: float) -> str:
            head = f"episode {signed(e)} + {decimal(self.config.omega)}·(step {signed(s)}) = {signed(a)}"
            return f"{head}\nreturn from here {decimal(r)}; {n} turns of the group start in this state"

        return self.explained(rewards, line, *parts, total)
