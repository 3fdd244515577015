"""Base groups, and failed responses to reset (RRPO, SRPO)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from creditgraph.components.rollouts.carry import CARRY_METRICS, CarriedBatch, Carrier, CarrySettings
from creditgraph.components.rollouts.requests import LENGTH_METRICS, SamplingSettings, sample_groups
from creditgraph.components.rollouts.rewards import finite_rewards
from creditgraph.components.text.templates import Mode
from creditgraph.pipeline.core.component import Count
from creditgraph.pipeline.core.handles import Policy, Verifier
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Trajectories

_SPLIT = re.compile(r"^(\d+)x(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The base groups, which are trained on directly, the failures, whose prefixes are continued, and their prompts."""

    trajectories: Trajectories
    failures: Trajectories
    prompts: Prompts


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


def wave_sizes(fewest: int, most: int) -> list[int]:
    """Responses per prompt in each wave: `fewest`, then as many again as there are so far, `most` in all.

    Doubled, so that a prompt that seldom fails costs few request batches.

    >>> wave_sizes(1, 12), wave_sizes(5, 12)
    ([1, 1, 2, 4, 4], [5, 5, 2])
    """
    sizes = [fewest]
    while sum(sizes) < most:
        sizes.append(min(sum(sizes), most - sum(sizes)))
    return sizes


class Failures(Carrier):
    """Samples responses until enough of them have failed; resets start from the first failures of each prompt.

    Per prompt and split AxB of G = `group_size`: A failures, which are localised in but not trained on, and a base
    group of G − A·B other responses. When fewer than A of `max_attempts` responses fail, the prompt has no failure and
    falls back to a group of G: its first G − A·B responses, and new ones in place of the A·B suffixes, because a group
    of responses that are all known to be right has no signal. Responses are sampled in waves, the first just large
    enough and later ones doubling; what is chosen depends on the order of responses, not on the waves. A response that
    could not be verified is no failure. With `carry.tokens`, a prompt with an unfinished response waits, as in
    sampler.chains.
    """

    paper = "2605.25507"
    metrics = (
        *LENGTH_METRICS,
        *CARRY_METRICS,
        Metric("attempts", "responses", "responses sampled per prompt"),
        Metric("discarded", "responses", "responses that are neither in a base group nor a failure"),
        Metric("fallback_share", "share", "prompts with too few failures, which got a larger base group instead"),
        Metric("failures", "responses", "failures whose prefixes are continued"),
        Metric("signal_share", "share", "base groups, fallback groups included, whose rewards differ"),
        Metric("fallback_signal_share", "share", "fallback groups whose rewards differ"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(CarrySettings, SamplingSettings):
        """Sampling settings, the split, the limit of attempts, and the long tail."""

        mode: Mode = "thought"
        """resets need thoughts: thought by thought, or lines or sentences of a response; a plain one is one thought,
        and is reset to the prompt"""
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
        carried = self.begin(prompts, policy)
        count = len(carried.prompts)
        sampled = _Sampled(rows=[[] for _ in range(count)])
        choices: list[Choice | None] = [None] * count
        open_prompts = list(range(count))
        attempts = 0  # responses of each open prompt so far
        for size in wave_sizes(split.fewest, self.config.max_attempts):
            if sampled.waves and not open_prompts:
                break
            # Only prompts that still lack failures are sampled again.
            self._sample(sampled, carried, open_prompts, size, verifier, first=attempts)
            for prompt in open_prompts:
                choices[prompt] = choose([sampled.failed[row] for row in sampled.rows[prompt]], split)
            attempts += size
            complete = carried.complete(carried.prompts.uid).tolist()
            open_prompts = [i for i in open_prompts if choices[i] is None and complete[i]]
        short = [i for i in range(count) if choices[i] is None and complete[i]]
        if short:
            self._sample(sampled, carried, short, split.group_size - split.base, verifier, first=attempts)
        done = carried.complete(carried.prompts.uid).nonzero()[:, 0].tolist()
        fallback = Choice([*range(split.base), *range(attempts, attempts + split.group_size - split.base)], [])
        chosen = {i: choices[i] or fallback for i in done}
        base = {i: [sampled.rows[i][k] for k in chosen[i].base] for i in done}
        failures = [sampled.rows[i][k] for i in done for k in chosen[i].failures]
        responses = sum(len(sampled.rows[i]) for i in done)
        # Of the base groups with rows; the splits 2x4 and 1x8 have none but for prompts that fall back.
        signal = [sampled.differ(rows) for rows in base.values() if rows]
        short = [i for i in short if i in base]
        fallback_signal = [sampled.differ(base[i]) for i in short]
        order = [row for rows in base.values() for row in rows]
        num_base = len(order)
        fresh = Trajectories.concat(sampled.waves)
        rows, complete_prompts = self.end(
            carried, fresh.select(torch.tensor(order + failures, dtype=torch.int64)), fresh
        )
        self.context.log(
            attempts=responses / max(len(done), 1),
            discarded=Count(responses - num_base - len(failures)),
            fallback_share=len(short) / max(len(done), 1),
            failures=Count(len(failures)),
            signal_share=sum(signal) / max(len(signal), 1),
            fallback_signal_share=sum(fallback_signal) / max(len(short), 1),
        )
        return Outputs(
            trajectories=rows.select(torch.arange(num_base)),
            failures=rows.select(torch.arange(num_base, len(rows))),
            prompts=complete_prompts,
        )

    def _sample(
        self,
        sampled: _Sampled,
        carried: CarriedBatch,
        places: list[int],
        size: int,
        verifier: Verifier,
        first: int,
    ) -> None:
        """Adds `size` responses to each prompt at `places`; `first` counts the responses that each has so far."""
        selected = carried.prompts.select(torch.tensor(places, dtype=torch.int64))
        sampling = self.config.sampling()
        wave = sample_groups(self.context, carried.policy, selected, size, sampling, first=first, stream=carried.stream)
        # A prompt with a paused response is chosen from in a later iteration, with all its rewards.
        rewards = finite_rewards(verifier.verify(carried.prompts, wave))
        total = len(sampled.failed)
        for place, prompt in enumerate(places):
            sampled.rows[prompt] += range(total + place * size, total + (place + 1) * size)
        sampled.failed += (rewards.valid & ~rewards.correct).tolist()
        known = zip(rewards.value.tolist(), rewards.valid.tolist(), strict=True)
        sampled.reward += [value if valid else None for value, valid in known]
        sampled.waves.append(wave)
