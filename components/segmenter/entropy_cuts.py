"""Segments that begin where the policy was least certain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from components.segmenter.thought import close_segments
from pipeline.component import Component, same_rows
from pipeline.jagged import Jagged
from pipeline.payloads import Segments, Trajectories


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Boundaries of each response."""

    segments: Annotated[Segments, same_rows("trajectories")]


def rank_in_row(values: Jagged) -> Jagged:
    """int64: place of each value among those of its row, 0 for the largest; equal values in their order."""
    by_value = torch.argsort(values.values, descending=True, stable=True)
    order = by_value[torch.argsort(values.row_ids[by_value], stable=True)]
    rank = torch.empty_like(order)
    rank[order] = values.positions
    return values.with_values(rank)


def entropy_ends(entropies: Jagged, segments: int) -> Jagged:
    """Exclusive ends of at most `segments` segments: a cut before each of the segments − 1 tokens of highest entropy. Int32.

    The first token opens the first segment anyway and takes no cut. A response with fewer tokens has one segment per token.
    """
    first = entropies.positions == 0
    rank = rank_in_row(entropies.with_values(entropies.values.masked_fill(first, -torch.inf)))
    cut = (rank.values < segments - 1) & ~first
    counts = entropies.with_values(cut.long()).sum()
    return close_segments(Jagged.from_lengths(entropies.positions[cut].to(torch.int32), counts), entropies.lengths)


class EntropyCuts(Component):
    """A cut before the `segments` − 1 most uncertain tokens of each response, where its course was decided."""

    paper = "2506.01939"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Number of segments."""

        segments: int = 8
        """most segments per response"""

        def __post_init__(self) -> None:
            if self.segments < 1:
                raise ValueError(f"segments is {self.segments}; wanted at least 1.")

    config: Config

    def run(self, *, trajectories: Trajectories) -> Outputs:
        """Segments every row by its entropies."""
        ends = entropy_ends(trajectories.entropies, self.config.segments)
        self.context.log(segments=len(ends.values) / max(len(ends), 1))
        return Outputs(segments=Segments(uid=trajectories.uid, ends=ends))
