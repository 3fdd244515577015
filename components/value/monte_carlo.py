"""Value of a state = mean reward of fresh continuations (VinePPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from components.rewards.outcome import finite_rewards
from components.rollouts.requests import SamplingSettings, keyed_seeds, sample_from_prefix
from components.value.boundaries import COST_METRICS, VALUE_METRICS, Outputs, boundaries_of
from pipeline.core.component import Component, same_rows
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Policy, Prompts, Rewards, Segments, SegmentValues, Trajectories, Verifier
from pipeline.core.streams import Stream, keys_within


def continuation_seeds(stream: Stream, uid: Tensor, place: Jagged, count: int) -> Tensor:
    """int64 [B, count] request seeds of each boundary in `place`, keyed by (trajectory uid [N], boundary,
    continuation)."""
    out = torch.zeros(len(place.values), count, dtype=torch.int64)
    for k in range(int(place.lengths.max()) if len(place) else 0):
        here = place.positions == k
        out[here] = keyed_seeds(stream, uid[place.row_ids[here]], k * count, count)
    return out


class MonteCarlo(Component):
    """v̂(s) = mean reward of K fresh continuations of s; at the end of a response it is that response's own reward.

    Continuations start from the exact token ids, under what is left of the budget (none left: the bare prefix is
    judged), and are not trained on. Those without a valid verdict are left out of the mean; a boundary with none gets
    0. Unbiased, with variance v(1 − v)/K for 0/1 rewards. Use the sampling settings of the sampler that made the
    trajectories.
    """

    paper = "2410.01679"
    metrics = (
        *VALUE_METRICS,
        *COST_METRICS,
        Metric("continuations", "responses", "continuations sampled"),
        Metric("invalid", "responses", "continuations without a usable verdict; they do not count"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SamplingSettings):
        """Sampling settings and the number of continuations."""

        mode: Literal["plain", "thought"] = "thought"
        """thought by thought, as the trajectories were made"""
        continuations: int = 9
        """K, continuations per boundary"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.continuations < 1:
                raise ValueError(f"continuations is {self.continuations}; wanted at least 1.")

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
        """Samples and judges all continuations in one request batch."""
        bounds, count = boundaries_of(trajectories, segments, rewards), self.config.continuations
        open_places = (~bounds.last).nonzero(as_tuple=True)[0]
        place = open_places.repeat_interleave(count)
        seed = continuation_seeds(self.context.rng(), keys_within(trajectories.prompt_uid), bounds.place, count)[
            open_places
        ].reshape(-1)
        parents = trajectories.select(bounds.owner[place])
        made = sample_from_prefix(
            policy, parents, bounds.place.values[place], seed, self.config.sampling(), self.context.uids(len(place))
        )
        verdicts = finite_rewards(verifier.verify(prompts, made))
        total, valid = torch.zeros(2, len(bounds.owner), dtype=torch.float64)
        valid.index_add_(0, place, verdicts.valid.double())
        total.index_add_(0, place, torch.where(verdicts.valid, verdicts.value.double(), 0.0))
        value = torch.where(bounds.last, rewards.value.double()[bounds.owner], total / valid.clamp(min=1))
        self.context.log(
            mean=float(value.sum()) / max(len(value), 1),
            boundaries=len(value),
            continuations=len(place),
            generated_tokens=float((made.response_tokens.lengths - made.inherited).sum()),
            scored_tokens=0,
            invalid=float((~verdicts.valid).sum()),
        )
        return Outputs(values=SegmentValues(uid=trajectories.uid, values=bounds.place.with_values(value.float())))
