"""Thought ends of responses that were sampled in pieces, cut in the middle of a thought.

An engine begins a new thought where a request begins. When the prefix ends inside one, the first thought it reports is
only the rest of that thought: a stop or final string across the cut, the final string before it, and the tokens already
in the thought go unseen. Token limits never insert tokens, so the ends can be found again from the tokens, and a
response that went on too long is cut where it would have ended.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from components.segmenter.thought import token_pieces
from components.text.stops import decode_rows
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import ThoughtLimits, Trajectories


def closed_thoughts(pieces: list[str], limits: ThoughtLimits) -> tuple[list[int], str]:
    """Exclusive token ends of the thoughts closed by the stop string or by their token limit, and why no thought follows.

    Args:
        pieces: text of each token of the response.
        limits: the thought limits.

    Returns:
        The ends, up to the one that ends the response; "final", "thoughts", or "" when the response goes on.

    >>> closed_thoughts(["a", ".", "b", "!", ".", "c"], ThoughtLimits(stop=".", final="!"))
    ([2, 5], 'final')
    """
    text, bounds = "".join(pieces), [0, *accumulate(len(piece) for piece in pieces)]
    ends: list[int] = []
    start = 0
    while start < len(pieces):
        place = text.find(limits.stop, bounds[start]) if limits.stop else -1
        stopped = bisect_left(bounds, place + len(limits.stop)) if place >= 0 else len(pieces) + 1
        end = min(stopped, start + limits.max_tokens)
        if end > len(pieces):
            break
        ends.append(end)
        if limits.final and limits.final in text[bounds[start] : bounds[end]]:
            return ends, "final"
        if len(ends) >= limits.max_thoughts:
            return ends, "thoughts"
        start = end
    return ends, ""


def in_last_thought(parents: Trajectories, prefix: Tensor, limits: ThoughtLimits, tokenizer: Any) -> Tensor:
    """bool [N]: the first `prefix` [N] tokens end inside a thought that already holds the final string."""
    found = []
    for pieces, length in zip(token_pieces(tokenizer, parents.response_tokens), prefix.tolist(), strict=True):
        ends, ended = closed_thoughts(pieces[:length], limits)
        found.append(
            not ended and bool(limits.final) and limits.final in "".join(pieces[ends[-1] if ends else 0 : length])
        )
    return torch.tensor(found, dtype=torch.bool)


def with_closed_ends(trajectories: Trajectories, limits: ThoughtLimits, tokenizer: Any) -> Trajectories:
    """Only thoughts that are closed count as ends: how a prefix that will be continued must look."""
    ends = [closed_thoughts(pieces, limits)[0] for pieces in token_pieces(tokenizer, trajectories.response_tokens)]
    return trajectories.replace(thought_ends=Jagged.from_rows(ends, torch.int32))


def with_whole_thoughts(trajectories: Trajectories, limits: ThoughtLimits, tokenizer: Any) -> Trajectories:
    """Responses as an engine would have left them that had sampled each in one go: ends found again, what came too late cut off."""
    ends, lengths, reasons = [], [], []
    rows = zip(token_pieces(tokenizer, trajectories.response_tokens), trajectories.finish_reason, strict=True)
    for pieces, reason in rows:
        closed, ended = closed_thoughts(pieces, limits)
        size = closed[-1] if ended else len(pieces)
        if not ended and (not closed or closed[-1] < size) and size:
            # An end-of-text token alone belongs to the thought before it.
            closed = [*(closed[:-1] if reason == "eos" and closed and closed[-1] == size - 1 else closed), size]
        ends.append(closed)
        lengths.append(size)
        reasons.append(ended or reason)
    length, start = torch.tensor(lengths, dtype=torch.int64), torch.zeros(len(lengths), dtype=torch.int64)
    tokens = trajectories.response_tokens.slice_rows(start, length)
    cut = length < trajectories.response_tokens.lengths
    texts = list(trajectories.text)
    shortened = cut.nonzero(as_tuple=True)[0]
    for row, text in zip(shortened.tolist(), decode_rows(tokenizer, tokens.select(shortened).to_lists()), strict=True):
        texts[row] = text
    return trajectories.replace(
        response_tokens=tokens,
        engine_logprobs=trajectories.engine_logprobs.slice_rows(start, length),
        entropies=trajectories.entropies.slice_rows(start, length),
        thought_ends=Jagged.from_rows(ends, torch.int32),
        finish_reason=reasons,
        text=texts,
    )
