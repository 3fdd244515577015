"""From numbers per segment to numbers per token: what segment-level advantages share."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.core.errors import AlignmentError
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Segments, SegmentValues, Trajectories, check_aligned


def segment_of_token(ends: Jagged, tokens: Jagged) -> Tensor:
    """int64 [total tokens]: the segment of each token, as a place in `ends.values`.

    Args:
        ends: exclusive segment ends per row, strictly increasing, the last one the number of tokens; empty for an empty
            row.
        tokens: any Jagged over the tokens.
    """
    bounds = ends.values + tokens.offsets[:-1][ends.row_ids]
    return torch.searchsorted(bounds, torch.arange(len(tokens.values), device=bounds.device), right=True)


def increments(values: Jagged) -> Jagged:
    """v(s_{k+1}) − v(s_k) for each segment k: one entry less per row than `values` [segments + 1 per row]."""
    keep = values.lengths.clamp(min=1) - 1
    start = torch.zeros_like(keep)
    before, after = (
        values.slice_rows(start, keep),
        values.slice_rows(start + values.lengths.clamp(max=1), keep + values.lengths.clamp(max=1)),
    )
    return after.with_values(after.values - before.values)


def with_final(values: Jagged, final: Tensor) -> Jagged:
    """`values` with the last entry of each row that has segments replaced by `final` [N]."""
    out, rows = values.values.clone(), values.lengths > 1
    out[values.offsets[1:][rows] - 1] = final[rows].to(out.dtype)
    return values.with_values(out)


def check_segments(trajectories: Trajectories, segments: Segments, values: SegmentValues) -> None:
    """Raises AlignmentError unless segments cover every response and there is one value per boundary."""
    check_aligned(trajectories, segments)
    check_aligned(trajectories, values)
    lengths, ends = trajectories.response_tokens.lengths, segments.ends
    filled = ends.lengths > 0
    last = torch.zeros_like(lengths)
    last[filled] = ends.values[ends.offsets[1:][filled] - 1].to(torch.int64)
    if not torch.equal(last, lengths):
        row = int((last != lengths).nonzero()[0])
        raise AlignmentError(
            f"{segments.origin or 'segments'}: the last segment of trajectory {int(trajectories.uid[row])} ends at "
            f"{int(last[row])}, "
            f"its response has {int(lengths[row])} tokens; wanted segments that cover the response. "
            "Wire segments made from the same trajectories."
        )
    if not torch.equal(values.values.lengths, ends.lengths + 1):
        row = int((values.values.lengths != ends.lengths + 1).nonzero()[0])
        raise AlignmentError(
            f"{values.origin or 'values'}: {int(values.values.lengths[row])} values for {int(ends.lengths[row])} "
            "segments of trajectory "
            f"{int(trajectories.uid[row])}; wanted one per boundary, segments + 1. Wire values made from the same "
            "segments."
        )
