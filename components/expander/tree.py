"""Trees of trajectories: branches at fixed lengths (SPO-Tree) or at uncertain tokens (TreeRL)."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from creditgraph.components.expander.tree_growth import SegmentRule, UncertainRule, grow_segments, grow_uncertain
from creditgraph.components.rollouts.carry import CARRY_METRICS, Carrier, CarrySettings
from creditgraph.components.rollouts.requests import LENGTH_METRICS, SamplingSettings, length_metrics
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Trajectories


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The leaves of each prompt's tree, prompt by prompt, whose group is the prompt; and the prompts."""

    trajectories: Trajectories
    prompts: Prompts


class Tree(Carrier):
    """Grows one tree of responses per prompt; its leaves share prefixes, and each token is sampled once.

    `segments`: `branching` = (6, 6, 6) samples 6 segments of M tokens, continues each 6 times for M tokens, and each of
    those 6 times to the end. `uncertain`: (M, N, L, T) samples M responses and, in each of L rounds, T new ones from
    before each of the N most uncertain tokens of every tree. Leaves carry their lineage: a row shares its first
    `inherited` tokens with `parent`, their ids, log-probs and entropies included. A branch that ends early is a leaf.
    With `carry.tokens`, a prompt with an unfinished branch waits, as in sampler.chains.
    """

    paper = "2505.23564, 2506.11902"
    metrics = (
        *LENGTH_METRICS,
        *CARRY_METRICS,
        Metric("leaves", "leaves", "responses per prompt"),
        Metric("fewest_leaves", "leaves", "responses of the prompt with the fewest"),
        Metric("inherited_tokens", "tokens", "tokens shared with an earlier leaf"),
        Metric("discarded_tokens", "tokens", "sampled tokens that belong to no leaf"),
        Metric("missed_branches", "branches", "branches of the rule for which there was no token to branch at"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(CarrySettings, SamplingSettings):
        """Sampling settings, the rule, and the long tail."""

        rule: Literal["segments", "uncertain"] = "segments"
        """segments: branches every M tokens (SPO-Tree); uncertain: at the most uncertain tokens (TreeRL)"""
        segments: SegmentRule = field(default_factory=SegmentRule)
        """settings of rule `segments`"""
        uncertain: UncertainRule = field(default_factory=UncertainRule)
        """settings of rule `uncertain`"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.thoughts.ends_at_eos:
                raise ValueError(
                    "expected thoughts.ends_at_eos true, got false: thought ends of a tree's responses are read from "
                    "their text, which does not show ends of text."
                )
            cuts = len(self.segments.branching) - 1
            if self.rule == "segments" and self.segments.tokens * cuts >= self.max_tokens:
                raise ValueError(
                    f"expected segments.tokens · {cuts} < max_tokens, so that the last of {cuts + 1} levels has a "
                    f"budget, got segments.tokens {self.segments.tokens} and max_tokens {self.max_tokens}."
                )

    config: Config

    @classmethod
    def needs_of(cls, config: Config) -> frozenset[str]:
        """What uncertainty is measured by."""
        measures = {"logprob": "logprobs", "entropy": "entropies"}
        return frozenset({measures[config.uncertain.measure]} if config.rule == "uncertain" else ())

    def run(self, *, prompts: Prompts, policy: Policy) -> Outputs:
        """Grows all trees level by level, or round by round, each in one request batch."""
        settings = self.config
        carried = self.begin(prompts, policy)
        if settings.rule == "segments":
            grown = grow_segments(carried, settings.segments, settings.sampling(), self.context)
        else:
            grown = grow_uncertain(carried, settings.uncertain, settings.sampling(), self.context)
        leaves, prompts = self.end(carried, grown.leaves)
        per_prompt = torch.bincount(prompts.index_of(leaves.prompt_uid), minlength=len(prompts))
        if not carried.carries:
            # Of requests that are carried, every token is counted when it is sampled.
            self.context.log(sampled_tokens=length_metrics(leaves)["sampled_tokens"] + grown.discarded_tokens)
        self.context.log(
            leaves=len(leaves) / max(len(prompts), 1),
            fewest_leaves=float(per_prompt.min()) if len(prompts) else 0.0,
            inherited_tokens=float(leaves.inherited.sum()),
            discarded_tokens=grown.discarded_tokens,
            missed_branches=grown.missed_branches,
        )
        return Outputs(trajectories=leaves, prompts=prompts)
