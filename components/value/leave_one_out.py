"""The credit of a segment as the answer likelihood lost when it is removed."""

from __future__ import annotations

import torch

from components.value.answer_likelihood import pooled, tail_probability
from components.value.bank import AnswerEstimator, Bank
from components.value.boundaries import Boundaries, values_from_gains
from pipeline.core.handles import Policy
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Trajectories


class LeaveOneOut(AnswerEstimator):
    """Estimates the gain of segment k as P(y* | response) − P(y* | response without segment k).

    The values returned have these differences; the last one is P(y* | response), with y* and P as in
    `value.answer_likelihood` with `immediate`. One forward pass over the rest of the response per segment, so the cost
    grows with the number of segments. A comparison, not a value: removing a segment leaves a text the policy would not
    write. Rows without a reference, or without room for it in the context, get 0.
    """

    def estimate(
        self, policy: Policy, trajectories: Trajectories, bounds: Boundaries, bank: Bank
    ) -> tuple[Jagged, int]:
        """Scores each response whole and once without each of its segments."""
        # Boundary b of a row means the response without the segment before b; the first boundary, the whole response.
        is_first = bounds.place.positions == 0
        lengths = bounds.trunk.lengths[bounds.owner]
        begin = torch.where(is_first, lengths, torch.roll(bounds.at, 1))
        end = torch.where(is_first, lengths, bounds.at)
        # Each boundary is scored with every reference of its trajectory, unless the context has no room for it.
        references = bank.select(bounds.owner)
        fits = lengths[references.entries.row_ids] + bank.tokens.lengths[references.entries.values] <= self.room
        place = references.entries.row_ids[fits]
        entry = references.entries.values[fits]
        owner = bounds.owner[place]
        before = bounds.trunk.slice_rows(torch.zeros_like(owner), begin[place], owner)
        context = before.join(bounds.trunk.slice_rows(end[place], lengths[place], owner))
        tokens = bank.tokens.select(entry)
        scores = policy.score(context, tokens, trajectories.temperature)
        normalise = self.config.length_normalise
        probability = tail_probability(scores.logprobs, bank.scored[entry], normalise)
        values = bounds.place.with_values(
            pooled(probability, references.reward[fits], place, len(bounds.owner), normalise)
        )
        # The first entry of each row is the whole response, the others lack a segment.
        whole = values.values[values.offsets[:-1]]
        without = values.slice_rows(torch.ones_like(whole, dtype=torch.int64), values.lengths)
        gain = without.with_values(whole[without.row_ids] - without.values)
        return values_from_gains(gain, whole), int((context.lengths + tokens.lengths).sum())
