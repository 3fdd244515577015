"""Resets: new chains from the thoughts before a failed chain's first error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from components.rollouts.requests import (
    LENGTH_METRICS,
    SamplingSettings,
    keyed_seeds,
    length_metrics,
    sample_from_prefix,
)
from pipeline.core.component import Component, Count, same_rows
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Policy, StepErrors, Trajectories, check_aligned
from pipeline.core.streams import keys_within


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """`suffixes` rows per failure; the group of each is its seed."""

    trajectories: Trajectories


def reset_length(thought_ends: Jagged, step: Tensor) -> Tensor:
    """int64 [N]: tokens in thoughts 1 … step − 1 of each row; `step` [N] is clamped to [1, number of thoughts].

    Step 1 and rows without thoughts give 0: the reset state is then the prompt.
    """
    count = thought_ends.lengths
    before = torch.minimum(step, count).clamp(min=1) - 1
    length = torch.zeros_like(count)
    cut = before > 0
    length[cut] = thought_ends.values[thought_ends.offsets[:-1][cut] + before[cut] - 1].to(torch.int64)
    return length


class Reset(Component):
    """Continues each failure `suffixes` times from the thoughts before its first error, h*.

    The prefix is thoughts 1 … h*−1 as exact token ids, with nothing said about the error; h* = 1 has an empty prefix:
    fresh rollouts that still form their own group. Use the sampling settings of the sampler that made the failures.
    """

    paper = "2605.25507"
    metrics = (
        *LENGTH_METRICS,
        Metric("inherited_tokens", "tokens", "tokens taken over from failures"),
        Metric("prefix_share", "share", "kept part of a seed, mean"),
        Metric("empty_prefix_share", "share", "failures of which nothing is kept"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SamplingSettings):
        """Sampling settings and the number of suffixes."""

        mode: Literal["plain", "thought"] = "thought"
        """thought by thought, as the failures were made"""
        temperature: float = 0.7
        """of the draw; the sampler's"""
        top_p: float = 0.95
        """keeps the smallest set of tokens with this probability; the sampler's"""
        suffixes: int = 4
        """continuations per failure: B of the sampler's split AxB"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.suffixes < 1:
                raise ValueError(f"suffixes is {self.suffixes}; wanted at least 1.")

    config: Config

    def run(
        self, *, failures: Trajectories, errors: Annotated[StepErrors, same_rows("failures")], policy: Policy
    ) -> Outputs:
        """Samples all suffixes in one request batch; equal prefixes share their prefill."""
        check_aligned(failures, errors)
        count = self.config.suffixes
        rows = torch.arange(len(failures)).repeat_interleave(count)
        length = reset_length(failures.thought_ends, errors.step)
        request_seed = keyed_seeds(self.context.rng(), keys_within(failures.prompt_uid), 0, count).reshape(-1)
        made = sample_from_prefix(
            policy,
            failures.select(rows),
            length[rows],
            request_seed,
            self.config.sampling(),
            self.context.uids(len(rows)),
        )
        whole = failures.response_tokens.lengths.clamp(min=1)
        self.context.log(
            **length_metrics(made),
            inherited_tokens=Count(made.inherited.sum()),
            prefix_share=float((length / whole).sum()) / max(len(failures), 1),
            empty_prefix_share=float((length == 0).sum()) / max(len(failures), 1),
        )
        return Outputs(trajectories=made)
