"""States of responses as texts that a reference can continue."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.text.stops import token_texts
from creditgraph.components.text.templates import THINK, THINK_END, tokens_before_end
from creditgraph.components.value.boundaries import Boundaries


@dataclass(frozen=True, eq=False, kw_only=True)
class States:
    """Prompts with a part of their response, without the tokens that end it: trunk[:begin] + trunk[end:length].

    Attributes:
        row: int64 [S], the trajectory of each state.
        begin, end, length: int64 [S], places in its trunk.
        tails: the last <think> or </think> of each state's text, if it has one, and its last character.
    """

    row: Tensor
    begin: Tensor
    end: Tensor
    length: Tensor
    tails: list[str]


def states_of(tokenizer: Any, bounds: Boundaries, row: Tensor, begin: Tensor, end: Tensor) -> States:
    """States that lack the tokens [begin, end) of their trunks, which all are int64 [S], and the end of a response."""
    pieces = token_texts(tokenizer, bounds.trunk) if len(bounds.trunk) else []
    starts = bounds.start.tolist()
    own = [start + tokens_before_end(row[start:]) for row, start in zip(pieces, starts, strict=True)]
    length = torch.tensor(own, dtype=torch.int64)[row]
    begin = torch.minimum(begin, length)
    end = torch.minimum(end, length)
    texts = ["".join(row) for row in pieces]
    places = [[0, *accumulate(map(len, row))] for row in pieces]
    tails = []
    for r, b, e, n in zip(row.tolist(), begin.tolist(), end.tolist(), length.tolist(), strict=True):
        at = places[r]
        tails.append(_tail(texts[r][: at[b]] + texts[r][at[e] : at[n]]))
    return States(row=row, begin=begin, end=end, length=length, tails=tails)


def _tail(text: str) -> str:
    # Long states are many: only what decides how they go on is kept.
    tag = max(THINK, THINK_END, key=text.rfind)
    return (tag if tag in text else "") + text[-1:]
