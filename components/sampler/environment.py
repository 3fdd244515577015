"""Episodes of a policy in an environment, one row per turn."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from creditgraph.components.rollouts.episodes import EpisodePlayer, EpisodeSettings
from creditgraph.components.rollouts.played import EPISODE_METRICS
from creditgraph.components.rollouts.requests import LENGTH_METRICS, MAX_GROUP, keyed_seeds, length_metrics
from creditgraph.pipeline.core.component import same_rows
from creditgraph.pipeline.core.handles import Environments, Policy
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Trajectories, Turns


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """One row per turn, episode by episode, prompt by prompt; which turn each is; and the prompts."""

    trajectories: Trajectories
    turns: Annotated[Turns, same_rows("trajectories")]
    prompts: Prompts


class EnvironmentSampler(EpisodePlayer):
    """Plays `group_size` episodes per prompt; each turn is a row that keeps the exact tokens before it as its prompt.

    An episode depends on (seed, node, iteration, prompt uid, place in the group) and on nothing else in the batch. An
    environment that hangs, raises, returns no text, a reward that is no number, or never ends costs its episode alone,
    as does a conversation that fills the model's context: its turns stay, with the reason in `Turns.fault`.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (*EPISODE_METRICS, *LENGTH_METRICS)

    @dataclass(frozen=True, kw_only=True)
    class Config(EpisodeSettings):
        """Sampling of a turn, limits of an episode, and the group size."""

        group_size: int = 8
        """episodes per prompt"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if not 1 <= self.group_size <= MAX_GROUP:
                raise ValueError(f"expected group_size of 1 to {MAX_GROUP:,}, got {self.group_size}.")

    config: Config

    def fresh(self, prompts: Prompts) -> tuple[Tensor, Tensor]:
        """The row of its prompt and the keyed seed of each episode, int64 [prompts · group_size]."""
        size = self.config.group_size
        seed = keyed_seeds(self.context.rng(), prompts.uid, 0, size).reshape(-1)
        return torch.arange(len(prompts)).repeat_interleave(size), seed

    @classmethod
    def shown_responses(cls, config: Any) -> int:
        """The turns before the last, and as many observations, taken to be no longer."""
        return 2 * int(config.max_turns) - 1 if config.history == "all" else 0

    def run(self, *, prompts: Prompts, policy: Policy, environments: Environments) -> Outputs:
        """Plays all episodes."""
        played = self.table(prompts, policy, environments).play(*self.fresh(prompts))
        self.context.log(**played.metrics(), **length_metrics(played.trajectories))
        return Outputs(trajectories=played.trajectories, turns=played.turns, prompts=prompts)
