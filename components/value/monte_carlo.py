"""The value of a state as the mean reward of fresh continuations (VinePPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from creditgraph.components.rollouts.requests import SamplingSettings, keyed_seeds, sample_from_prefix
from creditgraph.components.rollouts.rewards import finite_rewards
from creditgraph.components.text.templates import Mode
from creditgraph.components.value.boundaries import COST_METRICS, VALUE_METRICS, Outputs, boundaries_of
from creditgraph.pipeline.core.component import Component, Count, same_rows
from creditgraph.pipeline.core.handles import Policy, Verifier
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Segments, SegmentValues, Trajectories
from creditgraph.pipeline.core.streams import Stream, keys_within


def continuation_seeds(stream: Stream, key: Tensor, place: Jagged, count: int) -> Tensor:
    """int64 [B, count] request seeds of each boundary in `place`, keyed by (trajectory's `key` [N], boundary, draw)."""
    seeds = torch.zeros(len(place.values), count, dtype=torch.int64)
    for k in range(int(place.lengths.max()) if len(place) else 0):
        here = place.positions == k
        # Each boundary has separate draws, so that other boundaries of the response do not shift them.
        seeds[here] = keyed_seeds(stream, key[place.row_ids[here]], k * count, count)
    return seeds


class MonteCarlo(Component):
    """Estimates v̂(s) as the mean reward of K fresh continuations of s; at the end of a response it is its own reward.

    Continuations start from the exact token ids, within the rest of the budget (without any left, the bare prefix is
    verified), and are not trained on. Those that could not be verified are left out of the mean; a boundary without any
    gets 0. Unbiased, with variance v(1 − v)/K for 0/1 rewards. Use the sampling settings of the sampler that sampled
    the trajectories.
    """

    paper = "2410.01679"
    metrics = (
        *VALUE_METRICS,
        *COST_METRICS,
        Metric("continuations", "responses", "continuations sampled"),
        Metric("invalid", "responses", "continuations that could not be verified; they do not count"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SamplingSettings):
        """Sampling settings and the number of continuations."""

        mode: Mode = "thought"
        """thought by thought, as the trajectories were sampled"""
        continuations: int = 9
        """K, continuations per boundary"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.continuations < 1:
                raise ValueError(f"expected continuations ≥ 1, got {self.continuations}.")

    config: Config

    def run(
        self,
        *,
        prompts: Prompts,
        trajectories: Trajectories,
        segments: Annotated[Segments, same_rows("trajectories")],
        rewards: Annotated[Rewards, same_rows("trajectories")],
        verifier: Verifier,
        policy: Policy,
    ) -> Outputs:
        """Samples and verifies all continuations in one request batch."""
        count = self.config.continuations
        bounds = boundaries_of(trajectories, segments, rewards)
        keys = keys_within(trajectories.prompt_uid)
        seeds = continuation_seeds(self.context.rng(), keys, bounds.place, count)[~bounds.last].reshape(-1)
        # The end of a response needs no continuation: its reward is known.
        place = (~bounds.last).nonzero(as_tuple=True)[0].repeat_interleave(count)
        parents = trajectories.select(bounds.owner[place])
        uid = self.context.uids(len(place))
        continued = sample_from_prefix(policy, parents, bounds.place.values[place], seeds, self.config.sampling(), uid)
        verdicts = finite_rewards(verifier.verify(prompts, continued))
        valid = torch.zeros(len(bounds.owner), dtype=torch.float64)
        valid.index_add_(0, place, verdicts.valid.double())
        total = torch.zeros(len(bounds.owner), dtype=torch.float64)
        total.index_add_(0, place, torch.where(verdicts.valid, verdicts.value.double(), 0.0))
        value = torch.where(bounds.last, rewards.value.double()[bounds.owner], total / valid.clamp(min=1))
        self.context.log(
            mean=float(value.sum()) / max(len(value), 1),
            boundaries=len(value),
            continuations=len(place),
            sampled_tokens=Count((continued.response_tokens.lengths - continued.inherited).sum()),
            scored_tokens=Count(0),
            invalid=float((~verdicts.valid).sum()),
        )
        return Outputs(values=SegmentValues(uid=trajectories.uid, values=bounds.place.with_values(value.float())))
