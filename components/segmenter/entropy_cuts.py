"""Segments that begin where the policy was least certain."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from creditgraph.components.rollouts.segments import close_segments, rank_in_row
from creditgraph.components.segmenter.base import Outputs, Segmenter
from creditgraph.pipeline.core.handles import known_entropies
from creditgraph.pipeline.core.jagged import Jagged, takes_lists
from creditgraph.pipeline.core.payloads import Trajectories


@takes_lists
def entropy_ends(entropies: Jagged, segments: int, quantile: float = 0.0, min_distance: int = 1) -> Jagged:
    """Exclusive ends, int32, of at most `segments` segments: a cut before each of the tokens of highest entropy.

    The first token begins the first segment and needs no cut. A response with fewer tokens has one segment per token.

    Args:
        entropies: float, one row per response.
        segments: most segments per response.
        quantile: cuts are only before the share 1 − quantile of a response's tokens with the highest entropy (rounded
            up).
        min_distance: fewest tokens per segment; tokens are tried from the highest entropy down, and those too near to a
            cut are skipped. A response with fewer tokens is one segment.
    """
    first = entropies.positions == 0
    rank = rank_in_row(entropies.with_values(entropies.values.masked_fill(first, -torch.inf))).values
    open_places = rank < torch.ceil((1.0 - quantile) * entropies.lengths.double())[entropies.row_ids]
    cut = (rank < segments - 1) & open_places & ~first
    if min_distance > 1:
        cut = _spaced(entropies, rank, open_places & ~first, segments - 1, min_distance)
    counts = entropies.with_values(cut.long()).sum()
    return close_segments(Jagged.from_lengths(entropies.positions[cut].to(torch.int32), counts), entropies.lengths)


def _spaced(entropies: Jagged, rank: Tensor, open_places: Tensor, most: int, distance: int) -> Tensor:
    """bool [total]: the best-ranked open places of each row, at most `most`, at least `distance` from each other and
    from both ends of the row."""
    chosen = torch.zeros(len(rank), dtype=torch.bool)
    bounds = entropies.offsets.tolist()
    for start, end in pairwise(bounds):
        free = open_places[start:end].clone()
        # Segments at both ends of the response must be long enough too.
        free[:distance] = False
        free[max(end - start - distance + 1, 0) :] = False
        for place in torch.argsort(rank[start:end]).tolist() if bool(free.any()) else []:
            if most <= int(chosen[start:end].sum()):
                break
            if bool(free[place]):
                chosen[start + place] = True
                free[max(place - distance + 1, 0) : place + distance] = False
    return chosen


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
        min_distance: int = 1
        """fewest tokens per segment"""

        def __post_init__(self) -> None:
            if self.segments < 1 or self.min_distance < 1:
                raise ValueError(
                    f"expected segments and min_distance ≥ 1, got {self.segments} and {self.min_distance}."
                )
            if not 0 <= self.quantile < 1:
                raise ValueError(f"expected 0 ≤ quantile < 1, got {self.quantile}.")

    config: Config

    def run(self, *, trajectories: Trajectories) -> Outputs:
        """Segments every row by its entropies."""
        settings = self.config
        entropies = trajectories.entropies
        known_entropies(entropies.values, "segmenter.entropy_cuts")
        ends = entropy_ends(entropies, settings.segments, settings.quantile, settings.min_distance)
        return self.outputs(trajectories, ends)
