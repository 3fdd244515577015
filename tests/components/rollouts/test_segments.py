"""Segments of responses, by hand."""

import torch

from creditgraph.components.rollouts.segments import (
    close_segments,
    increments,
    rank_in_row,
    segment_of_token,
    with_final,
)
from creditgraph.pipeline.core.jagged import Jagged


def test_ends_are_made_valid():
    ends = Jagged.from_rows([[2, 2, 9], [0, 1], [], [3, 1]], torch.int32)
    assert close_segments(ends, torch.tensor([4, 1, 0, 3])).to_lists() == [[2, 4], [1], [], [1, 3]]


def test_differences_of_values():
    values = Jagged.from_rows([[0.5, 0.25, 1.0], [0.5], [0.0, 2.0]], torch.float32)
    assert increments(values).to_lists() == [[-0.25, 0.75], [], [2.0]]
    assert with_final(values, torch.tensor([7.0, 8.0, 9.0])).to_lists() == [[0.5, 0.25, 7.0], [0.5], [0.0, 9.0]]


def test_the_segment_of_each_token():
    ends = Jagged.from_rows([[2, 3], [], [1]], torch.int32)
    tokens = Jagged.from_rows([[0, 0, 0], [], [0]], torch.int32)
    assert segment_of_token(ends, tokens).tolist() == [0, 0, 1, 2]


def test_ranks_within_rows():
    values = Jagged.from_rows([[9.0, 2.0, 0.1, 3.0, 0.2], [1.0], [], [1.0, 1.0, 1.0]], torch.float32)
    assert rank_in_row(values).to_lists() == [[0, 2, 4, 1, 3], [0], [], [0, 1, 2]]
