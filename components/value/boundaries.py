"""What the estimators of values at segment boundaries share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from pipeline.core.component import same_rows
from pipeline.core.errors import AlignmentError
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Rewards, Segments, SegmentValues, Trajectories, check_aligned

VALUE_METRICS = (
    Metric("mean", "reward", "mean value over boundaries"),
    Metric("boundaries", "boundaries", "boundaries that got a value"),
)


COST_METRICS = (
    Metric("scored_tokens", "tokens", "tokens passed through the model to be scored, context included"),
    Metric("generated_tokens", "tokens", "tokens sampled to estimate values; 0 for teacher-forced estimates"),
)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """A value at the start of each response and at each segment's end."""

    values: Annotated[SegmentValues, same_rows("trajectories")]


@dataclass(frozen=True, eq=False, kw_only=True)
class Boundaries:
    """All boundaries of a batch, B in number, row after row.

    Attributes:
        place: Jagged int64, response tokens before each boundary: 0, then the segment ends.
        trunk: Jagged int32 [N rows], prompt and response.
        start: int64 [N], prompt tokens.
    """

    place: Jagged
    trunk: Jagged
    start: Tensor

    @property
    def owner(self) -> Tensor:
        """int64 [B]: the trajectory of each boundary."""
        return self.place.row_ids

    @property
    def at(self) -> Tensor:
        """int64 [B]: trunk tokens before each boundary."""
        return self.start[self.owner] + self.place.values

    @property
    def last(self) -> Tensor:
        """bool [B]: the end of a response."""
        return self.place.positions == (self.place.lengths - 1)[self.owner]


def boundaries_of(trajectories: Trajectories, segments: Segments, rewards: Rewards | None = None) -> Boundaries:
    """The boundaries of each response; raises AlignmentError when the inputs describe different rows or other responses."""
    check_aligned(trajectories, segments)
    if rewards is not None:
        check_aligned(trajectories, rewards)
    ends, lengths = segments.ends, trajectories.response_tokens.lengths
    place = Jagged.from_rows([[0]] * len(trajectories), torch.int64).join(ends)
    final = place.values[place.offsets[1:] - 1]
    if not torch.equal(final, lengths):
        row = int((final != lengths).nonzero()[0])
        raise AlignmentError(
            f"{segments.origin or 'segments'}: the last segment of trajectory {int(trajectories.uid[row])} ends at "
            f"{int(final[row])}, "
            f"its response has {int(lengths[row])} tokens; wanted segments that cover the response. "
            "Wire segments made from the same trajectories."
        )
    trunk = trajectories.prompt_tokens.join(trajectories.response_tokens)
    return Boundaries(place=place, trunk=trunk, start=trajectories.prompt_tokens.lengths)


def values_from_gains(gain: Jagged, final: Tensor) -> Jagged:
    """Values whose differences are the given gains [one per segment] and whose last one is `final` [N]; float32."""
    wide = gain.to(torch.float64)
    total = Jagged.from_rows([[0.0]] * len(gain), torch.float64).join(wide.cumsum())
    return total.with_values((total.values + (final.double() - wide.sum())[total.row_ids]).float())


def shared_sequences(trunk: Jagged, row: Tensor, at: Tensor, tokens: Jagged) -> tuple[Tensor, Tensor]:
    """Branches whose prefix and tokens together are the same sequence need one scoring: that of the longest of them.

    Args:
        trunk: Jagged int32 [R rows].
        row, at: int64 [B], trunk and branch point of each branch.
        tokens: Jagged int32 [B rows].

    Returns:
        int64 [U], the branches to score; int64 [B], the place among them whose last tokens are those of each branch.
    """
    prefixes, rest = trunk.values.numpy(), tokens.values.numpy()
    begin, cut = trunk.offsets[row].tolist(), tokens.offsets.tolist()
    groups: dict[bytes, int] = {}
    chosen: list[int] = []
    member: list[int] = []
    places = at.tolist()
    for b, (first, length) in enumerate(zip(begin, places, strict=True)):
        digest = hashlib.blake2b(prefixes[first : first + length].tobytes(), digest_size=16)
        digest.update(rest[cut[b] : cut[b + 1]].tobytes())
        group = groups.setdefault(digest.digest(), len(groups))
        member.append(group)
        if group == len(chosen):
            chosen.append(b)
        elif length < places[chosen[group]]:
            chosen[group] = b
    return torch.tensor(chosen, dtype=torch.int64), torch.tensor(member, dtype=torch.int64)


def branch_tokens(row: Tensor, at: Tensor, tokens: Jagged) -> int:
    """Tokens an engine with shared trunks runs to score `tokens` [B rows] after `at` [B] tokens of trunks `row` [B]."""
    used = tokens.lengths > 0
    if not bool(used.any()):
        return 0
    reach = torch.zeros(int(row.max()) + 1, dtype=torch.int64).scatter_reduce(0, row[used], at[used], "amax")
    return int(reach.sum() + (tokens.lengths[used] - 1).sum())
