"""Segment boundaries, at which values are estimated, and the tokens that an estimate costs."""

import hashlib
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from creditgraph.components.rollouts.segments import check_segments
from creditgraph.pipeline.core.component import same_rows
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Rewards, Segments, SegmentValues, Trajectories, check_aligned

VALUE_METRICS = (
    Metric("mean", "reward", "mean value over boundaries"),
    Metric("boundaries", "boundaries", "boundaries that got a value"),
)
COST_METRICS = (
    Metric("scored_tokens", "tokens", "tokens that went through the model to be scored, context included"),
    Metric("sampled_tokens", "tokens", "tokens sampled to estimate values; 0 for teacher-forced estimates"),
)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """A value at the start of each response and at each segment end."""

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
    def ends(self) -> Jagged:
        """Jagged: the segment ends of each response."""
        return self.place.slice_rows(torch.ones_like(self.start), self.place.lengths)

    @property
    def last(self) -> Tensor:
        """bool [B]: the end of a response."""
        return self.place.positions == (self.place.lengths - 1)[self.owner]


def boundaries_of(trajectories: Trajectories, segments: Segments, rewards: Rewards | None = None) -> Boundaries:
    """The boundaries of each response; raises AlignmentError when the inputs belong to other rows or responses."""
    check_segments(trajectories, segments)
    if rewards is not None:
        check_aligned(trajectories, rewards)
    return Boundaries(
        place=Jagged.from_rows([[0]] * len(trajectories), torch.int64).join(segments.ends),
        trunk=trajectories.prompt_tokens.join(trajectories.response_tokens),
        start=trajectories.prompt_tokens.lengths,
    )


def values_from_gains(gain: Jagged, final: Tensor) -> Jagged:
    """Values whose differences are these gains [one per segment] and whose last one is `final` [N]; float32."""
    # In float64, so that many small gains still end at `final`.
    wide = gain.to(torch.float64)
    total = Jagged.from_rows([[0.0]] * len(gain), torch.float64).join(wide.cumsum())
    return total.with_values((total.values + (final.double() - wide.sum())[total.row_ids]).float())


def shared_sequences(trunk: Jagged, row: Tensor, at: Tensor, tokens: Jagged) -> tuple[Tensor, Tensor]:
    """Finds branches whose prefix and tokens together are the same sequence, of which only one needs to be scored.

    Of equal sequences the branch with the most tokens (the shortest prefix) is scored: its last tokens are those of the
    others.

    Args:
        trunk: Jagged int32 [R rows].
        row, at: int64 [B], trunk and branch point of each branch.
        tokens: Jagged int32 [B rows].

    Returns:
        int64 [U], the branches to score; int64 [B], the place among them whose last tokens are those of each branch.
    """
    prefixes = trunk.values.numpy()
    suffixes = tokens.values.numpy()
    begins = trunk.offsets[row].tolist()
    lengths = at.tolist()
    bounds = tokens.offsets.tolist()
    groups: dict[bytes, int] = {}
    chosen: list[int] = []
    member: list[int] = []
    for b, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        # A digest instead of the tokens: a key per boundary of every response would hold each prefix many times.
        digest = hashlib.blake2b(prefixes[begin : begin + length].tobytes(), digest_size=16)
        digest.update(suffixes[bounds[b] : bounds[b + 1]].tobytes())
        group = groups.setdefault(digest.digest(), len(groups))
        member.append(group)
        if group == len(chosen):
            chosen.append(b)
        elif length < lengths[chosen[group]]:
            chosen[group] = b
    return torch.tensor(chosen, dtype=torch.int64), torch.tensor(member, dtype=torch.int64)


def branch_tokens(row: Tensor, at: Tensor, tokens: Jagged) -> int:
    """Tokens that an engine with shared trunks runs to score `tokens` [B rows] after `at` [B] tokens of `row` [B]."""
    used = tokens.lengths > 0
    if not bool(used.any()):
        return 0
    # A trunk runs as far as its last branch; the last token of a branch predicts nothing.
    reach = torch.zeros(int(row.max()) + 1, dtype=torch.int64).scatter_reduce(0, row[used], at[used], "amax")
    return int(reach.sum() + (tokens.lengths[used] - 1).sum())
