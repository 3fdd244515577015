"""Credit of a segment = answer likelihood lost when it is removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from components.models.load import context_length
from components.value.answer_likelihood import pooled, tail_probability
from components.value.bank import EMPTY_BANK_SHARE, AnswerSettings, answer_bank
from components.value.boundaries import COST_METRICS, Outputs, boundaries_of, values_from_gains
from pipeline.core.component import Component, Context, same_rows
from pipeline.core.payloads import Policy, Prompts, Rewards, Segments, SegmentValues, Trajectories


class LeaveOneOut(Component):
    """Gain of segment k = P(y* | response) − P(y* | response without segment k); the values given out have these differences.

    The last value is P(y* | response), y* and P as in `value.answer_likelihood` with `immediate`. One forward pass over
    the rest of the response per segment, so its cost grows with the number of segments. A comparison, not a value:
    removing a segment leaves a text the policy would not write. Rows without a reference, or without room for it in the
    context, get 0.
    """

    paper = "2606.06475"
    metrics = (*COST_METRICS, EMPTY_BANK_SHARE)

    @dataclass(frozen=True, kw_only=True)
    class Config(AnswerSettings):
        """The bank."""

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
        """Scores each response whole and once without each of its segments."""
        bounds, settings = boundaries_of(trajectories, segments, rewards), self.config
        bank = answer_bank(policy.tokenizer, prompts, trajectories, rewards, settings)
        # Place b of a row stands for the response without the segment before boundary b; the first place for the whole
        # response.
        first, lengths = bounds.place.positions == 0, bounds.trunk.lengths[bounds.owner]
        begin = torch.where(first, lengths, torch.roll(bounds.at, 1))
        end = torch.where(first, lengths, bounds.at)
        entries = bank.entries.with_values(torch.arange(len(bank.entries.values))).select(bounds.owner)
        place, reference = entries.row_ids, entries.values
        entry = bank.entries.values[reference]
        fits = lengths[place] + bank.tokens.lengths[entry] <= self._room
        place, reference, entry = place[fits], reference[fits], entry[fits]
        owner = bounds.owner[place]
        before = bounds.trunk.slice_rows(torch.zeros_like(owner), begin[place], owner)
        context = before.join(bounds.trunk.slice_rows(end[place], lengths[place], owner))
        tokens = bank.tokens.select(entry)
        scores = policy.score(context, tokens, trajectories.temperature)
        probability = tail_probability(scores.logprobs, bank.scored[entry], settings.length_normalise)
        found = bounds.place.with_values(
            pooled(probability, bank.reward[reference], place, len(bounds.owner), settings.length_normalise)
        )
        whole = found.values[found.offsets[:-1]]
        without = found.slice_rows(torch.ones_like(whole, dtype=torch.int64), found.lengths)
        gain = without.with_values(whole[without.row_ids] - without.values)
        self.context.log(
            scored_tokens=float((context.lengths + tokens.lengths).sum()),
            generated_tokens=0,
            empty_bank_share=float((bank.entries.lengths == 0).sum()) / max(len(trajectories), 1),
        )
        return Outputs(values=SegmentValues(uid=trajectories.uid, values=values_from_gains(gain, whole)))
