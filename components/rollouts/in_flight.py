"""Rollouts that span several iterations: their state between iterations, and their continuation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from components.rollouts.requests import scatter_rows, unsampled
from pipeline.core.handles import Policy, Progress, Requests, Sampling
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Prompts, Trajectories


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Groups between two iterations, including their rollouts that have ended.

    Attributes:
        prompts: P of them.
        rows: one per rollout [N], prompt by prompt; an unfinished one has the finish reason "" and no text.
        seed: int64 [N], seed of the rollout's random stream.
    """

    prompts: Prompts
    rows: Trajectories
    seed: Tensor

    @staticmethod
    def concat(parts: Sequence[InFlight]) -> InFlight:
        """All groups, in order."""
        return InFlight(
            prompts=Prompts.concat([p.prompts for p in parts]),
            rows=Trajectories.concat([p.rows for p in parts]),
            seed=torch.cat([p.seed for p in parts]),
        )

    @property
    def unfinished(self) -> Tensor:
        """bool [N]: rollouts that have not ended."""
        return torch.tensor([not reason for reason in self.rows.finish_reason], dtype=torch.bool)

    def any_of_prompt(self, flags: Tensor) -> Tensor:
        """bool [P]: prompts of which any rollout's flag [N] holds."""
        counts = torch.zeros(len(self.prompts), dtype=torch.int64)
        return counts.index_add(0, self.prompts.index_of(self.rows.prompt_uid), flags.to(torch.int64)) > 0

    def in_order(self) -> InFlight:
        """The groups by the uid of their prompts, which is the order in which they began."""
        order = torch.argsort(self.prompts.uid)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        rows = torch.argsort(place[self.prompts.index_of(self.rows.prompt_uid)], stable=True)
        return InFlight(prompts=self.prompts.select(order), rows=self.rows.select(rows), seed=self.seed[rows])

    def select(self, chosen: Tensor) -> InFlight:
        """The groups of some prompts, bool [P]."""
        rows = chosen[self.prompts.index_of(self.rows.prompt_uid)].nonzero()[:, 0]
        return InFlight(prompts=self.prompts.select(chosen), rows=self.rows.select(rows), seed=self.seed[rows])


def begin(prompts: Prompts, rows: Tensor, seed: Tensor, uid: Tensor, version: int, temperature: float) -> InFlight:
    """Rollouts without a token yet, with int64 [N] request seeds; see `unsampled` for the other arguments."""
    empty = unsampled(prompts, rows, uid, version, temperature)
    return InFlight(prompts=prompts, rows=empty.replace(token_versions=empty.response_tokens), seed=seed)


def continued(flight: InFlight, policy: Policy, sampling: Sampling, pause: Tensor | None) -> tuple[InFlight, Tensor]:
    """Continues every unfinished rollout; also returns int64 [N], the new tokens of each.

    Args:
        flight: the groups.
        policy: policy that samples; with a pause, its `continues` must be true.
        sampling: how tokens are drawn; its limits count whole rollouts.
        pause: int64 [N], new tokens after which a rollout is left unfinished; None finishes rollouts that have just
            begun.
    """
    rows = flight.rows
    count = len(rows)
    index = flight.unfinished.nonzero()[:, 0]
    if not len(index):
        return flight, torch.zeros(count, dtype=torch.int64)
    part = rows.select(index)
    done = policy.generate(
        Requests(
            tokens=part.prompt_tokens,
            seed=flight.seed[index],
            sampling=sampling,
            progress=None if pause is None else Progress(tokens=part.response_tokens, thought_ends=part.thought_ends),
            pause=None if pause is None else pause[index],
        )
    )
    new_tokens = scatter_rows(done.tokens, index, count)
    new_versions = new_tokens.with_values(torch.full_like(new_tokens.values, policy.version))
    # Engines return all thought ends of a continued row, so they replace the earlier ones.
    ends_from = torch.arange(count)
    ends_from[index] = count + torch.arange(len(index))
    reasons = list(rows.finish_reason)
    texts = list(rows.text)
    lengths_before = part.response_tokens.lengths.tolist()
    for place, reason, text, before in zip(index.tolist(), done.finish_reason, done.text, lengths_before, strict=True):
        reasons[place] = "" if reason == "paused" else reason
        # The engine decodes new tokens alone, which is the text of the row only if it had none before.
        texts[place] = text if reasons[place] and not before else ""
    grown = rows.replace(
        response_tokens=rows.response_tokens.join(new_tokens),
        engine_logprobs=rows.engine_logprobs.join(scatter_rows(done.logprobs, index, count)),
        entropies=rows.entropies.join(scatter_rows(done.entropies, index, count)),
        thought_ends=Jagged.concat([rows.thought_ends, done.thought_ends]).select(ends_from),
        token_versions=rows.versions_by_token().join(new_versions),
        finish_reason=reasons,
        text=texts,
    )
    return InFlight(prompts=flight.prompts, rows=grown, seed=flight.seed), new_tokens.lengths


def rescored(rows: Trajectories, policy: Policy) -> tuple[Trajectories, int]:
    """Replaces log-probs and entropies of tokens of older weights by those of `policy`; also returns their number."""
    stale = rows.versions_by_token().values < policy.version
    has_stale = rows.response_tokens.with_values(stale).sum() > 0
    if not bool(has_stale.any()):
        return rows, 0
    part = rows.select(has_stale)
    scores = policy.score(part.prompt_tokens, part.response_tokens, rows.temperature)
    stale_in_part = part.versions_by_token().values < policy.version  # the same tokens in the same order
    logprobs = rows.engine_logprobs.values.clone()
    logprobs[stale] = scores.logprobs.values[stale_in_part]
    entropies = rows.entropies.values.clone()
    entropies[stale] = scores.entropies.values[stale_in_part]
    changed = rows.replace(
        engine_logprobs=rows.engine_logprobs.with_values(logprobs), entropies=rows.entropies.with_values(entropies)
    )
    return changed, int(stale.sum())
