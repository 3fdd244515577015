"""Original responses and the best refinement after a critique (Critique-GRPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.rollouts.requests import (
    LENGTH_METRICS,
    SamplingSettings,
    keyed_seeds,
    length_metrics,
    sample_groups,
    unended,
)
from creditgraph.components.rollouts.rewards import finite_rewards
from creditgraph.components.rollouts.second_turn import problem_of, second_turn
from creditgraph.components.rollouts.thoughts import thought_texts
from creditgraph.components.text.templates import critique_prompt
from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.handles import Policy, Verifier
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Trajectories


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """All originals, prompt by prompt, then at most one refinement per prompt, whose `parent` is its original."""

    trajectories: Trajectories


def to_refine(eligible: Tensor, count: int) -> Tensor:
    """Which original each of `count` refinements refines, as places in the group: the eligible ones in turn.

    Empty when none is eligible.

    >>> to_refine(torch.tensor([False, True, True]), 4).tolist()
    [1, 2, 1, 2]
    """
    places = eligible.nonzero(as_tuple=True)[0]
    return places[torch.arange(count) % len(places)] if len(places) else places


def best_of(value: Tensor, usable: Tensor, prompt: Tensor) -> Tensor:
    """Row of the usable candidate with the highest value of each prompt, the first of equals, int64 [B].

    A prompt without a usable candidate has no row.

    Args:
        value: float [N].
        usable: bool [N].
        prompt: int64 [N], in ascending runs.
    """
    best: dict[int, int] = {}
    for row in usable.nonzero(as_tuple=True)[0].tolist():
        key = int(prompt[row])
        if key not in best or float(value[row]) > float(value[best[key]]):
            best[key] = row
    return torch.tensor(list(best.values()), dtype=torch.int64)


class Critique(Component):
    """Samples `originals` responses per prompt, then refinements after a critique of them, and keeps the best one.

    The critique states only that the original is wrong. The refinement joins its prompt's group (second-hand).
    Which originals are refined is our reading: the wrong ones in turn. A prompt without one has no refinement
    (counted) and its group has `originals` rows. A refinement that does not end or cannot be verified is
    never the best; of equal ones the first counts.

    The paper learns the refinement as a response to the original problem, and its released code scores it there without
    a ratio. So the refinement's prompt is the problem, and its log-probs and entropies are scored again under that
    prompt, so that they belong to what the learner sees. For the embedded model a refinement is its revise mode with
    the original itself as the reference (our reading).
    """

    paper = "2506.03106"
    metrics = (
        *LENGTH_METRICS,
        Metric("wrong", "rows", "originals that are wrong"),
        Metric("refinements", "rows", "refinements sampled"),
        Metric("unended_share", "share", "refinements without an end"),
        Metric("refined_correct_share", "share", "refinements that are right"),
        Metric("kept", "rows", "refinements that are trained on, at most one per prompt"),
        Metric("kept_correct_share", "share", "kept refinements that are right"),
        Metric(
            "no_refinement_share",
            "share",
            "prompts without a kept refinement",
            alarm="no refinement was kept, so the method was GRPO. unended_share and refined_correct_share say why.",
        ),
        Metric("refinement_logprob_change", "nats", "log-prob of a kept token without minus with the critique, mean"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SamplingSettings):
        """Sampling and group sizes."""

        originals: int = 7
        """first responses per prompt"""
        refinements: int = 8
        """candidates per prompt, of which one is kept; 0 gives plain groups"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.originals < 1:
                raise ValueError(f"expected originals ≥ 1, got {self.originals}.")
            if self.refinements < 0:
                raise ValueError(f"expected refinements ≥ 0, got {self.refinements}.")

    config: Config

    @classmethod
    def shown_responses(cls, config: Any) -> int:
        """The original, before its refinement."""
        return 1

    def run(self, *, prompts: Prompts, policy: Policy, verifier: Verifier) -> Outputs:
        """Samples originals in one request batch and refinements in another."""
        settings = self.config
        originals = sample_groups(self.context, policy, prompts, settings.originals, settings.sampling())
        rewards = verifier.verify(prompts, originals)
        refined = self._refine(prompts, originals, rewards, policy)
        verdicts = finite_rewards(verifier.verify(prompts, refined))
        usable = verdicts.valid & ~unended(refined)
        best = best_of(verdicts.value, usable, refined.prompt_uid)
        kept = self._under_problem(prompts, policy, refined.select(best))
        total = max(len(refined), 1)
        self.context.log(
            **length_metrics(Trajectories.concat([originals, refined])),
            wrong=int((rewards.valid & ~rewards.correct).sum()),
            refinements=len(refined),
            unended_share=float(unended(refined).sum()) / total,
            refined_correct_share=float(verdicts.correct.sum()) / total,
            kept=len(kept),
            kept_correct_share=float(verdicts.correct[best].sum()) / max(len(kept), 1),
            no_refinement_share=1.0 - len(kept) / max(len(prompts), 1),
        )
        return Outputs(trajectories=Trajectories.concat([originals, kept]))

    def _refine(self, prompts: Prompts, originals: Trajectories, rewards: Rewards, policy: Policy) -> Trajectories:
        settings = self.config
        size = settings.originals
        eligible = (rewards.valid & ~rewards.correct).view(len(prompts), size)
        chosen = [
            row * size + place
            for row, group in enumerate(eligible)
            for place in to_refine(group, settings.refinements).tolist()
        ]
        steps = thought_texts(originals, policy.tokenizer)
        texts = [
            critique_prompt(*problem_of(prompts, i // size), steps[i], False, policy.tokenizer, settings.mode)
            for i in chosen
        ]
        # The draws after those of the originals; prompts without refinements leave theirs unused.
        seed = keyed_seeds(self.context.rng(), prompts.uid, size, settings.refinements)[eligible.any(1)].reshape(-1)
        firsts = originals.select(torch.tensor(chosen, dtype=torch.int64))
        uid = self.context.uids(len(firsts))
        return second_turn(policy, prompts, firsts, texts, seed, settings.sampling(), uid)

    def _under_problem(self, prompts: Prompts, policy: Policy, kept: Trajectories) -> Trajectories:
        tokens = prompts.tokens.select(prompts.index_of(kept.prompt_uid))
        if not len(kept):
            return kept.replace(prompt_tokens=tokens)
        # The recorded log-probs are those under the critique.
        scores = policy.score(tokens, kept.response_tokens, kept.temperature)
        self.context.log(refinement_logprob_change=float((scores.logprobs.values - kept.engine_logprobs.values).mean()))
        return kept.replace(prompt_tokens=tokens, engine_logprobs=scores.logprobs, entropies=scores.entropies)
