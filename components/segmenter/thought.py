"""Segments = thoughts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from components.models.load import load_tokenizer
from components.text.stops import decode_rows
from pipeline.core.component import Component, same_rows
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Segments, Trajectories

SEGMENT_METRICS = (Metric("segments", "segments", "segments per response"),)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Boundaries of each response."""

    segments: Annotated[Segments, same_rows("trajectories")]


def close_segments(ends: Jagged, length: Tensor) -> Jagged:
    """Makes candidate ends valid segment ends: strictly increasing, within the response, the last one at its `length` [N].

    A response without tokens has no segment (an empty row). Int32.
    """
    rows = torch.cat([ends.row_ids, torch.arange(len(length))])
    values = torch.cat([ends.values.to(torch.int64), length])
    inside = (values > 0) & (values <= length[rows])
    width = int(length.max()) + 1 if len(length) else 1
    keys = torch.unique(rows[inside] * width + values[inside])
    counts = torch.bincount(keys // width, minlength=len(length))
    return Jagged.from_lengths((keys % width).to(torch.int32), counts)


def ends_of_stop(pieces: list[str], stop: str) -> list[int]:
    """Exclusive token ends of every occurrence of `stop` in a response given as one string per token.

    >>> ends_of_stop(["a", "</tho", "ught>", "b"], "</thought>")
    [3]
    """
    text = "".join(pieces)
    bounds, total = [], 0
    for piece in pieces:
        total += len(piece)
        bounds.append(total)
    ends, place, token = [], text.find(stop), 0
    while place >= 0:
        place += len(stop)
        while bounds[token] < place:
            token += 1
        ends.append(token + 1)
        place = text.find(stop, place)
    return ends


def token_pieces(tokenizer: Any, tokens: Jagged) -> list[list[str]]:
    """Each row as one string per token; every distinct token is decoded once."""
    ids, place = torch.unique(tokens.values, return_inverse=True)
    texts = decode_rows(tokenizer, ids[:, None].tolist()) if len(ids) else []
    return [[texts[i] for i in row] for row in tokens.with_values(place).to_lists()]


class Thoughts(Component):
    """One segment per thought.

    Ends come from the engine; for a response without them (sampled plainly) they are found by the stop string. What
    follows the last stop string is the last segment; a response without a stop string is one segment; an empty response
    has none.
    """

    metrics = (
        *SEGMENT_METRICS,
        Metric("searched_share", "share", "responses without recorded thoughts, whose text was searched"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The stop string."""

        stop: str = "</thought>"
        """closes a thought; searched for in responses that were not sampled thought by thought"""

    config: Config
    _tokenizer: Any = None

    def run(self, *, trajectories: Trajectories) -> Outputs:
        """Segments every row."""
        ends = trajectories.thought_ends
        bare = (ends.lengths == 0) & torch.tensor(
            [self.config.stop in text for text in trajectories.text], dtype=torch.bool
        )
        if bool(bare.any()):
            found = ends.to_lists()
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(self.context.model)
            for row, pieces in zip(
                bare.nonzero(as_tuple=True)[0].tolist(),
                token_pieces(self._tokenizer, trajectories.response_tokens.select(bare)),
                strict=True,
            ):
                found[row] = ends_of_stop(pieces, self.config.stop)
            ends = Jagged.from_rows(found, torch.int32)
        closed = close_segments(ends, trajectories.response_tokens.lengths)
        self.context.log(
            segments=float(closed.lengths.sum()) / max(len(closed), 1),
            searched_share=float(bare.sum()) / max(len(closed), 1),
        )
        return Outputs(segments=Segments(uid=trajectories.uid, ends=closed))
