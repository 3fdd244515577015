"""Base groups, and failed responses to reset (RRPO, SRPO)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from components.rollouts.requests import LENGTH_METRICS, SamplingSettings, length_metrics, sample_groups
from components.rollouts.rewards import finite_rewards
from pipeline.core.component import Component, Count
from pipeline.core.handles import Policy, Verifier
from pipeline.core.metric import Metric
from pipeline.core.payloads import Prompts, Trajectories

_SPLIT = re.compile(r"^(\d+)x(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The base groups, which are trained on directly, and the failures, whose prefixes are continued."""

    trajectories: Trajectories
    failures: Trajectories


@dataclass(frozen=True, kw_only=True)
class Split:
    """A prompt's trained trajectories: a base group, and `num_failures` failures with `num_suffixes` suffixes each."""

    base: int
    num_failures: int
    num_suffixes: int

    @property
    def group_size(self) -> int:
        """Trained trajectories per prompt; also the size of the fallback group."""
        return self.base + self.num_failures * self.num_suffixes

    @property
    def fewest(self) -> int:
        """Fewest responses a prompt needs: its base group and its failures."""
        return self.base + self.num_failures


class Choice(NamedTuple):
    """Places of a prompt's base group and failures among its responses."""

    base: list[int]
    failures: list[int]


@dataclass
class _Sampled:
    """The responses so far.

    Attributes:
        rows: of each prompt in the joined waves, in the order sampled.
        waves: the responses.
        failed: whether each of them is known to be wrong.
        reward: its reward; None where it could not be verified.
    """

    rows: list[list[int]]
    waves: list[Trajectories] = field(default_factory=list)
    failed: list[bool] = field(default_factory=list)
    reward: list[float | None] = field(default_factory=list)

    def differ(self, rows: list[int]) -> bool:
        """Whether the known rewards of these rows differ."""
        return len({self.reward[row] for row in rows} - {None}) > 1


def parse_split(split: str, group_size: int) -> Split:
    """Parses "AxB"; raises ValueError for a split with more trajectories than `group_size`.

    >>> parse_split("1x4", 8)
    Split(base=4, num_failures=1, num_suffixes=4)
    """
    match = _SPLIT.match(split)
    if not match or not int(match[1]) or not int(match[2]):
        raise ValueError(
            f"expected a split 'AxB' (A failures with B suffixes each, such as '1x4', '2x4' or '1x8'), got '{split}'."
        )
    failures = int(match[1])
    suffixes = int(match[2])
    if failures * suffixes > group_size:
        raise ValueError(
            f"expected a split with at most group_size ({group_size}) suffixes, got '{split}' with "
            f"{failures * suffixes}."
        )
    return Split(base=group_size - failures * suffixes, num_failures=failures, num_suffixes=suffixes)


def choose(failed: list[bool], split: Split) -> Choice | None:
    """Picks base group and failures among a prompt's responses; None while there are too few.

    The first `num_failures` failed responses, in the order of sampling, are the failures; the first other responses,
    before or after them, fill the base group.
    """
    failures = [i for i, bad in enumerate(failed) if bad][: split.num_failures]
    if len(failures) < split.num_failures:
        return None
    base = [i for i in range(len(failed)) if i not in failures][: split.base]
    return Choice(base, failures) if len(base) == split.base else None


class Failures(Component):
    """Samples responses until enough of them have failed; resets start from the first failures of each prompt.

    Per prompt and split AxB of G = `group_size`: A failures, which are localised in but not trained on, and a base
    group of G − A·B other responses. When fewer than A of `max_attempts` responses fail, the prompt has no failure and
    falls back to a group of G: its first G − A·B responses, and new ones in place of the A·B suffixes, because a group
    of responses that are all known to be right has no signal. Responses are sampled in waves, the first just large
    enough and later ones doubling; what is chosen depends on the order of responses, not on the waves. A response that
    could not be verified is no failure.
    """

    paper = "2605.25507"
    metrics = (
        *LENGTH_METRICS,
        Metric("attempts", "responses", "responses sampled per prompt"),
        Metric("discarded", "responses", "responses that are neither in a base group nor a failure"),
        Metric("fallback_share", "share", "prompts with too few failures, which got a larger base group instead"),
        Metric("failures", "responses", "failures whose prefixes are continued"),
        Metric("signal_share", "share", "base groups, fallback groups included, whose rewards differ"),
        Metric("fallback_signal_share", "share", "fallback groups whose rewards differ"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SamplingSettings):
        """Sampling settings, the split, and the limit of attempts."""

        mode: Literal["plain", "thought"] = "thought"
        """resets need thought boundaries; plain responses have one thought and are reset to the prompt"""
        temperature: float = 0.7
        """sampling temperature"""
        top_p: float = 0.95
        """keeps the smallest set of tokens with this probability"""
        split: str = "1x4"
        """AxB: A failures per prompt, B suffixes each; the expander's `suffixes` must be B"""
        group_size: int = 8
        """trained trajectories per prompt, suffixes included; the base group is the rest after AxB"""
        max_attempts: int = 12
        """responses per prompt before it falls back to a group without failure"""

        @property
        def suffixes(self) -> int:
            """B of the split AxB."""
            return parse_split(self.split, self.group_size).num_suffixes

        def __post_init__(self) -> None:
            super().__post_init__()
            fewest = parse_split(self.split, self.group_size).fewest
            if self.max_attempts < fewest:
                raise ValueError(
                    f"expected max_attempts ≥ {fewest}, so that base group and failures can be filled, got "
                    f"{self.max_attempts}."
                )

    config: Config

    def run(self, *, prompts: Prompts, policy: Policy, verifier: Verifier) -> Outputs:
        """Samples in waves, then chooses per prompt."""
        split = parse_split(self.config.split, self.config.group_size)
        count = len(prompts)
        sampled = _Sampled(rows=[[] for _ in range(count)])
        choices: list[Choice | None] = [None] * count
        open_prompts = list(range(count))
        attempts = 0  # responses of each open prompt so far
        size = split.fewest
        while open_prompts or not sampled.waves:
            # Only prompts that still lack failures are sampled again.
            self._sample(sampled, prompts, open_prompts, size, policy, verifier, first=attempts)
            for prompt in open_prompts:
                choices[prompt] = choose([sampled.failed[row] for row in sampled.rows[prompt]], split)
            attempts += size
            # Doubled, so that a prompt that seldom fails costs few request batches.
            size = min(attempts, self.config.max_attempts - attempts)
            open_prompts = [prompt for prompt in open_prompts if choices[prompt] is None and size > 0]
        short = [prompt for prompt in range(count) if choices[prompt] is None]
        if short:
            self._sample(sampled, prompts, short, split.group_size - split.base, policy, verifier, first=attempts)
        fallback = Choice([*range(split.base), *range(attempts, attempts + split.group_size - split.base)], [])
        chosen = [choice or fallback for choice in choices]
        base = [[sampled.rows[i][k] for k in chosen[i].base] for i in range(count)]
        failures = [sampled.rows[i][k] for i in range(count) for k in chosen[i].failures]
        fresh = Trajectories.concat(sampled.waves)
        # Of the base groups with rows; the splits 2x4 and 1x8 have none but for prompts that fall back.
        signal = [sampled.differ(rows) for rows in base if rows]
        fallback_signal = [sampled.differ(base[i]) for i in short]
        num_base = sum(map(len, base))
        self.context.log(
            **length_metrics(fresh),
            attempts=len(fresh) / max(count, 1),
            discarded=Count(len(fresh) - num_base - len(failures)),
            fallback_share=len(short) / max(count, 1),
            failures=Count(len(failures)),
            signal_share=sum(signal) / max(len(signal), 1),
            fallback_signal_share=sum(fallback_signal) / max(len(short), 1),
        )
        return Outputs(
            trajectories=fresh.select(torch.tensor([row for rows in base for row in rows], dtype=torch.int64)),
            failures=fresh.select(torch.tensor(failures, dtype=torch.int64)),
        )

    def _sample(
        self,
        sampled: _Sampled,
        prompts: Prompts,
        places: list[int],
        size: int,
        policy: Policy,
        verifier: Verifier,
        first: int,
    ) -> None:
        """Adds `size` responses to each prompt at `places`; `first` counts the responses that each has so far."""
        selected = prompts.select(torch.tensor(places, dtype=torch.int64))
        wave = sample_groups(self.context, policy, selected, size, self.config.sampling(), first=first)
        rewards = finite_rewards(verifier.verify(prompts, wave))
        total = len(sampled.failed)
        for place, prompt in enumerate(places):
            sampled.rows[prompt] += range(total + place * size, total + (place + 1) * size)
        sampled.failed += (rewards.valid & ~rewards.correct).tolist()
        known = zip(rewards.value.tolist(), rewards.valid.tolist(), strict=True)
        sampled.reward += [value if valid else None for value, valid in known]
        sampled.waves.append(wave)
