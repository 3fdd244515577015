"""Segments of a fixed number of tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from creditgraph.components.segmenter.base import Outputs, Segmenter
from creditgraph.pipeline.core.jagged import Jagged, takes_lists
from creditgraph.pipeline.core.payloads import Trajectories


@takes_lists
def fixed_ends(length: Tensor, tokens: int) -> Jagged:
    """Exclusive ends tokens, 2·tokens, … and the response's `length` [N]; an empty response has none. Int32."""
    counts = (length + tokens - 1) // tokens
    ends = Jagged.from_lengths(torch.zeros(int(counts.sum()), dtype=torch.int64), counts)
    return ends.with_values(torch.minimum((ends.positions + 1) * tokens, length[ends.row_ids]).to(torch.int32))


class Fixed(Segmenter):
    """Ends a segment after every `tokens` tokens; the last segment is the rest."""

    paper = "2505.23564"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Segment length."""

        tokens: int = 64
        """tokens per segment"""

        def __post_init__(self) -> None:
            if self.tokens < 1:
                raise ValueError(f"expected tokens ≥ 1, got {self.tokens}.")

    config: Config

    def run(self, *, trajectories: Trajectories) -> Outputs:
        """Segments every row."""
        return self.outputs(trajectories, fixed_ends(trajectories.response_tokens.lengths, self.config.tokens))
