"""Segments that begin where the policy was least certain."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor

from components.segmenter.thought import SEGMENT_METRICS, close_segments
from pipeline.core.component import Component, same_rows
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Segments, Trajectories, known_entropies


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


def entropy_ends(entropies: Jagged, segments: int, quantile: float = 0.0, min_distance: int = 1) -> Jagged:
    """Exclusive ends of at most `segments` segments: a cut before each of the segments − 1 tokens of highest entropy. Int32.

    The first token opens the first segment anyway and takes no cut. A response with fewer tokens has one segment per
    token.

    Args:
        entropies: float, one row per response.
        segments: most segments per response.
        quantile: only the share 1 − quantile of a response's tokens with the highest entropy (rounded up) may take a
            cut.
        min_distance: fewest tokens per segment; tokens are tried from the highest entropy down, one that is too near to
            a cut is passed over. A response with fewer tokens is one segment.
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
    """bool [total]: the best-ranked open places of each row, at most `most`, no two segments' ends nearer than
    `distance`."""
    chosen = torch.zeros(len(rank), dtype=torch.bool)
    bounds = entropies.offsets.tolist()
    for start, end in pairwise(bounds):
        free = open_places[start:end].clone()
        free[:distance] = False
        free[max(end - start - distance + 1, 0) :] = False
        for place in torch.argsort(rank[start:end]).tolist() if bool(free.any()) else []:
            if most <= int(chosen[start:end].sum()):
                break
            if bool(free[place]):
                chosen[start + place] = True
                free[max(place - distance + 1, 0) : place + distance] = False
    return chosen


class EntropyCuts(Component):
    """A cut before the `segments` − 1 most uncertain tokens of each response, where its course was decided."""

    paper = "2506.01939"
    metrics = SEGMENT_METRICS

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Number of cuts, and where they may be."""

        segments: int = 8
        """most segments per response"""
        quantile: float = 0.0
        """tokens below this quantile of their response's entropies take no cut: .8 leaves the top fifth; 0 leaves
        all"""
        min_distance: int = 1
        """fewest tokens per segment"""

        def __post_init__(self) -> None:
            if self.segments < 1:
                raise ValueError(f"segments is {self.segments}; wanted at least 1.")
            if not 0 <= self.quantile < 1 or self.min_distance < 1:
                raise ValueError(
                    f"quantile is {self.quantile}, min_distance {self.min_distance}; "
                    "wanted a quantile from 0 to below 1, and at least 1 token."
                )

    config: Config

    def run(self, *, trajectories: Trajectories) -> Outputs:
        """Segments every row by its entropies."""
        known_entropies(trajectories.entropies.values, "segmenter.entropy_cuts")
        ends = entropy_ends(
            trajectories.entropies, self.config.segments, self.config.quantile, self.config.min_distance
        )
        self.context.log(segments=len(ends.values) / max(len(ends), 1))
        return Outputs(segments=Segments(uid=trajectories.uid, ends=ends))
