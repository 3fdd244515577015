"""Segments that are thoughts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from creditgraph.components.rollouts.segments import close_segments
from creditgraph.components.segmenter.base import Outputs, Segmenter
from creditgraph.components.text.stops import ends_of_stop, token_texts
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Trajectories


class Thoughts(Segmenter):
    """Makes one segment per thought.

    The engine records where thoughts end. For a response without recorded ends (sampled plainly) the stop string is
    searched. What follows the last stop string is the last segment; a response without a stop string is one segment; an
    empty response has none.
    """

    metrics = (
        *Segmenter.metrics,
        Metric("searched_share", "share", "responses without recorded thoughts, whose text was searched"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The stop string."""

        stop: str = "</thought>"
        """closes a thought; searched for in responses that were not sampled thought by thought"""

    config: Config

    @classmethod
    def needs_of(cls, config: Any) -> frozenset[str]:
        """Thoughts, unless it searches for a string of the user's own."""
        return frozenset({"thoughts"} if config.stop == cls.Config.stop else ())

    def run(self, *, trajectories: Trajectories) -> Outputs:
        """Segments every row."""
        ends = trajectories.thought_ends
        # The text is searched first, because decoding single tokens is slow.
        has_stop = torch.tensor([self.config.stop in text for text in trajectories.text], dtype=torch.bool)
        searched = ((ends.lengths == 0) & has_stop).nonzero()[:, 0]
        if len(searched):
            rows = ends.to_lists()
            texts = token_texts(self.tokenizer, trajectories.response_tokens.select(searched))
            for row, pieces in zip(searched.tolist(), texts, strict=True):
                rows[row] = ends_of_stop(pieces, self.config.stop)
            ends = Jagged.from_rows(rows, torch.int32)
        self.context.log(searched_share=len(searched) / max(len(trajectories), 1))
        return self.outputs(trajectories, close_segments(ends, trajectories.response_tokens.lengths))
