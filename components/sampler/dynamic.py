"""Dynamic sampling: only prompts whose group carries a signal are trained on (DAPO)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from components.rollouts.requests import LENGTH_METRICS, SamplingSettings, length_metrics, sample_groups
from pipeline.core.component import Component
from pipeline.core.handles import Policy, Verifier
from pipeline.core.metric import Metric
from pipeline.core.payloads import Prompts, Rewards, Trajectories

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


class Dynamic(Component):
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
        Metric("waves", "waves", "waves of sampling"),
        Metric("signal_share", "share", "sampled prompts whose rewards differ"),
        Metric("groups", "groups", "groups that are trained on"),
        Metric("missing_groups", "groups", "groups short of `groups`"),
        Metric("surplus_groups", "groups", "groups with a signal beyond `groups`; their prompts wait"),
        Metric("backlog", "prompts", "prompts that wait for the next iteration"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SamplingSettings):
        """Sampling settings, the group size, and the number of groups."""

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
        pool = prompts if self._backlog is None else Prompts.concat([self._backlog, prompts])
        waves: list[Trajectories] = []
        signals: list[Tensor] = []  # bool, for the prompts sampled so far, which are the first of the pool
        sampled = 0
        with_signal = 0
        while not waves or (with_signal < target and sampled < len(pool) and len(waves) < self.config.max_waves):
            # Before the first signal every prompt counts as having one: the first wave has `groups` prompts.
            share = with_signal / sampled if with_signal else 1.0
            end = min(sampled + math.ceil((target - with_signal) / share), len(pool))
            wave, signal = self._wave(pool.select(torch.arange(sampled, end)), policy, verifier)
            waves.append(wave)
            signals.append(signal)
            sampled = end
            with_signal += int(signal.sum())
        fresh = Trajectories.concat(waves)
        used = torch.cat(signals).nonzero()[:, 0]
        rows = torch.arange(len(fresh)).view(sampled, size)[used[:target]].reshape(-1)
        waiting = torch.cat([used[target:], torch.arange(sampled, len(pool))])
        self._backlog = pool.select(waiting) if len(waiting) else None
        self.context.log(
            **length_metrics(fresh),
            waves=len(waves),
            signal_share=with_signal / max(sampled, 1),
            groups=min(with_signal, target),
            missing_groups=max(target - with_signal, 0),
            surplus_groups=max(with_signal - target, 0),
            backlog=len(waiting),
        )
        return Outputs(trajectories=fresh.select(rows), prompts=pool.select(used[:target]))

    def _wave(self, prompts: Prompts, policy: Policy, verifier: Verifier) -> tuple[Trajectories, Tensor]:
        """One group for each of these prompts, and which groups carry a signal."""
        wave = sample_groups(self.context, policy, prompts, self.config.group_size, self.config.sampling())
        if not len(prompts):
            return wave, torch.zeros(0, dtype=torch.bool)
        return wave, has_signal(verifier.verify(prompts, wave), len(prompts))

    def state_dict(self) -> dict[str, Any]:
        """The backlog."""
        return {} if self._backlog is None else {"backlog": self._backlog}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the backlog."""
        self._backlog = state.get("backlog")
