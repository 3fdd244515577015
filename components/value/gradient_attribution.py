"""The credit of a segment as gradient × input embedding of the answer's log-prob, summed over its tokens."""

import torch

from creditgraph.components.rollouts.segments import segment_of_token
from creditgraph.components.value.bank import References, answer_bank
from creditgraph.components.value.boundaries import Boundaries, values_from_gains
from creditgraph.components.value.estimator import AnswerEstimator
from creditgraph.components.value.states import states_of
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Trajectories


class GradientAttribution(AnswerEstimator):
    """Estimates the gain of segment k as Σ_{t in k} Σ_d (∂ log P(y* | response) / ∂e_{t,d}) e_{t,d}.

    It is averaged over references y*; the last value is 0. It is a first-order estimate of the effect of the segment's
    tokens on the log-prob of the answer after the exit text (`length_normalise`: per answer token), in nats, with one
    forward and backward pass per reference. It requires engine.local with `attributions` on. Rows without a reference,
    or without room for it in the context, get 0. Nats are not rewards: `advantage.redistribute`, where units cancel,
    can read these values, and `advantage.gae` cannot.
    """

    def estimate(
        self, policy: Policy, trajectories: Trajectories, bounds: Boundaries, references: References
    ) -> tuple[Jagged, int]:
        """Attributes the log-prob of every reference to the segments of its trajectory."""
        whole = torch.arange(len(trajectories))
        states = states_of(policy.tokenizer, bounds, whole, bounds.trunk.lengths, bounds.trunk.lengths)
        bank = answer_bank(policy.tokenizer, references, states, self.config)
        fits = states.begin[bank.entries.row_ids] + bank.tokens.lengths[bank.entries.values] <= self.room
        row = bank.entries.row_ids[fits]
        entry = bank.entries.values[fits]
        texts = bank.tokens.select(entry)
        scored = bank.scored.sum()[entry]
        exit_length = texts.lengths - scored
        exits = texts.slice_rows(torch.zeros_like(exit_length), exit_length)
        answers = texts.slice_rows(exit_length, texts.lengths)
        length = states.begin[row]
        context = bounds.trunk.slice_rows(torch.zeros_like(length), length, row)
        products = policy.attribute(context.join(exits), answers, trajectories.temperature)
        own = products.slice_rows(bounds.start[row], length).to(torch.float64)
        scale = bank.reward[fits]
        if self.config.length_normalise:
            scale = scale / scored.clamp(min=1)
        scale = scale / torch.bincount(row, minlength=len(trajectories)).clamp(min=1)[row]
        tokens = trajectories.response_tokens
        per_token = torch.zeros(len(tokens.values), dtype=torch.float64)
        per_token.index_add_(0, tokens.offsets[:-1][row][own.row_ids] + own.positions, own.values * scale[own.row_ids])
        ends = bounds.ends
        gain = torch.zeros(len(ends.values), dtype=torch.float64)
        gain.index_add_(0, segment_of_token(ends, tokens), per_token)
        values = values_from_gains(ends.with_values(gain), torch.zeros(len(trajectories)))
        return values, int((length + texts.lengths).sum())
