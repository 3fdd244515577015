"""Groups of independent responses."""

from dataclasses import dataclass

from creditgraph.components.rollouts.carry import CARRY_METRICS, Carrier, CarrySettings
from creditgraph.components.rollouts.requests import LENGTH_METRICS, GroupSettings, sample_groups
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.payloads import Prompts, Trajectories


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """`group_size` rows per prompt, prompt by prompt, and the prompts; some may have begun in earlier iterations."""

    trajectories: Trajectories
    prompts: Prompts


class Chains(Carrier):
    """Samples `group_size` independent responses per prompt; the group of each is its prompt.

    A sample depends on (seed, node, iteration, prompt uid, place in the group) and on nothing else in the batch. With
    `carry.tokens` (2501.12599), a group with an unfinished rollout waits with all its rollouts, and continues in the
    next iteration with the weights of that iteration. Every iteration begins the groups of all its prompts and returns
    the complete ones, so batches differ in size; their mean size is the batch of prompts. `token_versions` is then the
    version that sampled each token, `policy_version` the oldest of a row. What is in flight is part of the checkpoint.
    """

    paper = "2402.03300"
    metrics = (*LENGTH_METRICS, *CARRY_METRICS)

    @dataclass(frozen=True, kw_only=True)
    class Config(CarrySettings, GroupSettings):
        """Sampling settings, the group size, and the long tail."""

    config: Config

    def run(self, *, prompts: Prompts, policy: Policy) -> Outputs:
        """Samples the groups of all prompts in one request batch."""
        carried = self.begin(prompts, policy)
        settings = self.config
        rows = sample_groups(
            self.context,
            carried.policy,
            carried.prompts,
            settings.group_size,
            settings.sampling(),
            stream=carried.stream,
        )
        trajectories, complete = self.end(carried, rows)
        return Outputs(trajectories=trajectories, prompts=complete)
