"""Dynamic sampling: only prompts whose group carries a signal are trained on (DAPO)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.rollouts.carry import CARRY_METRICS, CarriedBatch, Carrier, CarrySettings
from creditgraph.components.rollouts.requests import LENGTH_METRICS, SamplingSettings, sample_groups
from creditgraph.pipeline.core.handles import Policy, Verifier
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Trajectories

# Rewards that differ by less count as equal.
_FLAT = 1e-8


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The groups with a signal, and their prompts (some may have waited since earlier iterations)."""

    trajectories: Trajectories
    prompts: Prompts


def has_signal(rewards: Rewards, num_prompts: int) -> Tensor:
    """bool [P]: whether the valid rewards of each group differ; rows come group by group, equally many each."""
    value = rewards.value.view(num_prompts, -1)
    valid = rewards.valid.view(num_prompts, -1)
    low = value.masked_fill(~valid, math.inf).amin(1)
    high = value.masked_fill(~valid, -math.inf).amax(1)
    return high - low > _FLAT


class Dynamic(Carrier):
    """Samples groups in waves until `groups` prompts have rewards that differ, and drops the other groups.

    Groups whose rewards are all equal give no gradient. The node takes more prompts than it needs. Prompts that were
    not sampled, and surplus ones of the last wave, wait in a backlog that goes first in the next iteration and is part
    of the checkpoint, so no prompt is lost. Set the batch of prompts near groups / (share of groups with a signal): a
    larger one makes the backlog grow (metric `backlog`). If prompts or waves run out, the iteration continues with
    fewer groups, and `missing_groups` is the number that it lacks.
    """

    paper = "2503.14476"
    metrics = (
        *LENGTH_METRICS,
        *CARRY_METRICS,
        Metric("waves", "waves", "waves of sampling"),
        Metric("signal_share", "share", "sampled prompts whose rewards differ"),
        Metric("groups", "groups", "groups that are trained on"),
        Metric("missing_groups", "groups", "groups short of `groups`"),
        Metric("surplus_groups", "groups", "groups with a signal beyond `groups`; their prompts wait"),
        Metric("backlog", "prompts", "prompts that wait for the next iteration"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(CarrySettings, SamplingSettings):
        """Sampling settings, the group size, the number of groups, and the long tail."""

        group_size: int = 8
        """responses per prompt"""
        groups: int = 8
        """prompts with a signal per iteration"""
        max_waves: int = 4
        """waves of sampling per iteration; each samples as many prompts as the share of signals so far suggests"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.group_size < 2:
                raise ValueError(f"expected group_size ≥ 2 (one response has no variance), got {self.group_size}.")
            if self.groups < 1 or self.max_waves < 1:
                raise ValueError(f"expected groups and max_waves ≥ 1, got {self.groups} and {self.max_waves}.")

    config: Config

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self._backlog: Prompts | None = None

    def run(self, *, prompts: Prompts, policy: Policy, verifier: Verifier) -> Outputs:
        """Samples in waves over the backlog and the new prompts."""
        target = self.config.groups
        size = self.config.group_size
        carried = self.begin(prompts if self._backlog is None else Prompts.concat([self._backlog, prompts]), policy)
        pool = carried.prompts
        waves: list[Trajectories] = []
        signals: list[Tensor] = []  # bool, for the prompts sampled so far, which are the first of the pool
        sampled = 0
        with_signal = 0
        decided = 0
        while not waves or (with_signal < target and sampled < len(pool) and len(waves) < self.config.max_waves):
            # Before the first signal every prompt counts as having one: the first wave has `groups` prompts.
            share = with_signal / decided if with_signal else 1.0
            end = min(sampled + math.ceil((target - with_signal) / share), len(pool))
            part = pool.select(torch.arange(sampled, end))
            wave, signal = self._wave(part, carried, verifier)
            waves.append(wave)
            decided += int(carried.complete(part.uid).sum())
            signals.append(signal)
            sampled = end
            with_signal += int(signal.sum())
        fresh = Trajectories.concat(waves)
        used = torch.cat(signals).nonzero()[:, 0]
        rows = torch.arange(len(fresh)).view(sampled, size)[used[:target]].reshape(-1)
        waiting = torch.cat([used[target:], torch.arange(sampled, len(pool))])
        self._backlog = pool.select(waiting) if len(waiting) else None
        trajectories, _ = self.end(carried, fresh.select(rows), fresh)
        self.context.log(
            waves=len(waves),
            signal_share=with_signal / max(decided, 1),
            groups=min(with_signal, target),
            missing_groups=max(target - with_signal, 0),
            surplus_groups=max(with_signal - target, 0),
            backlog=len(waiting),
        )
        return Outputs(trajectories=trajectories, prompts=pool.select(used[:target]))

    def _wave(self, prompts: Prompts, carried: CarriedBatch, verifier: Verifier) -> tuple[Trajectories, Tensor]:
        """One group for each of these prompts, and which groups are complete and carry a signal."""
        size, sampling = self.config.group_size, self.config.sampling()
        wave = sample_groups(self.context, carried.policy, prompts, size, sampling, stream=carried.stream)
        if not len(prompts):
            return wave, torch.zeros(0, dtype=torch.bool)
        return wave, has_signal(verifier.verify(prompts, wave), len(prompts)) & carried.complete(prompts.uid)

    def state_dict(self) -> dict[str, Any]:
        """The backlog and the prompts in flight."""
        return super().state_dict() | ({} if self._backlog is None else {"backlog": self._backlog})

    @classmethod
    def state_for(cls, states: Sequence[dict[str, Any]], replica: int, replicas: int) -> dict[str, Any]:
        """Deals out both."""
        state = super().state_for(states, replica, replicas)
        held = [s["backlog"] for s in states if "backlog" in s]
        if len(states) == replicas or not held:
            return state
        backlog = Prompts.concat(held)
        mine = backlog.select(torch.argsort(backlog.uid)[replica::replicas])
        rest = {key: value for key, value in state.items() if key != "backlog"}
        return rest | ({"backlog": mine} if len(mine) else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores both."""
        super().load_state_dict(state)
        self._backlog = state.get("backlog")
