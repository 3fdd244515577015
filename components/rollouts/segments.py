"""Segments of responses: valid ends, the segment of each token, values and advantages at segment boundaries."""

import torch
from torch import Tensor

from creditgraph.pipeline.core.errors import AlignmentError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Segments, SegmentValues, Trajectories, check_aligned


def close_segments(ends: Jagged, length: Tensor) -> Jagged:
    """Makes candidates valid segment ends: strictly increasing, within the response, the last one at its `length` [N].

    A response without tokens has no segment (an empty row). Int32.
    """
    rows = torch.cat([ends.row_ids, torch.arange(len(length))])
    values = torch.cat([ends.values.to(torch.int64), length])
    inside = (values > 0) & (values <= length[rows])
    # One integer per (row, end), so that a single sort orders the ends and drops repeated ones.
    width = int(length.max()) + 1 if len(length) else 1
    keys = torch.unique(rows[inside] * width + values[inside])
    counts = torch.bincount(keys // width, minlength=len(length))
    return Jagged.from_lengths((keys % width).to(torch.int32), counts)


def segment_of_token(ends: Jagged, tokens: Jagged) -> Tensor:
    """int64 [total tokens]: the segment of each token, as a place in `ends.values`.

    Args:
        ends: exclusive segment ends per row, strictly increasing, the last one the number of tokens; empty for an empty
            row.
        tokens: any Jagged over the tokens.
    """
    # As places in the flat tokens ends increase over all rows, so one search serves every row.
    bounds = ends.values + tokens.offsets[:-1][ends.row_ids]
    return torch.searchsorted(bounds, torch.arange(len(tokens.values), device=bounds.device), right=True)


def rank_in_row(values: Jagged) -> Jagged:
    """int64: place of each value among those of its row, 0 for the largest; equal values in their order."""
    # Two stable sorts, by value and then by row, leave each row in descending order.
    by_value = torch.argsort(values.values, descending=True, stable=True)
    order = by_value[torch.argsort(values.row_ids[by_value], stable=True)]
    rank = torch.empty_like(order)
    rank[order] = values.positions
    return values.with_values(rank)


def increments(values: Jagged) -> Jagged:
    """v(s_{k+1}) − v(s_k) for each segment k: one entry less per row than `values` [segments + 1 per row]."""
    first = values.lengths.clamp(max=1)
    keep = values.lengths - first
    before = values.slice_rows(torch.zeros_like(keep), keep)
    after = values.slice_rows(first, keep + first)
    return after.with_values(after.values - before.values)


def with_final(values: Jagged, final: Tensor) -> Jagged:
    """`values` with the last entry of each row that has segments replaced by `final` [N]."""
    out = values.values.clone()
    rows = values.lengths > 1
    out[values.offsets[1:][rows] - 1] = final[rows].to(out.dtype)
    return values.with_values(out)


def generalised_advantage(values: Jagged, reward: Tensor, gamma: float = 1.0, lam: float | Tensor = 0.0) -> Jagged:
    """Advantage of each segment by generalised advantage estimation (GAE, 1506.02438), over segments as steps.

    A_k = δ_k + γλ A_{k+1} with δ_k = γ v(s_{k+1}) − v(s_k), and δ = r − v(s) for the last segment, whose end is worth
    the reward and nothing after it. λ = 0: the TD error. λ = 1, γ = 1: r − v(s_k), the return minus the value.

    Args:
        values: float, segments + 1 entries per row; the last one is not used.
        reward: float [N].
        gamma: discount per segment, in [0, 1].
        lam: λ in [0, 1]; one for all rows, or float [N].
    """
    first = values.lengths.clamp(max=1)
    count = values.lengths - first
    final = with_final(values, reward)
    before = final.slice_rows(torch.zeros_like(count), count)
    after = final.slice_rows(first, count + first)
    last = after.positions == (count - 1)[after.row_ids]
    delta = after.with_values(torch.where(last, 1.0, gamma) * after.values - before.values)
    decay = gamma * torch.as_tensor(lam, dtype=torch.float64).expand(len(values))
    if not bool((decay != 0).any()) or not len(delta.values):
        return delta
    out = delta.values.double()
    # From the last segment backwards, for all rows that reach it at once: the longest come first.
    order = torch.argsort(count, descending=True, stable=True)
    sizes = count[order]
    for k in range(int(sizes[0]) - 2, -1, -1):
        rows = order[: int((sizes > k + 1).sum())]
        place = delta.offsets[:-1][rows] + k
        out[place] += decay[rows] * out[place + 1]
    return delta.with_values(out.to(delta.values.dtype))


def segment_starts(ends: Jagged) -> Jagged:
    """int64: tokens before each segment, from the exclusive ends of the segments of each row."""
    before = torch.roll(ends.values.to(torch.int64), 1)
    return ends.with_values(torch.where(ends.positions == 0, 0, before))


def check_segments(trajectories: Trajectories, segments: Segments, values: SegmentValues | None = None) -> None:
    """Raises AlignmentError unless segments cover every response and (with `values`) each boundary has a value."""
    check_aligned(trajectories, segments)
    lengths = trajectories.response_tokens.lengths
    ends = segments.ends
    filled = ends.lengths > 0
    last = torch.zeros_like(lengths)
    last[filled] = ends.values[ends.offsets[1:][filled] - 1].to(torch.int64)
    if not torch.equal(last, lengths):
        row = int((last != lengths).nonzero()[0])
        raise AlignmentError(
            f"{segments.origin or 'segments'}: expected segments that cover each response, but the last segment of "
            f"trajectory {int(trajectories.uid[row])} ends at {int(last[row])} and its response has "
            f"{int(lengths[row])} tokens. Wire segments made from the same trajectories."
        )
    if values is None:
        return
    check_aligned(trajectories, values)
    counts = values.values.lengths
    if not torch.equal(counts, ends.lengths + 1):
        row = int((counts != ends.lengths + 1).nonzero()[0])
        raise AlignmentError(
            f"{values.origin or 'values'}: expected one value per boundary (segments + 1), got {int(counts[row])} "
            f"values for {int(ends.lengths[row])} segments of trajectory {int(trajectories.uid[row])}. "
            "Wire values made from the same segments."
        )
