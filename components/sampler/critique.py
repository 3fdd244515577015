"""Original chains and the best refinement after a critique (Critique-GRPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from components.localizer.self_localizer import question_of
from components.rewards.outcome import finite_rewards
from components.rollouts.requests import LENGTH_METRICS, SamplingSettings, keyed_seeds, length_metrics, sample_fresh
from components.rollouts.second_turn import second_turn, unended
from components.rollouts.thoughts import thought_texts
from components.text.templates import critique_prompt
from pipeline.core.component import Component
from pipeline.core.metric import Metric
from pipeline.core.payloads import Policy, Prompts, Rewards, Trajectories, Verifier


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """All originals, prompt by prompt, then at most one refinement per prompt; `parent` of a refinement is the chain it refines."""

    trajectories: Trajectories


def to_refine(wanted: Tensor, count: int) -> Tensor:
    """Which original each of `count` refinements refines, as places in the group: the wanted ones in turn; empty when none is wanted.

    >>> to_refine(torch.tensor([False, True, True]), 4).tolist()
    [1, 2, 1, 2]
    """
    places = wanted.nonzero(as_tuple=True)[0]
    return places[torch.arange(count) % len(places)] if len(places) else places


def best_of(value: Tensor, usable: Tensor, prompt: Tensor) -> Tensor:
    """Rows of the usable candidate with the highest value of each prompt, the first of equals, int64 [B]; none where none is usable.

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
    """Samples `originals` chains per prompt, then `refinements` chains after a binary critique of them, and keeps the best refinement.

    The refinement joins its prompt's group [S]. Which originals are refined is our reading [R]: the wrong ones in turn,
    or all in turn; a prompt without one has no refinement (counted) and its group has `originals` rows. A refinement
    that does not end or cannot be judged is never the best; among equals the first counts. The paper learns the
    refinement as an answer to the original problem (its released code scores it there without ratio): with `condition:
    original` the refinement's prompt is the problem, and its log-probs and entropies are scored again under that
    prompt, so that they are those of what the learner sees; `refinement` keeps the prompt it was sampled from. For the
    embedded model a refinement is its revise mode with the chain itself as reference [R].
    """

    paper = "2506.03106"
    metrics = (
        *LENGTH_METRICS,
        Metric("wrong", "rows", "originals that are wrong"),
        Metric("refinements", "rows", "refinements sampled"),
        Metric("unended_share", "share", "refinements without an end"),
        Metric("refined_correct_share", "share", "refinements that are right"),
        Metric("kept", "rows", "refinements handed on, at most one per prompt"),
        Metric("kept_correct_share", "share", "kept refinements that are right"),
        Metric("no_refinement_share", "share", "prompts without a kept refinement"),
        Metric(
            "refinement_logprob_change",
            "nats",
            "log-prob of a kept token under the problem alone minus under the critique, mean",
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SamplingSettings):
        """Sampling, group sizes, conditioning."""

        originals: int = 7
        """fresh chains per prompt"""
        refinements: int = 8
        """candidates per prompt, of which one is kept; 0 gives plain groups"""
        refine: Literal["wrong", "all"] = "wrong"
        """originals that are criticised and refined"""
        condition: Literal["original", "refinement"] = "original"
        """prompt that the kept refinement is trained under"""
        only_correct: bool = False
        """keep a refinement only if it is right"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.originals < 1 or self.refinements < 0:
                raise ValueError(
                    f"originals {self.originals}, refinements {self.refinements}; wanted at least 1 and at least 0."
                )

    config: Config

    def run(self, *, prompts: Prompts, policy: Policy, verifier: Verifier) -> Outputs:
        """Samples originals in one request batch and refinements in another."""
        settings, stream, size = self.config, self.context.rng(), self.config.originals
        rows = torch.arange(len(prompts)).repeat_interleave(size)
        seed = keyed_seeds(stream, prompts.uid, 0, size + settings.refinements)
        originals = sample_fresh(
            policy, prompts, rows, seed[:, :size].reshape(-1), settings.sampling(), self.context.uids(len(rows))
        )
        rewards = verifier.verify(prompts, originals)
        chosen, draws = self._candidates(rewards, len(prompts))
        refined = self._refine(prompts, originals, rewards, policy, chosen, seed[:, size:].reshape(-1)[draws])
        verdicts = finite_rewards(verifier.verify(prompts, refined))
        usable = verdicts.valid & ~unended(refined) & (verdicts.correct | (not settings.only_correct))
        best = best_of(verdicts.value, usable, refined.prompt_uid)
        kept = refined.select(best)
        if settings.condition == "original":
            kept = self._under_problem(prompts, policy, kept)
        wrong, total = int((rewards.valid & ~rewards.correct).sum()), max(len(refined), 1)
        self.context.log(
            **length_metrics(Trajectories.concat([originals, refined])),
            wrong=wrong,
            refinements=len(refined),
            unended_share=float(unended(refined).sum()) / total,
            refined_correct_share=float(verdicts.correct.sum()) / total,
            kept=len(kept),
            kept_correct_share=float(verdicts.correct[best].sum()) / max(len(kept), 1),
            no_refinement_share=1.0 - len(kept) / max(len(prompts), 1),
        )
        return Outputs(trajectories=Trajectories.concat([originals, kept]))

    def _candidates(self, rewards: Rewards, count: int) -> tuple[Tensor, Tensor]:
        """Rows of the originals to refine, and the place of each refinement's draw in the flattened table [count × refinements]."""
        size, many = self.config.originals, self.config.refinements
        wanted = rewards.valid & ~rewards.correct if self.config.refine == "wrong" else rewards.valid
        rows, draws = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
        for i in range(count if many else 0):
            part = slice(i * size, (i + 1) * size)
            places = to_refine(wanted[part], many)
            rows.append(i * size + places)
            draws.append(i * many + torch.arange(len(places)))
        return torch.cat(rows), torch.cat(draws)

    def _refine(
        self, prompts: Prompts, originals: Trajectories, rewards: Rewards, policy: Policy, chosen: Tensor, seed: Tensor
    ) -> Trajectories:
        steps = thought_texts(originals, policy.tokenizer)
        at = prompts.index_of(originals.prompt_uid).tolist()
        asked = [
            critique_prompt(
                prompts.metadata[at[i]],
                question_of(prompts, at[i]),
                steps[i],
                bool(rewards.correct[i]),
                policy.tokenizer,
            )
            for i in chosen.tolist()
        ]
        uid = self.context.uids(len(chosen))
        return second_turn(policy, prompts, originals.select(chosen), asked, seed, self.config.sampling(), uid)

    def _under_problem(self, prompts: Prompts, policy: Policy, kept: Trajectories) -> Trajectories:
        tokens = prompts.tokens.select(prompts.index_of(kept.prompt_uid))
        if not len(kept):
            return kept.replace(prompt_tokens=tokens)
        scores = policy.score(tokens, kept.response_tokens, kept.temperature)
        self.context.log(refinement_logprob_change=float((scores.logprobs.values - kept.engine_logprobs.values).mean()))
        return kept.replace(prompt_tokens=tokens, engine_logprobs=scores.logprobs, entropies=scores.entropies)
