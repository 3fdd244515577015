"""The credit of a segment as the answer likelihood lost when it is removed."""

import torch

from creditgraph.components.value.bank import References, answer_bank
from creditgraph.components.value.boundaries import Boundaries, values_from_gains
from creditgraph.components.value.estimator import AnswerEstimator, log_pooled, log_probability
from creditgraph.components.value.states import states_of
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Trajectories


class LeaveOneOut(AnswerEstimator):
    """Estimates the gain of segment k as P(y* | response) − P(y* | response without segment k).

    The values returned have these differences; the last one is P(y* | response), with y* and P as in
    `value.answer_likelihood` with `immediate`. One forward pass over the rest of the response per segment, so the cost
    grows with the number of segments. A comparison, not a value: removing a segment leaves a text the policy would not
    write. Rows without a reference, or without room for it in the context, get 0.
    """

    def estimate(
        self, policy: Policy, trajectories: Trajectories, bounds: Boundaries, references: References
    ) -> tuple[Jagged, int]:
        """Scores each response whole and once without each of its segments."""
        # Boundary b of a row means the response without the segment before b; the first boundary, the whole response.
        is_first = bounds.place.positions == 0
        lengths = bounds.trunk.lengths[bounds.owner]
        begin = torch.where(is_first, lengths, torch.roll(bounds.at, 1))
        end = torch.where(is_first, lengths, bounds.at)
        states = states_of(policy.tokenizer, bounds, bounds.owner, begin, end)
        # Each boundary is scored with every reference of its trajectory, unless the context has no room for it.
        bank = answer_bank(policy.tokenizer, references, states, self.config)
        fits = states.length[bank.entries.row_ids] + bank.tokens.lengths[bank.entries.values] <= self.room
        place = bank.entries.row_ids[fits]
        entry = bank.entries.values[fits]
        owner = bounds.owner[place]
        before = bounds.trunk.slice_rows(torch.zeros_like(owner), states.begin[place], owner)
        context = before.join(bounds.trunk.slice_rows(states.end[place], states.length[place], owner))
        tokens = bank.tokens.select(entry)
        scores = policy.score(context, tokens, trajectories.temperature)
        normalise = self.config.length_normalise
        logprob = log_probability(scores.logprobs, bank.scored.select(entry), normalise)
        pooled = log_pooled(logprob, bank.reward[fits], place, len(bounds.owner), normalise)
        values = bounds.place.with_values(pooled.exp())
        # The first entry of each row is the whole response, the others lack a segment.
        whole = values.values[values.offsets[:-1]]
        without = values.slice_rows(torch.ones_like(whole, dtype=torch.int64), values.lengths)
        gain = without.with_values(whole[without.row_ids] - without.values)
        return values_from_gains(gain, whole), int((context.lengths + tokens.lengths).sum())
