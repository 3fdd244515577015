"""Fresh chains: a group of independent responses per prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from components.rollouts.requests import LENGTH_METRICS, SamplingSettings, keyed_seeds, length_metrics, sample_fresh
from pipeline.core.component import Component
from pipeline.core.payloads import Policy, Prompts, Trajectories


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """`group_size` rows per prompt, prompt by prompt."""

    trajectories: Trajectories


class Chains(Component):
    """Samples `group_size` responses per prompt; the group of each is its prompt.

    A sample depends on (seed, node, iteration, prompt uid, place in the group) and on nothing else in the batch.
    """

    paper = "2402.03300"
    metrics = LENGTH_METRICS

    @dataclass(frozen=True, kw_only=True)
    class Config(SamplingSettings):
        """Sampling settings and the group size."""

        group_size: int = 8
        """responses per prompt"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.group_size < 1:
                raise ValueError(f"group_size is {self.group_size}; wanted at least 1.")

    config: Config

    def run(self, *, prompts: Prompts, policy: Policy) -> Outputs:
        """Samples the groups of all prompts in one request batch."""
        size = self.config.group_size
        rows = torch.arange(len(prompts)).repeat_interleave(size)
        seed = keyed_seeds(self.context.rng(), prompts.uid, 0, size).reshape(-1)
        trajectories = sample_fresh(policy, prompts, rows, seed, self.config.sampling(), self.context.uids(len(rows)))
        self.context.log(**length_metrics(trajectories))
        return Outputs(trajectories=trajectories)
