"""Pairs of attempts: a first response and a second one that sees it (SCoRe)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from creditgraph.components.rollouts.requests import (
    LENGTH_METRICS,
    SamplingSettings,
    keyed_seeds,
    length_metrics,
    sample_groups,
    unended,
)
from creditgraph.components.rollouts.second_turn import retries
from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Trajectories


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """All first attempts, prompt by prompt, then all second ones; `parent` of a second attempt is its first."""

    trajectories: Trajectories


class Retry(Component):
    """Samples `pairs` pairs of attempts (y1, y2) per prompt; y2 responds to a retry prompt with y1.

    The retry prompt does not say whether y1 is right (second-hand: the paper's summaries agree on it). First attempts
    of a prompt are one group, second attempts another: outcomes of different turns are not compared. y2 keeps the retry
    prompt as its own, so the learner conditions on what was sampled. A second attempt without room in the context is
    left out and counted. For the embedded model the retry is its revise mode with y1 also as the reference (our
    reading): its vocabulary has no hedged words.
    """

    paper = "2409.12917"
    metrics = (
        *LENGTH_METRICS,
        Metric(
            "no_retry_share",
            "share",
            "first attempts that left no room for a second one",
            alarm="no first attempt left room for a second one. Raise model.max_context, or lower max_tokens.",
        ),
        Metric("unended_retry_share", "share", "second attempts without an end"),
        Metric("unchanged_share", "share", "second attempts with the text of the first"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SamplingSettings):
        """Sampling of both attempts and the number of pairs."""

        pairs: int = 4
        """pairs per prompt; each gives two trained trajectories"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.pairs < 1:
                raise ValueError(f"expected pairs ≥ 1, got {self.pairs}.")

    config: Config

    @classmethod
    def shown_responses(cls, config: Any) -> int:
        """The first attempt."""
        return 1

    def run(self, *, prompts: Prompts, policy: Policy) -> Outputs:
        """Samples first attempts in one request batch and second ones in another."""
        pairs = self.config.pairs
        sampling = self.config.sampling()
        firsts = sample_groups(self.context, policy, prompts, pairs, sampling)
        seed = keyed_seeds(self.context.rng(), prompts.uid, pairs, pairs).reshape(-1)
        uid = self.context.uids(len(firsts))
        seconds = retries(policy, prompts, firsts, self.config.mode, seed, sampling, uid)
        # The group of a prompt's second attempts is the uid of its first attempt 0, which no prompt has.
        seconds = seconds.replace(group=firsts.uid[::pairs].repeat_interleave(pairs))
        # A sampled response has at least one token, its end of text.
        has_room = seconds.response_tokens.lengths > 0
        trajectories = Trajectories.concat([firsts, seconds.select(has_room)])
        unchanged = sum(a == b for a, b in zip(firsts.text, seconds.text, strict=True))
        count = max(len(firsts), 1)
        self.context.log(
            **length_metrics(trajectories),
            no_retry_share=float((~has_room).sum()) / count,
            unended_retry_share=float(unended(seconds).sum()) / count,
            unchanged_share=unchanged / count,
        )
        return Outputs(trajectories=trajectories)
