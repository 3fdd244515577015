"""Advantages that read well and run badly; `Fine` runs well."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated

import torch

from creditgraph.pipeline.core.component import Component, same_rows
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Rewards, Trajectories


@dataclass(frozen=True, kw_only=True)
class Out:
    credit: Annotated[Credit, same_rows("trajectories")]


class Fine(Component):
    """Credits every token with the reward."""

    def per_row(self, rewards: Rewards) -> torch.Tensor:
        return rewards.value

    def run(self, *, trajectories: Trajectories, rewards: Annotated[Rewards, same_rows("trajectories")]) -> Out:
        tokens = trajectories.response_tokens
        advantage = tokens.spread(self.per_row(rewards))
        mask = tokens.with_values(torch.ones_like(tokens.values, dtype=torch.bool))
        return Out(credit=Credit(uid=trajectories.uid, advantage=advantage, mask=mask))


class Crashes(Fine):
    """Divides by zero."""

    def per_row(self, rewards: Rewards) -> torch.Tensor:
        return rewards.value / (1 // (len(rewards) - len(rewards)))


class NaN(Fine):
    """Takes the logarithm of rewards, some of which are negative after the shift."""

    def per_row(self, rewards: Rewards) -> torch.Tensor:
        return torch.log(rewards.value - 1e9)


class Unseeded(Fine):
    """Draws from torch's generator."""

    def per_row(self, rewards: Rewards) -> torch.Tensor:
        return torch.randn(len(rewards))


class AlsoUnseeded(Fine):
    """Draws from Python's generator."""

    def per_row(self, rewards: Rewards) -> torch.Tensor:
        return rewards.value + random.random()


class RowTensors(Fine):
    """Returns one number per row where one per token is needed."""

    def run(self, *, trajectories: Trajectories, rewards: Annotated[Rewards, same_rows("trajectories")]) -> Out:
        return Out(credit=Credit(uid=trajectories.uid, advantage=rewards.value, mask=rewards.correct))


class ShortRows(Fine):
    """Returns Jagged columns with one value per row."""

    def run(self, *, trajectories: Trajectories, rewards: Annotated[Rewards, same_rows("trajectories")]) -> Out:
        one = torch.ones(len(rewards), dtype=torch.int64)
        advantage = Jagged.from_lengths(rewards.value, one)
        mask = Jagged.from_lengths(rewards.correct, one)
        return Out(credit=Credit(uid=trajectories.uid, advantage=advantage, mask=mask))


class FewerRows(Fine):
    """Drops the last row."""

    def run(self, *, trajectories: Trajectories, rewards: Annotated[Rewards, same_rows("trajectories")]) -> Out:
        return Out(credit=super().run(trajectories=trajectories, rewards=rewards).credit.select(torch.arange(3)))


class Nothing(Fine):
    """Forgets to return."""

    def run(self, *, trajectories: Trajectories, rewards: Annotated[Rewards, same_rows("trajectories")]) -> Out: ...


class NeedsSetting(Fine):
    """Has a setting without a default."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        strength: float
        """factor of the reward"""

    config: Config

    def per_row(self, rewards: Rewards) -> torch.Tensor:
        return rewards.value * self.config.strength
