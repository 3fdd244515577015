"""Base groups and failures for resets (RRPO, SRPO)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from components.rollouts.requests import LENGTH_METRICS, SamplingSettings, keyed_seeds, length_metrics, sample_fresh
from pipeline.core.component import Component, Count
from pipeline.core.metric import Metric
from pipeline.core.payloads import Policy, Prompts, Trajectories, Verifier

_SPLIT = re.compile(r"^(\d+)x(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What is trained on directly, and the failed chains whose prefixes are reset to."""

    trajectories: Trajectories
    failures: Trajectories


@dataclass(frozen=True, kw_only=True)
class Split:
    """A prompt's trained trajectories: a base group, and `num_failures` failed chains with `num_suffixes` suffixes each."""

    base: int
    num_failures: int
    num_suffixes: int

    @property
    def group_size(self) -> int:
        """Trained trajectories per prompt; also the size of the fallback group."""
        return self.base + self.num_failures * self.num_suffixes

    @property
    def fewest(self) -> int:
        """Fresh chains that are needed when the first ones fail as wanted."""
        return self.base + self.num_failures


def parse_split(split: str, group_size: int) -> Split:
    """ "1x4" of 8 → one seed, four suffixes, base group of four; raises ValueError for what cannot be."""
    match = _SPLIT.match(split)
    if not match or not int(match[1]) or not int(match[2]):
        raise ValueError(
            f"split is '{split}'; wanted 'AxB', A failures with B suffixes each, such as '1x4', '2x4' or '1x8'."
        )
    failures, suffixes = int(match[1]), int(match[2])
    if failures * suffixes > group_size:
        raise ValueError(
            f"split '{split}' makes {failures * suffixes} suffixes, but group_size is {group_size}; wanted at most that "
            "many."
        )
    return Split(base=group_size - failures * suffixes, num_failures=failures, num_suffixes=suffixes)


def choose(failed: list[bool], split: Split) -> tuple[list[int], list[int]] | None:
    """Picks (base, failures) among the fresh chains of one prompt, as places in attempt order; None while failures are missing.

    The first `num_failures` failed chains are the failures; the first other chains, before or after them, fill the base
    group.
    """
    failures = [i for i, bad in enumerate(failed) if bad][: split.num_failures]
    if len(failures) < split.num_failures:
        return None
    base = [i for i in range(len(failed)) if i not in failures][: split.base]
    return (base, failures) if len(base) == split.base else None


class Failures(Component):
    """Samples fresh chains until enough of them have failed; the first ones are what resets start from.

    Per prompt and split AxB of G = `group_size`: A failures, which are only localised in, and a base group of G − A·B
    other fresh chains. When fewer than A of `max_attempts` fresh chains fail, the prompt falls back to its first G
    fresh chains in one group and has no seed. Attempts come in waves (the first just large enough, then doubling); what
    is chosen is fixed by the order of attempts, not by the waves. A chain that could not be judged is no seed.
    """

    paper = "2605.25507"
    metrics = (
        *LENGTH_METRICS,
        Metric("attempts", "responses", "chains sampled per prompt"),
        Metric("discarded", "responses", "chains that are neither in a base group nor a seed"),
        Metric("fallback_share", "share", "prompts that failed too seldom for failures and got a larger group instead"),
        Metric("failures", "responses", "failed chains given to the localizer"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SamplingSettings):
        """Sampling settings, the split, and the limit of attempts."""

        mode: Literal["plain", "thought"] = "thought"
        """resets need thought boundaries; plain chains have one thought and are reset to the prompt"""
        temperature: float = 0.7
        """of the draw"""
        top_p: float = 0.95
        """keeps the smallest set of tokens with this probability"""
        split: str = "1x4"
        """AxB: A failures per prompt, B suffixes each (set the expander's `suffixes` to B)"""
        group_size: int = 8
        """trained trajectories per prompt, suffixes included; the base group is what AxB leaves"""
        max_attempts: int = 12
        """fresh chains per prompt before it falls back to a plain group"""

        def __post_init__(self) -> None:
            super().__post_init__()
            split = parse_split(self.split, self.group_size)
            if self.max_attempts < max(split.fewest, self.group_size):
                raise ValueError(
                    f"max_attempts is {self.max_attempts}; wanted at least {max(split.fewest, self.group_size)}, "
                    "so that base group, failures and the fallback group can be filled."
                )

    config: Config

    def run(self, *, prompts: Prompts, policy: Policy, verifier: Verifier) -> Outputs:
        """Samples in waves, then chooses per prompt."""
        split, count = parse_split(self.config.split, self.config.group_size), len(prompts)
        waves: list[Trajectories] = []
        attempts: list[list[int]] = [[] for _ in range(count)]  # rows of the joined waves, in attempt order
        failed: list[list[bool]] = [[] for _ in range(count)]
        chosen: list[tuple[list[int], list[int]] | None] = [None] * count
        open_rows, done, size, start = torch.arange(count), 0, split.fewest, 0
        while len(open_rows) or not waves:
            wave, bad = self._wave(prompts, open_rows, policy, verifier, done, size)
            for place, row in enumerate(open_rows.tolist()):
                attempts[row] += range(start + place * size, start + (place + 1) * size)
                failed[row] += bad[place * size : (place + 1) * size]
                chosen[row] = choose(failed[row], split)
            waves.append(wave)
            start, done = start + len(wave), done + size
            size = min(done, self.config.max_attempts - done)
            open_rows = torch.tensor(
                [r for r in open_rows.tolist() if chosen[r] is None and size > 0], dtype=torch.int64
            )
        fresh = Trajectories.concat(waves)
        fallback = [i for i in range(count) if chosen[i] is None]
        for i in fallback:
            chosen[i] = (list(range(split.group_size)), [])
        base = [attempts[i][k] for i in range(count) for k in (chosen[i] or ([], []))[0]]
        failures = [attempts[i][k] for i in range(count) for k in (chosen[i] or ([], []))[1]]
        self.context.log(
            **length_metrics(fresh),
            attempts=len(fresh) / max(count, 1),
            discarded=Count(len(fresh) - len(base) - len(failures)),
            fallback_share=len(fallback) / max(count, 1),
            failures=Count(len(failures)),
        )
        return Outputs(
            trajectories=fresh.select(torch.tensor(base, dtype=torch.int64)),
            failures=fresh.select(torch.tensor(failures, dtype=torch.int64)),
        )

    def _wave(
        self, prompts: Prompts, open_rows: Tensor, policy: Policy, verifier: Verifier, done: int, size: int
    ) -> tuple[Trajectories, list[bool]]:
        """`size` further attempts for each open prompt, and which of them are known to be wrong."""
        rows = open_rows.repeat_interleave(size)
        seed = keyed_seeds(self.context.rng(), prompts.uid[open_rows], done, size).reshape(-1)
        wave = sample_fresh(policy, prompts, rows, seed, self.config.sampling(), self.context.uids(len(rows)))
        rewards = verifier.verify(prompts, wave)
        return wave, (rewards.valid & ~rewards.correct).tolist()
