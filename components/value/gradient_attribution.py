"""Credit of a segment = gradient × input embedding of the answer's log-prob, summed over its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from components.advantage.segments import segment_of_token
from components.models.load import context_length
from components.value.bank import EMPTY_BANK_SHARE, AnswerSettings, answer_bank
from components.value.boundaries import COST_METRICS, Outputs, boundaries_of, values_from_gains
from pipeline.core.component import Component, Context, same_rows
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Policy, Prompts, Rewards, Segments, SegmentValues, Trajectories


class GradientAttribution(Component):
    """Gain of segment k = Σ_{t in k} Σ_d (∂ log P(y* | response) / ∂e_{t,d}) e_{t,d}, averaged over references; the last value is 0.

    A first-order estimate of what the segment's tokens do to the log-prob of the answer behind the exit text
    (`length_normalise`: per answer token), in nats. One forward and backward pass per reference. Needs an engine with
    gradients: engine.local with `attributions` on. Rows without a reference, or without room for it in the context, get
    0. Redistribute it with `head: softmax`, or
    compare its ranks: nats are not rewards.
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
        """Attributes the log-prob of every reference to the segments of its trajectory."""
        bounds = boundaries_of(trajectories, segments, rewards)
        bank = answer_bank(policy.tokenizer, prompts, trajectories, rewards, self.config)
        row, entry = bank.entries.row_ids, bank.entries.values
        fits = bounds.trunk.lengths[row] + bank.tokens.lengths[entry] <= self._room
        row, entry, reward = row[fits], entry[fits], bank.reward[fits]
        both = bank.tokens.select(entry)
        asked = both.lengths - bank.scored[entry]
        exits, answers = both.slice_rows(torch.zeros_like(asked), asked), both.slice_rows(asked, both.lengths)
        found = policy.attribute(bounds.trunk.select(row).join(exits), answers, trajectories.temperature)
        own = found.slice_rows(bounds.start[row], bounds.trunk.lengths[row]).to(torch.float64)
        scale = reward / bank.scored[entry].clamp(min=1) if self.config.length_normalise else reward
        scale = scale / torch.bincount(row, minlength=len(trajectories)).clamp(min=1)[row]
        tokens = trajectories.response_tokens
        per_token = torch.zeros(len(tokens.values), dtype=torch.float64)
        per_token.index_add_(0, tokens.offsets[:-1][row][own.row_ids] + own.positions, own.values * scale[own.row_ids])
        gain = torch.zeros(len(segments.ends.values), dtype=torch.float64)
        gain.index_add_(0, segment_of_token(segments.ends, tokens), per_token)
        self.context.log(
            scored_tokens=float((bounds.trunk.lengths[row] + both.lengths).sum()),
            generated_tokens=0,
            empty_bank_share=float((bank.entries.lengths == 0).sum()) / max(len(trajectories), 1),
        )
        values = values_from_gains(Jagged(gain, segments.ends.offsets), torch.zeros(len(trajectories)))
        return Outputs(values=SegmentValues(uid=trajectories.uid, values=values))
