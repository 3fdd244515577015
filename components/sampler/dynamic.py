"""Dynamic sampling: only prompts whose group carries a signal are trained on (DAPO)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from components.rollouts.requests import LENGTH_METRICS, SamplingSettings, keyed_seeds, length_metrics, sample_fresh
from pipeline.core.component import Component
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Policy, Prompts, Rewards, Trajectories, Verifier

_FLAT = 1e-8


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The groups with a signal, and their prompts (some may have waited since earlier iterations)."""

    trajectories: Trajectories
    prompts: Prompts


def has_signal(rewards: Rewards, num_prompts: int) -> Tensor:
    """bool [P]: whether the valid rewards of each prompt's group differ. Rows come group by group, equally many
    each."""
    value = rewards.value.view(num_prompts, -1)
    valid = rewards.valid.view(num_prompts, -1)
    low = value.masked_fill(~valid, math.inf).amin(1)
    high = value.masked_fill(~valid, -math.inf).amax(1)
    return high - low > _FLAT


class Dynamic(Component):
    """Samples groups in waves until `groups` prompts have rewards that differ; the others give no gradient and are dropped.

    Takes more prompts than it needs. Prompts that were not sampled, and surplus ones of the last wave, wait in a
    backlog that goes first in the next iteration and is part of the checkpoint, so no prompt is lost. Set the batch of
    prompts near groups / (share of groups with a signal): a larger one lets the backlog grow (`backlog` tells). When
    prompts or waves run out, the iteration goes on with the groups there are, and `missing_groups` says how many it
    lacks.
    """

    paper = "2503.14476"
    metrics = (
        *LENGTH_METRICS,
        Metric("waves", "waves", "waves of sampling"),
        Metric("signal_share", "share", "sampled prompts whose rewards differ"),
        Metric("groups", "groups", "groups handed on"),
        Metric("missing_groups", "groups", "groups that were wanted and not found"),
        Metric("surplus_groups", "groups", "groups with a signal beyond those wanted; their prompts wait"),
        Metric("backlog", "prompts", "prompts that wait for the next iteration"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SamplingSettings):
        """Sampling settings, group size, and how many groups are wanted."""

        group_size: int = 8
        """responses per prompt"""
        groups: int = 8
        """prompts with a signal per iteration"""
        max_waves: int = 4
        """waves of sampling per iteration; each samples as many prompts as the share of signals so far suggests"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.group_size < 2 or self.groups < 1 or self.max_waves < 1:
                raise ValueError(
                    "group_size must be at least 2 (one response has no variance), groups and max_waves at least 1."
                )

    config: Config

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self._backlog: Prompts | None = None

    def run(self, *, prompts: Prompts, policy: Policy, verifier: Verifier) -> Outputs:
        """Samples in waves over the backlog and the new prompts."""
        wanted = self.config.groups
        pool = prompts if self._backlog is None else Prompts.concat([self._backlog, prompts])
        waves: list[Trajectories] = []
        kept: list[Tensor] = []  # rows of the pool with a signal
        kept_rows: list[Tensor] = []  # their rows of the joined waves
        tried, found, start = 0, 0, 0
        while not waves or (found < wanted and tried < len(pool) and len(waves) < self.config.max_waves):
            share = found / tried if found else 1.0
            rows = torch.arange(tried, min(tried + math.ceil((wanted - found) / share), len(pool)))
            wave, signal = self._wave(pool, rows, policy, verifier)
            waves.append(wave)
            kept.append(rows[signal])
            kept_rows.append(
                start + torch.arange(len(wave)).view(len(rows), self.config.group_size)[signal].reshape(-1)
            )
            tried, found, start = tried + len(rows), found + int(signal.sum()), start + len(wave)
        used, rows_of_waves = torch.cat(kept), torch.cat(kept_rows)
        waiting = torch.cat([used[wanted:], torch.arange(tried, len(pool))])
        self._backlog = pool.select(waiting) if len(waiting) else None
        fresh = Trajectories.concat(waves)
        self.context.log(
            **length_metrics(fresh),
            waves=len(waves),
            signal_share=found / max(tried, 1),
            groups=min(found, wanted),
            missing_groups=max(wanted - found, 0),
            surplus_groups=max(found - wanted, 0),
            backlog=len(waiting),
        )
        return Outputs(
            trajectories=fresh.select(rows_of_waves[: wanted * self.config.group_size]),
            prompts=pool.select(used[:wanted]),
        )

    def _wave(self, pool: Prompts, rows: Tensor, policy: Policy, verifier: Verifier) -> tuple[Trajectories, Tensor]:
        """One group for each of these rows of the pool, and which groups carry a signal."""
        size = self.config.group_size
        seed = keyed_seeds(self.context.rng(), pool.uid[rows], 0, size).reshape(-1)
        repeated = rows.repeat_interleave(size)
        wave = sample_fresh(policy, pool, repeated, seed, self.config.sampling(), self.context.uids(len(repeated)))
        if not len(rows):
            return wave, torch.zeros(0, dtype=torch.bool)
        return wave, has_signal(verifier.verify(pool, wave), len(rows))

    def state_dict(self) -> dict[str, Any]:
        """The backlog."""
        if self._backlog is None:
            return {}
        waiting = self._backlog
        return {
            "uid": waiting.uid,
            "tokens": waiting.tokens.values,
            "lengths": waiting.tokens.lengths,
            "text": waiting.text,
            "answer": waiting.answer,
            "metadata": [json.dumps(row) for row in waiting.metadata],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the backlog back."""
        if not state:
            self._backlog = None
            return
        self._backlog = Prompts(
            uid=state["uid"],
            tokens=Jagged.from_lengths(state["tokens"], state["lengths"]),
            text=list(state["text"]),
            answer=list(state["answer"]),
            metadata=[json.loads(row) for row in state["metadata"]],
        )
