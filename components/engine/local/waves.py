"""The rows that a call of `generate` samples: where paused rows continue, and the waves into which rows are split."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from creditgraph.components.engine.base import Limits
from creditgraph.pipeline.core.handles import Requests
from creditgraph.pipeline.core.jagged import Jagged


@dataclass(frozen=True)
class Begun:
    """The state of rows at the beginning of a call; they may have sampled before.

    Attributes:
        contexts: Jagged int32 [N], prompt and sampled tokens.
        taken: int64 [N], tokens sampled.
        thoughts: int64 [N], thoughts closed.
        opened: Jagged int32 [N], tokens of the open thought.
        room: int64 [N], tokens the row may still get.
        pause: int64 [N], new tokens after which the row is paused, or None.
        ends: Jagged int32 [N], thought ends so far, or None.
    """

    contexts: Jagged
    taken: Tensor
    thoughts: Tensor
    opened: Jagged
    room: Tensor
    pause: Tensor | None
    ends: Jagged | None

    @classmethod
    def of(cls, requests: Requests, limits: Limits) -> Begun:
        """The beginning of a call."""
        before = requests.progress
        if before is None:
            none = torch.zeros(len(requests.tokens), dtype=torch.int64)
            empty = Jagged.from_lengths(requests.tokens.values[:0], none)
            return cls(requests.tokens, none, none, empty, limits.tokens, requests.pause, None)
        taken = before.tokens.lengths
        ends = before.thought_ends
        last = torch.tensor([row[-1] if row else 0 for row in ends.to_lists()], dtype=torch.int64)
        return cls(
            contexts=requests.tokens.join(before.tokens),
            taken=taken,
            thoughts=ends.lengths,
            opened=before.tokens.slice_rows(last, taken),
            room=(limits.tokens - taken).clamp(min=0),
            pause=requests.pause,
            ends=ends,
        )

    @property
    def most(self) -> Tensor:
        """int64 [N]: new tokens of this call."""
        return self.room if self.pause is None else torch.minimum(self.room, self.pause)

    def all_ends(self, ends: Jagged, eos: Tensor) -> Jagged:
        """Thought ends of whole rows, given those among the new tokens; `eos` [N]: rows that ended by end of text."""
        if self.ends is None:
            return ends
        rows = []
        for old, new, taken, at_eos in zip(
            self.ends.to_lists(), ends.to_lists(), self.taken.tolist(), eos.tolist(), strict=True
        ):
            # An end-of-text token alone belongs to the thought before it, which may be an earlier call's.
            alone = at_eos and new == [1] and old and old[-1] == taken
            rows.append([*(old[:-1] if alone else old), *(taken + end for end in new)])
        return Jagged.from_rows(rows, torch.int32)


class Wave(NamedTuple):
    """Rows that are sampled together.

    Attributes:
        rows: int64 [R], rows of the request.
        prompts: Jagged int32, the distinct prompts.
        group: int64 [R], prompt of each row.
    """

    rows: Tensor
    prompts: Jagged
    group: Tensor


def waves(tokens: Jagged, budgets: Tensor, max_rows: int, max_tokens: int) -> Iterator[Wave]:
    """Cuts rows with a budget into waves of at most `max_rows` rows and `max_tokens` cache tokens (one row at least).

    Rows are ordered by length, equal rows together; a prompt occurs once per wave.
    """
    values = tokens.values.cpu().numpy()
    bounds = tokens.offsets.tolist()
    keys = [values[a:b].tobytes() for a, b in itertools.pairwise(bounds)]
    lengths = tokens.lengths.tolist()
    budget_of = budgets.tolist()
    order = [i for i, budget in enumerate(budget_of) if budget > 0]
    first: dict[bytes, int] = {}
    for i in order:
        first.setdefault(keys[i], i)
    # By length, so that a wave pads little; equal rows together, so that they share a prompt.
    order.sort(key=lambda i: (lengths[i], first[keys[i]], i))
    start = 0
    while start < len(order):
        end = start
        longest = budget = 0
        while end < len(order) and end - start < max_rows:
            longest = max(longest, lengths[order[end]])
            budget = max(budget, budget_of[order[end]])
            if end > start and (end + 1 - start) * (longest + budget) > max_tokens:
                break
            end += 1
        rows = order[start:end]
        start = end
        distinct = list(dict.fromkeys(first[keys[i]] for i in rows))
        place = {row: n for n, row in enumerate(distinct)}
        group = torch.tensor([place[first[keys[i]]] for i in rows])
        yield Wave(torch.tensor(rows), tokens.select(torch.tensor(distinct)), group)
