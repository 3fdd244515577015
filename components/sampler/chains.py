"""Groups of independent responses."""

from __future__ import annotations

from dataclasses import dataclass

from components.rollouts.requests import LENGTH_METRICS, GroupSettings, length_metrics, sample_groups
from pipeline.core.component import Component
from pipeline.core.handles import Policy
from pipeline.core.payloads import Prompts, Trajectories


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """`group_size` rows per prompt, prompt by prompt."""

    trajectories: Trajectories


class Chains(Component):
    """Samples `group_size` independent responses per prompt; the group of each is its prompt.

    A sample depends on (seed, node, iteration, prompt uid, place in the group) and on nothing else in the batch.
    """

    paper = "2402.03300"
    metrics = LENGTH_METRICS

    @dataclass(frozen=True, kw_only=True)
    class Config(GroupSettings):
        """Sampling settings and the group size."""

    config: Config

    def run(self, *, prompts: Prompts, policy: Policy) -> Outputs:
        """Samples the groups of all prompts in one request batch."""
        trajectories = sample_groups(self.context, policy, prompts, self.config.group_size, self.config.sampling())
        self.context.log(**length_metrics(trajectories))
        return Outputs(trajectories=trajectories)
