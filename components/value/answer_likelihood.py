"""Value of a state = probability of reference answers or solutions behind it, without generation (RREDCoT)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from components.models.load import context_length
from components.value.bank import EMPTY_BANK_SHARE, AnswerSettings, Bank, answer_bank, continuation_bank
from components.value.boundaries import (
    COST_METRICS,
    VALUE_METRICS,
    Boundaries,
    Outputs,
    boundaries_of,
    branch_tokens,
    shared_sequences,
)
from pipeline.core.component import Component, Context, same_rows
from pipeline.core.errors import ConfigError
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Policy, Prompts, Rewards, Segments, SegmentValues, Trajectories


def tail_probability(logprobs: Jagged, scored: Tensor, length_normalise: bool) -> Tensor:
    """Probability of the last `scored` [B] tokens of each row, or its geometric mean per token; float64 [B]."""
    tail = logprobs.to(torch.float64).slice_rows(logprobs.lengths - scored, logprobs.lengths)
    total = tail.sum()
    return torch.exp(total / scored.clamp(min=1) if length_normalise else total)


def pooled(probability: Tensor, reward: Tensor, place: Tensor, num_places: int, length_normalise: bool) -> Tensor:
    """v̂ of each place, float64 [P]: Σ p ζ over its references, which are disjoint events, or their mean for normalised p.

    Args:
        probability, reward: float64 [B], p and ζ of each reference.
        place: int64 [B], the place each belongs to; a place without references gets 0.
        num_places: P.
        length_normalise: mean instead of sum.
    """
    total = torch.zeros(num_places, dtype=torch.float64).index_add_(0, place, probability * reward)
    return total / torch.bincount(place, minlength=num_places).clamp(min=1) if length_normalise else total


def carried(values: Tensor, known: Tensor, rows: Jagged) -> Tensor:
    """`values` [B] with the last known value of the row repeated behind it; `known` bool [B] is True first, then False
    in each row."""
    last = rows.with_values(known.long()).sum() - 1
    source = rows.offsets[:-1][rows.row_ids] + torch.minimum(rows.positions, last.clamp(min=0)[rows.row_ids])
    return torch.where(last[rows.row_ids] >= 0, values[source], 0.0)


class AnswerLikelihood(Component):
    """v̂(s) = Σ_{(u, y) in bank} w p(u, y | s) ζ(y), teacher-forced, all boundaries of a trajectory off one prefill.

    - `immediate` (default, reconstruction): u is the exit text, whose own probability is left out: P(y | s, exit text).
    - `continuation`: (u, y) is what a correct trajectory of the same problem writes behind as many thoughts as s holds.
    At the end of
      a response nothing follows: the value is ζ of a correct response, else 0. Cut boundaries at thoughts.
    - `sum`: both, at most 1.

    Second-hand: the bank is the dataset's answer or, without one, the answers of the group's own correct trajectories;
    the formula. Reconstruction: `immediate`, geometric means, w (1 over distinct references; 1/N of geometric means),
    the alignment by thoughts. Without normalisation `continuation` is biased low unless the bank holds every rewarded
    continuation: E[v̂] ≤ v. Geometric means keep long answers comparable but are no bound. An empty bank gives 0
    everywhere, hence no gains and uniform redistribution. A state that leaves no room for exit text and answer in the
    context keeps the value before it.
    """

    paper = "2606.06475"
    metrics = (
        *VALUE_METRICS,
        *COST_METRICS,
        EMPTY_BANK_SHARE,
        Metric(
            "no_room",
            "boundaries",
            "boundaries after which the reference did not fit the context; they take the value before",
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(AnswerSettings):
        """The bank and the form of the value."""

        value: Literal["immediate", "continuation", "sum"] = "immediate"
        """answer at once, rest of a correct solution (needs rewards), or both"""

    config: Config

    def setup(self, context: Context) -> None:
        """Reads the model's context length."""
        super().setup(context)
        self._room = context_length(context.model)

    def run(
        self,
        *,
        prompts: Prompts,
        trajectories: Trajectories,
        segments: Annotated[Segments, same_rows("trajectories")],
        policy: Policy,
        rewards: Annotated[Rewards, same_rows("trajectories")] | None = None,
    ) -> Outputs:
        """Scores all boundaries of all trajectories."""
        bounds, settings = boundaries_of(trajectories, segments, rewards), self.config
        total, tokens, empty = (
            torch.zeros(len(bounds.owner), dtype=torch.float64),
            0,
            torch.ones(len(trajectories), dtype=torch.bool),
        )
        if settings.value != "continuation":
            bank = answer_bank(policy.tokenizer, prompts, trajectories, rewards, settings)
            reward = bank.entries.with_values(bank.reward).select(bounds.owner)
            found, known, cost = self._scored(
                policy, bounds, bank, bank.entries.select(bounds.owner), reward, trajectories.temperature
            )
            total += carried(found, known, bounds.place)
            tokens, empty = tokens + cost, empty & (bank.entries.lengths == 0)
            self.context.log(no_room=float((~known).sum()))
        if settings.value != "immediate":
            if rewards is None:
                raise ConfigError(
                    f"node '{self.context.node}': value is '{settings.value}', which takes continuations from correct "
                    "trajectories, but no "
                    "rewards are wired; wanted an input 'rewards'. Wire rewards.rewards or set value to 'immediate'."
                )
            bank = continuation_bank(trajectories, rewards, bounds.place, settings.references)
            reward = bank.entries.with_values(bank.reward)
            found, _, cost = self._scored(policy, bounds, bank, bank.entries, reward, trajectories.temperature)
            ended = torch.where(rewards.correct & rewards.valid, rewards.value.double(), 0.0)[bounds.owner]
            total += torch.where(bounds.last, ended, found)
            held = torch.zeros(len(trajectories), dtype=torch.int64).index_add_(0, bounds.owner, bank.entries.lengths)
            tokens, empty = tokens + cost, empty & (held == 0)
        if settings.value == "sum":
            total = total.clamp(max=1.0)
        count = max(len(total), 1)
        self.context.log(
            mean=float(total.sum()) / count,
            boundaries=len(total),
            scored_tokens=tokens,
            generated_tokens=0,
            empty_bank_share=float(empty.sum()) / max(len(empty), 1),
        )
        return Outputs(values=SegmentValues(uid=trajectories.uid, values=bounds.place.with_values(total.float())))

    def _scored(
        self, policy: Policy, bounds: Boundaries, bank: Bank, entries: Jagged, reward: Jagged, temperature: float
    ) -> tuple[Tensor, Tensor, int]:
        """v̂ at each boundary [B], whether all its references fit the context [B], and the tokens run; `entries` has B
        rows."""
        place, entry = entries.row_ids, entries.values
        row, at = bounds.owner[place], bounds.at[place]
        fits = at + bank.tokens.lengths[entry] <= self._room
        known = torch.ones(len(entries), dtype=torch.bool)
        known[place[~fits]] = False
        row, at, entry = row[fits], at[fits], entry[fits]
        once, member = shared_sequences(bounds.trunk, row, at, bank.tokens.select(entry))
        tokens = bank.tokens.select(entry[once])
        scores = policy.score_branches(bounds.trunk, row[once], at[once], tokens, temperature)
        probability = torch.zeros(len(place), dtype=torch.float64)
        probability[fits] = tail_probability(
            scores.logprobs.select(member), bank.scored[entry], self.config.length_normalise
        )
        found = pooled(probability, reward.values, place, len(entries), self.config.length_normalise)
        return found, known, branch_tokens(row[once], at[once], tokens)
