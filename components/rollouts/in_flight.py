"""Rollouts that are not finished: their state between iterations, and how they go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from components.rollouts.requests import scatter_rows
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Policy, Progress, Prompts, Requests, Sampling, Trajectories


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Groups between two iterations, with whatever rollouts of theirs have ended.

    Attributes:
        prompts: P of them.
        rows: one per rollout [N], prompt by prompt; one that has not ended has the finish reason "" and no text.
        seed: int64 [N], of the rollout's random stream.
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

    def waiting(self) -> Tensor:
        """bool [P]: prompts with an unfinished rollout."""
        return self.any_of_prompt(self.unfinished)

    def any_of_prompt(self, flags: Tensor) -> Tensor:
        """bool [P]: prompts of which any rollout's flag [N] holds."""
        counted = torch.zeros(len(self.prompts), dtype=torch.int64)
        return counted.index_add(0, self.prompts.index_of(self.rows.prompt_uid), flags.to(torch.int64)) > 0

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


def begin(prompts: Prompts, row: Tensor, seed: Tensor, uid: Tensor, version: int, temperature: float) -> InFlight:
    """Rollouts without any token yet.

    Args:
        prompts: the problems.
        row: int64 [N], the prompt row of each rollout, ascending.
        seed: int64 [N], request seeds.
        uid: int64 [N], ids of the trajectories.
        version: of the weights that will sample their first tokens.
        temperature: see `Trajectories`.
    """
    count, prompt_uid = len(row), prompts.uid[row]
    none = Jagged.from_lengths(torch.zeros(0), torch.zeros(count, dtype=torch.int64))
    rows = Trajectories(
        uid=uid,
        prompt_uid=prompt_uid,
        group=prompt_uid.clone(),
        parent=torch.full_like(uid, -1),
        prompt_tokens=prompts.tokens.select(row),
        response_tokens=none.to(torch.int32),
        inherited=torch.zeros_like(uid),
        engine_logprobs=none,
        entropies=none,
        thought_ends=none.to(torch.int32),
        policy_version=torch.full_like(uid, version),
        finish_reason=[""] * count,
        text=[""] * count,
        temperature=temperature,
        token_versions=none.to(torch.int32),
    )
    return InFlight(prompts=prompts, rows=rows, seed=seed)


def grown(flight: InFlight, policy: Policy, sampling: Sampling, pause: Tensor | None) -> tuple[InFlight, Tensor]:
    """Lets every unfinished rollout go on; also returns int64 [N], the tokens that each has got.

    Args:
        flight: the groups.
        policy: what samples; `continues` must hold of it when there is a pause.
        sampling: how tokens are drawn; its limits count whole rollouts.
        pause: int64 [N], new tokens after which a rollout is left unfinished; None finishes rollouts that have just
            begun.
    """
    rows, count = flight.rows, len(flight.rows)
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
    fresh = scatter_rows(done.tokens, index, count)
    reasons, texts = list(rows.finish_reason), list(rows.text)
    for place, reason, text, begun in zip(
        index.tolist(), done.finish_reason, done.text, part.response_tokens.lengths.tolist(), strict=True
    ):
        reasons[place] = "" if reason == "paused" else reason
        texts[place] = text if reasons[place] and not begun else ""
    ends = torch.arange(count)
    ends[index] = count + torch.arange(len(index))
    rows = rows.replace(
        response_tokens=rows.response_tokens.join(fresh),
        engine_logprobs=rows.engine_logprobs.join(scatter_rows(done.logprobs, index, count)),
        entropies=rows.entropies.join(scatter_rows(done.entropies, index, count)),
        thought_ends=Jagged.concat([rows.thought_ends, done.thought_ends]).select(ends),
        token_versions=rows.versions_by_token().join(fresh.with_values(torch.full_like(fresh.values, policy.version))),
        finish_reason=reasons,
        text=texts,
    )
    return InFlight(prompts=flight.prompts, rows=rows, seed=flight.seed), fresh.lengths


def rescored(rows: Trajectories, policy: Policy) -> tuple[Trajectories, int]:
    """Log-probs and entropies of the present weights for tokens that older ones sampled; also returns how many those are."""
    stale = rows.versions_by_token().values < policy.version
    late = (rows.response_tokens.with_values(stale).sum() > 0).nonzero()[:, 0]
    if not len(late):
        return rows, 0
    part = rows.select(late)
    scores = policy.score(part.prompt_tokens, part.response_tokens, rows.temperature)
    mine = part.versions_by_token().values < policy.version  # the same tokens in the same order
    logprobs, entropies = rows.engine_logprobs.values.clone(), rows.entropies.values.clone()
    logprobs[stale], entropies[stale] = scores.logprobs.values[mine], scores.entropies.values[mine]
    changed = rows.replace(
        engine_logprobs=rows.engine_logprobs.with_values(logprobs), entropies=rows.entropies.with_values(entropies)
    )
    return changed, int(stale.sum())
