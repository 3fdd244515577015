"""Segments cut at keywords and merged by entropy (RREDCoT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import torch

from components.models.load import load_tokenizer
from components.segmenter.thought import SEGMENT_METRICS, close_segments, ends_of_stop, token_pieces
from pipeline.core.component import Component, same_rows
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Segments, Trajectories, known_entropies


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Boundaries of each response."""

    segments: Annotated[Segments, same_rows("trajectories")]


def merge_lowest(ends: Sequence[int], entropies: Sequence[float], segments: int) -> list[int]:
    """Merges adjacent segments until at most `segments` remain: each time the pair with the lowest summed token entropy.

    Of equal pairs the first is merged.

    >>> merge_lowest([1, 2, 4], [5.0, 1.0, 1.0, 1.0], 2)
    [1, 4]
    """
    total = np.concatenate([[0.0], np.cumsum(np.asarray(entropies, dtype=np.float64))])
    left = list(ends)
    sums = np.array([total[b] - total[a] for a, b in pairwise([0, *left])])
    while len(left) > segments:
        k = int(np.argmin(sums[:-1] + sums[1:]))
        sums[k + 1] += sums[k]
        sums = np.delete(sums, k)
        del left[k]
    return left


class KeywordEntropy(Component):
    """Splits after every keyword, then merges the most certain neighbours until at most `segments` remain.

    Second-hand: the paper splits at keywords, newline among them; the list and the number of segments are ours.
    """

    paper = "2606.06475"
    metrics = (*SEGMENT_METRICS, Metric("splits", "segments", "segments per response before merging"))

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Keywords and number of segments."""

        keywords: tuple[str, ...] = ("\n", "</thought>")
        """a segment ends with the token that completes one of these strings"""
        segments: int = 8
        """most segments per response"""

        def __post_init__(self) -> None:
            if self.segments < 1 or not self.keywords or not all(self.keywords):
                raise ValueError("segments must be at least 1, and keywords a list of strings that are not empty.")

    config: Config
    _tokenizer: Any = None

    def run(self, *, trajectories: Trajectories) -> Outputs:
        """Segments every row."""
        if self._tokenizer is None and len(trajectories):
            self._tokenizer = load_tokenizer(self.context.model)
        found = [
            sorted({end for keyword in self.config.keywords for end in ends_of_stop(pieces, keyword)})
            for pieces in token_pieces(self._tokenizer, trajectories.response_tokens)
        ]
        split = close_segments(Jagged.from_rows(found, torch.int32), trajectories.response_tokens.lengths)
        known_entropies(trajectories.entropies.values, "segmenter.keyword_entropy")
        entropies = trajectories.entropies.to_lists()
        merged = [
            merge_lowest(row, entropy, self.config.segments)
            for row, entropy in zip(split.to_lists(), entropies, strict=True)
        ]
        ends = Jagged.from_rows(merged, torch.int32)
        rows = max(len(ends), 1)
        self.context.log(segments=len(ends.values) / rows, splits=len(split.values) / rows)
        return Outputs(segments=Segments(uid=trajectories.uid, ends=ends))
