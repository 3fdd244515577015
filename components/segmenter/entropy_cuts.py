"""Segments that begin where the policy was least certain."""

from dataclasses import dataclass
from typing import Any

import torch

from creditgraph.components.rollouts.segments import close_segments, rank_in_row
from creditgraph.components.segmenter.base import Outputs, Segmenter
from creditgraph.pipeline.core.handles import known_entropies
from creditgraph.pipeline.core.jagged import Jagged, takes_lists
from creditgraph.pipeline.core.payloads import Trajectories


@takes_lists
def entropy_ends(entropies: Jagged, segments: int, quantile: float = 0.0) -> Jagged:
    """Exclusive ends, int32, of at most `segments` segments: a cut before each of the tokens of highest entropy.

    The first token begins the first segment and needs no cut. A response with fewer tokens has one segment per token.

    Args:
        entropies: float, one row per response.
        segments: most segments per response.
        quantile: cuts are only before the share 1 − quantile of a response's tokens with the highest entropy (rounded
            up).
    """
    first = entropies.positions == 0
    rank = rank_in_row(entropies.with_values(entropies.values.masked_fill(first, -torch.inf))).values
    open_places = rank < torch.ceil((1.0 - quantile) * entropies.lengths.double())[entropies.row_ids]
    cut = (rank < segments - 1) & open_places & ~first
    counts = entropies.with_values(cut.long()).sum()
    return close_segments(Jagged.from_lengths(entropies.positions[cut].to(torch.int32), counts), entropies.lengths)


class EntropyCuts(Segmenter):
    """Starts a segment at each of the `segments` − 1 tokens of highest entropy of a response."""

    paper = "2506.01939"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Number of segments, and where they may start."""

        segments: int = 8
        """most segments per response"""
        quantile: float = 0.0
        """tokens below this quantile of their response's entropies start no segment: 0.8 leaves the top fifth"""

        def __post_init__(self) -> None:
            if self.segments < 1:
                raise ValueError(f"expected segments ≥ 1, got {self.segments}.")
            if not 0 <= self.quantile < 1:
                raise ValueError(f"expected 0 ≤ quantile < 1, got {self.quantile}.")

    config: Config

    @classmethod
    def needs_of(cls, config: Any) -> frozenset[str]:
        """Entropies."""
        return frozenset({"entropies"})

    def run(self, *, trajectories: Trajectories) -> Outputs:
        """Segments every row by its entropies."""
        settings = self.config
        entropies = trajectories.entropies
        known_entropies(entropies.values, "segmenter.entropy_cuts")
        ends = entropy_ends(entropies, settings.segments, settings.quantile)
        return self.outputs(trajectories, ends)
