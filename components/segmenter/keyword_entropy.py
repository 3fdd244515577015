"""Segments that end at keywords and are merged by entropy (RREDCoT)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from creditgraph.components.rollouts.segments import close_segments
from creditgraph.components.segmenter.base import Outputs, Segmenter
from creditgraph.components.text.stops import ends_of_stop, token_texts
from creditgraph.pipeline.core.handles import known_entropies
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Trajectories


def merge_lowest(ends: Sequence[int], entropies: Sequence[float], segments: int) -> list[int]:
    """Merges adjacent segments, each time the pair of lowest summed token entropy, until at most `segments` remain.

    Of equal pairs the first is merged.

    >>> merge_lowest([1, 2, 4], [5.0, 1.0, 1.0, 1.0], 2)
    [1, 4]
    """
    total = np.concatenate([[0.0], np.cumsum(np.asarray(entropies, dtype=np.float64))])
    merged = list(ends)
    sums = np.array([total[b] - total[a] for a, b in pairwise([0, *merged])])
    while len(merged) > segments:
        k = int(np.argmin(sums[:-1] + sums[1:]))
        sums[k + 1] += sums[k]
        sums = np.delete(sums, k)
        del merged[k]
    return merged


class KeywordEntropy(Segmenter):
    """Ends a segment at every keyword, then merges neighbours of low entropy until at most `segments` remain.

    Second-hand (notes on the paper): it splits at keywords, newline among them. The list and the number of segments are
    ours.
    """

    paper = "2606.06475"
    metrics = (*Segmenter.metrics, Metric("splits", "segments", "segments per response before merging"))

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Keywords and number of segments."""

        keywords: tuple[str, ...] = ("\n", "</thought>")
        """a segment ends with the token that completes one of these strings"""
        segments: int = 8
        """most segments per response"""

        def __post_init__(self) -> None:
            if self.segments < 1:
                raise ValueError(f"expected segments ≥ 1, got {self.segments}.")
            if not self.keywords or not all(self.keywords):
                raise ValueError(f"expected one or more non-empty keywords, got {list(self.keywords)}.")

    config: Config

    @classmethod
    def needs_of(cls, config: Any) -> frozenset[str]:
        """Entropies."""
        return frozenset({"entropies"})

    def run(self, *, trajectories: Trajectories) -> Outputs:
        """Segments every row."""
        tokens = trajectories.response_tokens
        # An empty batch must not load a tokenizer.
        pieces = token_texts(self.tokenizer, tokens) if len(tokens) else []
        ends = [sorted({end for word in self.config.keywords for end in ends_of_stop(row, word)}) for row in pieces]
        split = close_segments(Jagged.from_rows(ends, torch.int32), tokens.lengths)
        known_entropies(trajectories.entropies.values, "segmenter.keyword_entropy")
        merged = [
            merge_lowest(row, entropies, self.config.segments)
            for row, entropies in zip(split.to_lists(), trajectories.entropies.to_lists(), strict=True)
        ]
        self.context.log(splits=len(split.values) / max(len(split), 1))
        return self.outputs(trajectories, Jagged.from_rows(merged, torch.int32))
