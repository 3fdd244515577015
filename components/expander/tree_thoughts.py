"""Thought ends of responses that were sampled in pieces, cut in the middle of a thought.

An engine begins a new thought where a request begins. If the prefix ends inside a thought, the first thought that it
reports is only the rest of that one: it misses a stop or final string across the cut, a final string before it, and the
tokens already in the thought. Token limits never insert tokens, so the ends can be derived again from the tokens, and a
response that is too long is cut where it would have ended.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.text.stops import decode_rows, token_texts
from creditgraph.pipeline.core.handles import ThoughtLimits
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Trajectories


def closed_thoughts(pieces: list[str], limits: ThoughtLimits) -> tuple[list[int], str]:
    """Exclusive token ends of thoughts closed by the stop string or by their token limit, and why no thought follows.

    Args:
        pieces: text of each token of the response.
        limits: the thought limits.

    Returns:
        The ends, up to the one that ends the response; "final", "thoughts", or "" when the response continues.

    >>> closed_thoughts(["a", ".", "b", "!", ".", "c"], ThoughtLimits(stop=".", final="!"))
    ([2, 5], 'final')
    """
    text = "".join(pieces)
    bounds = [0, *accumulate(len(piece) for piece in pieces)]
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
    if not limits.final:
        return torch.zeros(len(parents), dtype=torch.bool)
    inside = []
    for pieces, length in zip(token_texts(tokenizer, parents.response_tokens), prefix.tolist(), strict=True):
        ends, reason = closed_thoughts(pieces[:length], limits)
        open_thought = "".join(pieces[ends[-1] if ends else 0 : length])
        inside.append(not reason and limits.final in open_thought)
    return torch.tensor(inside, dtype=torch.bool)


def with_closed_ends(trajectories: Trajectories, limits: ThoughtLimits, tokenizer: Any) -> Trajectories:
    """Keeps only the ends of closed thoughts, as required of a prefix that will be continued."""
    ends = [closed_thoughts(pieces, limits)[0] for pieces in token_texts(tokenizer, trajectories.response_tokens)]
    return trajectories.replace(thought_ends=Jagged.from_rows(ends, torch.int32))


def with_whole_thoughts(trajectories: Trajectories, limits: ThoughtLimits, tokenizer: Any) -> Trajectories:
    """Responses as if sampled in one go: thought ends derived again, and tokens after the true end cut off."""
    ends = []
    lengths = []
    reasons = []
    rows = zip(token_texts(tokenizer, trajectories.response_tokens), trajectories.finish_reason, strict=True)
    for pieces, reason in rows:
        closed, ended = closed_thoughts(pieces, limits)
        size = closed[-1] if ended else len(pieces)
        if not ended and (not closed or closed[-1] < size) and size:
            # An end-of-text token alone belongs to the thought before it.
            eos_alone = reason == "eos" and closed and closed[-1] == size - 1
            closed = [*(closed[:-1] if eos_alone else closed), size]
        ends.append(closed)
        lengths.append(size)
        reasons.append(ended or reason)
    length = torch.tensor(lengths, dtype=torch.int64)
    start = torch.zeros_like(length)
    tokens = trajectories.response_tokens.slice_rows(start, length)
    shortened = (length < trajectories.response_tokens.lengths).nonzero(as_tuple=True)[0]
    texts = list(trajectories.text)
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
