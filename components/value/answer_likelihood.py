"""The value of a state as the probability of reference answers or solutions after it, without generation (RREDCoT)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from components.value.bank import AnswerEstimator, AnswerSettings, Bank, answer_bank, continuation_bank
from components.value.boundaries import (
    VALUE_METRICS,
    Boundaries,
    Outputs,
    boundaries_of,
    branch_tokens,
    shared_sequences,
)
from pipeline.core.component import same_rows
from pipeline.core.errors import ConfigError
from pipeline.core.handles import Policy
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Prompts, Rewards, Segments, SegmentValues, Trajectories


@dataclass(frozen=True, eq=False, kw_only=True)
class _Scored:
    """Values of boundaries, and the number of tokens that estimating them cost.

    Attributes:
        value: float64 [B], v̂ of each boundary.
        known: bool [B], whether all of its references fit into the context.
        tokens: number of tokens that went through the model.
    """

    value: Tensor
    known: Tensor
    tokens: int


def tail_probability(logprobs: Jagged, scored: Tensor, length_normalise: bool) -> Tensor:
    """Probability of the last `scored` [B] tokens of each row, or its geometric mean per token; float64 [B]."""
    tail = logprobs.to(torch.float64).slice_rows(logprobs.lengths - scored, logprobs.lengths)
    total = tail.sum()
    return torch.exp(total / scored.clamp(min=1) if length_normalise else total)


def pooled(probability: Tensor, reward: Tensor, place: Tensor, num_places: int, length_normalise: bool) -> Tensor:
    """v̂ of each place, float64 [P]: Σ p ζ over its references, which are disjoint events; their mean for normalised p.

    Args:
        probability, reward: float64 [B], p and ζ of each reference.
        place: int64 [B], the place each belongs to; a place without references gets 0.
        num_places: P.
        length_normalise: mean instead of sum.
    """
    total = torch.zeros(num_places, dtype=torch.float64).index_add_(0, place, probability * reward)
    return total / torch.bincount(place, minlength=num_places).clamp(min=1) if length_normalise else total


def carried(values: Tensor, known: Tensor, rows: Jagged) -> Tensor:
    """`values` [B] with the last known value of each row repeated after it.

    `known` bool [B] is True up to some place of each row and False after it; a row without a known value gets 0.
    """
    last = rows.with_values(known.long()).sum() - 1
    source = rows.offsets[:-1][rows.row_ids] + torch.minimum(rows.positions, last.clamp(min=0)[rows.row_ids])
    return torch.where(last[rows.row_ids] >= 0, values[source], 0.0)


class AnswerLikelihood(AnswerEstimator):
    """Estimates v̂(s) = Σ_{(u, y) in bank} w p(u, y | s) ζ(y) by scoring reference texts (u, y) after the state.

    All boundaries of a trajectory are scored with one prefill.

    - `immediate` (default, our reconstruction): u is the exit text, whose own probability is left out: P(y | s, exit
      text).
    - `continuation`: (u, y) is the rest of a correct trajectory of the same problem, after as many thoughts as s has.
      At the end of a response nothing follows: the value is ζ of a correct response, else 0. End segments at thoughts.
    - `sum`: both, at most 1.

    Second-hand: the bank is the dataset's answer or, without one, the answers of the group's own correct trajectories;
    the formula. Our reconstruction: `immediate`, geometric means, w (1 over distinct references; 1/N of geometric
    means), the alignment by thoughts.

    Without normalisation `continuation` is biased low unless the bank holds every rewarded continuation: E[v̂] ≤ v.
    Geometric means keep long answers comparable but are no bound. An empty bank gives 0 everywhere, hence no gains and
    uniform redistribution. A state without room for exit text and answer in the context has the value of the previous
    one.
    """

    metrics = (
        *VALUE_METRICS,
        *AnswerEstimator.metrics,
        Metric(
            "no_room",
            "boundaries",
            "boundaries without room for a reference in the context, which have the value of the previous one",
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(AnswerSettings):
        """The bank and the form of the value."""

        value: Literal["immediate", "continuation", "sum"] = "immediate"
        """probability of the answer at once, of the rest of a correct solution (requires rewards), or of both"""

    config: Config

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
        settings = self.config
        bounds = boundaries_of(trajectories, segments, rewards)
        value = torch.zeros(len(bounds.owner), dtype=torch.float64)
        empty = torch.ones(len(trajectories), dtype=torch.bool)
        tokens = 0
        if settings.value != "continuation":
            bank = answer_bank(policy.tokenizer, prompts, trajectories, rewards, settings)
            scored = self._score(policy, bounds, bank.select(bounds.owner), trajectories.temperature)
            value += carried(scored.value, scored.known, bounds.place)
            tokens += scored.tokens
            empty &= bank.entries.lengths == 0
            self.context.log(no_room=float((~scored.known).sum()))
        if settings.value != "immediate":
            if rewards is None:
                raise ConfigError(
                    f"node '{self.context.node}': value '{settings.value}' takes continuations from correct "
                    "trajectories and expected an input 'rewards', but none is wired. Wire rewards.rewards, or set "
                    "value to 'immediate'."
                )
            bank = continuation_bank(trajectories, rewards, bounds.place, settings.references)
            scored = self._score(policy, bounds, bank, trajectories.temperature)
            ended = torch.where(rewards.correct & rewards.valid, rewards.value.double(), 0.0)[bounds.owner]
            value += torch.where(bounds.last, ended, scored.value)
            tokens += scored.tokens
            num_entries = bounds.place.with_values(bank.entries.lengths).sum()
            empty &= num_entries == 0
        if settings.value == "sum":
            # The two terms are probabilities of overlapping events.
            value = value.clamp(max=1.0)
        self.log_cost(tokens, empty)
        self.context.log(mean=float(value.sum()) / max(len(value), 1), boundaries=len(value))
        return Outputs(values=SegmentValues(uid=trajectories.uid, values=bounds.place.with_values(value.float())))

    def _score(self, policy: Policy, bounds: Boundaries, bank: Bank, temperature: float) -> _Scored:
        """Scores the references of each boundary; `bank.entries` has one row per boundary."""
        place = bank.entries.row_ids
        fits = bounds.at[place] + bank.tokens.lengths[bank.entries.values] <= self.room
        known = torch.ones(len(bank.entries), dtype=torch.bool)
        known[place[~fits]] = False
        row = bounds.owner[place[fits]]
        at = bounds.at[place[fits]]
        entry = bank.entries.values[fits]
        # Responses of one prompt often begin alike: equal sequences are scored once.
        once, member = shared_sequences(bounds.trunk, row, at, bank.tokens.select(entry))
        tokens = bank.tokens.select(entry[once])
        scores = policy.score_branches(bounds.trunk, row[once], at[once], tokens, temperature)
        normalise = self.config.length_normalise
        probability = torch.zeros(len(place), dtype=torch.float64)
        probability[fits] = tail_probability(scores.logprobs.select(member), bank.scored[entry], normalise)
        value = pooled(probability, bank.reward, place, len(bank.entries), normalise)
        return _Scored(value=value, known=known, tokens=branch_tokens(row[once], at[once], tokens))
