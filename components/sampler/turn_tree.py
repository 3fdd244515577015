"""Trees of episodes over turns: new episodes from the starts of given turns of those played before."""

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from creditgraph.components.rollouts.played import EPISODE_METRICS, Played
from creditgraph.components.rollouts.requests import LENGTH_METRICS, MAX_GROUP, length_metrics
from creditgraph.components.rollouts.turn_rows import recorded_turns, rows_before
from creditgraph.components.sampler.environment import EnvironmentSampler, Outputs
from creditgraph.pipeline.core.component import Count
from creditgraph.pipeline.core.handles import Environments, Policy
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Trajectories, Turns
from creditgraph.pipeline.core.streams import Stream


class TurnTree(EnvironmentSampler):
    """Plays `group_size` episodes per prompt, and branches those that go on at turn `every`, at turn 2 `every`, …

    At the k-th of these turns every episode that has it, branches included, gets `branching[k] − 1` new ones from its
    start, where a fresh environment answers the recorded turns before it again, as in expander.turn_reset. A turn is
    one row, in the episode that sampled it: the first row of a branch has the row of the turn before it as `parent`,
    and its `turn` counts on. A fault costs its episode alone; turns that branches share with it stay. The metric
    `return` is that of the first `group_size` episodes, as branches are more where episodes are long.

    Source: 2509.21240 (trees over an agent's turns, compared within each tree and across those of a prompt). It expands
    turns drawn from those an episode has, second-hand; turns given beforehand, as the segments of 2505.23564, are our
    reading: a draw that depends on how long an episode became makes credit biased.
    """

    paper = "2509.21240"
    metrics: ClassVar[tuple[Metric, ...]] = (
        *EPISODE_METRICS,
        *LENGTH_METRICS,
        Metric("branches", "episodes", "episodes that begin at a turn of another one"),
        Metric("repeated_turns", "turns", "recorded turns that environments answered again"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(EnvironmentSampler.Config):
        """Settings of the first episodes, and of their branches."""

        branching: tuple[int, ...] = (2,)
        """ways in which an episode goes on at turn `every`, 2 `every`, …; group_size is the number at its beginning"""
        every: int = 1
        """turns between two places of branching"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if min(self.branching, default=1) < 1 or self.every < 1:
                raise ValueError(f"expected branching and every ≥ 1, got {list(self.branching)} and {self.every}.")
            if self.group_size * prod(self.branching) > MAX_GROUP:
                raise ValueError(f"expected group_size · the product of branching of at most {MAX_GROUP:,}.")

    config: Config

    def run(self, *, prompts: Prompts, policy: Policy, environments: Environments) -> Outputs:
        """Plays all episodes of a level of the trees at once."""
        rows, seed = self.fresh(prompts)
        first = self.table(prompts, policy, environments).play(rows, seed)
        trajectories, turns, seeds = first.trajectories, first.turns, seed[first.entry]
        faults, branches, repeated = first.faults, 0, 0
        for level, width in enumerate(self.config.branching, 1):
            at = level * self.config.every
            live = (turns.turn == at).nonzero(as_tuple=True)[0]
            if width == 1 or not len(live):
                continue
            seed = torch.cat([Stream("branch", level).seeds(seeds[live], child) for child in range(width - 1)])
            live = live.repeat(width - 1)
            before = rows_before(trajectories, turns)
            recorded = [recorded_turns(trajectories, turns, [*before[row], row]) for row in live.tolist()]
            rows = prompts.index_of(trajectories.prompt_uid[live])
            played = self.table(prompts, policy, environments).play(rows, seed, recorded)
            above = trajectories.uid[[before[row][-1] for row in live.tolist()]][played.entry]
            begins = played.turns.episode == played.turns.uid
            grown = played.trajectories.replace(parent=torch.where(begins, above, -1))
            trajectories = Trajectories.concat([trajectories, grown])
            turns = Turns.concat([turns, played.turns])
            seeds = torch.cat([seeds, seed[played.entry]])
            faults = faults + played.faults
            branches += int(begins.sum())
            repeated += at * len(live)
        order = torch.argsort(prompts.index_of(trajectories.prompt_uid), stable=True)
        trajectories, turns = trajectories.select(order), turns.select(order)
        whole = Played(trajectories=trajectories, turns=turns, faults=faults, entry=order)
        self.context.log(**whole.metrics() | {"return": first.metrics()["return"]}, **length_metrics(trajectories))
        self.context.log(branches=Count(branches), repeated_turns=Count(repeated))
        return Outputs(trajectories=trajectories, turns=turns, prompts=prompts)
