"""Pairs of attempts: a fresh chain and a second attempt that sees it (SCoRe)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from components.localizer.self_localizer import question_of
from components.rollouts.requests import LENGTH_METRICS, SamplingSettings, keyed_seeds, length_metrics, sample_fresh
from components.rollouts.second_turn import second_turn, unended
from components.rollouts.thoughts import thought_texts
from components.text.templates import retry_prompt
from pipeline.core.component import Component
from pipeline.core.metric import Metric
from pipeline.core.payloads import Policy, Prompts, Trajectories


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """All first attempts, prompt by prompt, then all second ones; `parent` of a second attempt is its first."""

    trajectories: Trajectories


class Retry(Component):
    """Samples `pairs` pairs (y1, y2) per prompt, y2 from a hedged retry prompt that contains y1 and does not say whether it is right [S].

    First attempts of a prompt are one group, second attempts another: outcomes of different turns are not compared. y2
    keeps the retry prompt as its own, so the learner conditions on what was sampled. A second attempt without room in
    the context is left out and counted. For the embedded model the retry is its revise mode with y1 also as the
    reference [R]: its vocabulary has no hedged words.
    """

    paper = "2409.12917"
    metrics = (
        *LENGTH_METRICS,
        Metric("no_retry_share", "share", "first attempts that left no room for a second one"),
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
                raise ValueError(f"pairs is {self.pairs}; wanted at least 1 pair of attempts per prompt.")

    config: Config

    def run(self, *, prompts: Prompts, policy: Policy) -> Outputs:
        """Samples first attempts in one request batch and second ones in another."""
        settings, stream = self.config, self.context.rng()
        rows = torch.arange(len(prompts)).repeat_interleave(settings.pairs)
        seed = keyed_seeds(stream, prompts.uid, 0, 2 * settings.pairs)
        uid = self.context.uids(2 * len(rows))
        firsts = sample_fresh(
            policy, prompts, rows, seed[:, : settings.pairs].reshape(-1), settings.sampling(), uid[: len(rows)]
        )
        steps = thought_texts(firsts, policy.tokenizer)
        asked = [
            retry_prompt(prompts.metadata[row], question_of(prompts, row), attempt, policy.tokenizer)
            for row, attempt in zip(rows.tolist(), steps, strict=True)
        ]
        seconds = second_turn(
            policy, prompts, firsts, asked, seed[:, settings.pairs :].reshape(-1), settings.sampling(), uid[len(rows) :]
        )
        # The group of a prompt's second attempts is its first first attempt: an id no prompt has.
        seconds = seconds.replace(group=firsts.uid[:: settings.pairs].repeat_interleave(settings.pairs))
        made = seconds.response_tokens.lengths > 0
        trajectories = Trajectories.concat([firsts, seconds.select(made)])
        unchanged = sum(a == b for a, b in zip(firsts.text, seconds.text, strict=True))
        count = max(len(firsts), 1)
        self.context.log(
            **length_metrics(trajectories),
            no_retry_share=float((~made).sum()) / count,
            unended_retry_share=float(unended(seconds).sum()) / count,
            unchanged_share=unchanged / count,
        )
        return Outputs(trajectories=trajectories)
