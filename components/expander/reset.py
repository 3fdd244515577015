"""Resets: new responses from the thoughts before a failure's first error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from components.rollouts.requests import (
    LENGTH_METRICS,
    SAMPLING_NAMES,
    SamplingSettings,
    keyed_seeds,
    length_metrics,
    sample_from_prefix,
)
from components.text.templates import Mode
from pipeline.core.component import Component, Count, same_rows
from pipeline.core.handles import Policy
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import StepErrors, Trajectories, check_aligned
from pipeline.core.streams import keys_within


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """`suffixes` rows per failure; the group of each is its failure."""

    trajectories: Trajectories


def reset_length(thought_ends: Jagged, step: Tensor) -> Tensor:
    """int64 [N]: tokens in thoughts 1 … step − 1 of each row; `step` [N] is clamped to [1, number of thoughts].

    Step 1 and rows without thoughts give 0: the reset state is then the prompt.
    """
    before = torch.minimum(step, thought_ends.lengths).clamp(min=1) - 1
    length = torch.zeros_like(before)
    cut = before > 0
    length[cut] = thought_ends.values[thought_ends.offsets[:-1][cut] + before[cut] - 1].to(torch.int64)
    return length


class Reset(Component):
    """Continues each failure `suffixes` times from the thoughts before its localised step h*.

    The prefix is thoughts 1 … h*−1 as exact token ids, without any information about the error. h* = 1 has an empty
    prefix: fresh responses that still form their own group. Settings that differ from those of the sampler of the
    failures are refused.
    """

    paper = "2605.25507"
    same_settings: ClassVar[Mapping[str, tuple[str, ...]]] = {"failures": (*SAMPLING_NAMES, "suffixes")}
    metrics = (
        *LENGTH_METRICS,
        Metric("inherited_tokens", "tokens", "tokens taken over from failures"),
        Metric("prefix_share", "share", "kept part of a failure, mean"),
        Metric("empty_prefix_share", "share", "failures of which nothing is kept"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SamplingSettings):
        """Sampling settings and the number of suffixes."""

        mode: Mode = "thought"
        """thought by thought, as the failures were sampled"""
        temperature: float = 0.7
        """sampling temperature; use the sampler's"""
        top_p: float = 0.95
        """keeps the smallest set of tokens with this probability; use the sampler's"""
        suffixes: int = 4
        """continuations per failure: B of the sampler's split AxB"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.suffixes < 1:
                raise ValueError(f"expected suffixes ≥ 1, got {self.suffixes}.")

    config: Config

    def run(
        self, *, failures: Trajectories, errors: Annotated[StepErrors, same_rows("failures")], policy: Policy
    ) -> Outputs:
        """Samples all suffixes in one request batch; equal prefixes share their prefill."""
        check_aligned(failures, errors)
        suffixes = self.config.suffixes
        rows = torch.arange(len(failures)).repeat_interleave(suffixes)
        length = reset_length(failures.thought_ends, errors.step)
        seed = keyed_seeds(self.context.rng(), keys_within(failures.prompt_uid), 0, suffixes).reshape(-1)
        uid = self.context.uids(len(rows))
        continued = sample_from_prefix(policy, failures.select(rows), length[rows], seed, self.config.sampling(), uid)
        count = max(len(failures), 1)
        # An empty failure has no tokens to share.
        whole = failures.response_tokens.lengths.clamp(min=1)
        self.context.log(
            **length_metrics(continued),
            inherited_tokens=Count(continued.inherited.sum()),
            prefix_share=float((length / whole).sum()) / count,
            empty_prefix_share=float((length == 0).sum()) / count,
        )
        return Outputs(trajectories=continued)
