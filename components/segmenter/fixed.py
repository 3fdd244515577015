"""Segments of a fixed number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from components.segmenter.thought import SEGMENT_METRICS
from pipeline.core.component import Component, same_rows
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Segments, Trajectories


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Boundaries of each response."""

    segments: Annotated[Segments, same_rows("trajectories")]


def fixed_ends(length: Tensor, tokens: int) -> Jagged:
    """Exclusive ends tokens, 2·tokens, … and the response's `length` [N]; an empty response has none. Int32."""
    counts = (length + tokens - 1) // tokens
    ends = Jagged.from_lengths(torch.zeros(int(counts.sum()), dtype=torch.int64), counts)
    return ends.with_values(torch.minimum((ends.positions + 1) * tokens, length[ends.row_ids]).to(torch.int32))


class Fixed(Component):
    """A cut after every `tokens` tokens; the last segment is what remains."""

    paper = "2505.23564"
    metrics = SEGMENT_METRICS

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Segment length."""

        tokens: int = 64
        """tokens per segment"""

        def __post_init__(self) -> None:
            if self.tokens < 1:
                raise ValueError(f"tokens is {self.tokens}; wanted at least 1 per segment.")

    config: Config

    def run(self, *, trajectories: Trajectories) -> Outputs:
        """Segments every row."""
        ends = fixed_ends(trajectories.response_tokens.lengths, self.config.tokens)
        self.context.log(segments=len(ends.values) / max(len(ends), 1))
        return Outputs(segments=Segments(uid=trajectories.uid, ends=ends))
