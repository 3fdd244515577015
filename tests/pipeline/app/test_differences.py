"""What replay says of two payloads that are not the same bits."""

import math
from dataclasses import dataclass

import pytest
import torch

from creditgraph.pipeline.app.differences import describe_difference
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Batch, Payload


@dataclass(frozen=True, kw_only=True)
class Rows(Batch):
    values: Jagged


@dataclass(frozen=True, kw_only=True)
class One(Payload):
    value: torch.Tensor


def rows(*lists, dtype=torch.float32):
    return Rows(uid=torch.arange(len(lists)) + 7, values=Jagged.from_rows(lists, dtype))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (rows([1.0, math.nan], [2.0]), rows([1.0, math.nan], [2.0]), []),
        (
            rows([1.0, math.nan], [2.0]),
            rows([1.0, math.nan], [5.0]),
            ["values: 1 of 3 values in 1 rows differ, largest |Δ| 3, mean 1.5 → 3; first at uid 8: 2 → 5"],
        ),
        # A number that became NaN is a difference, 0 too.
        (
            rows([0.0, 1.0]),
            rows([math.nan, 1.0]),
            ["values: 1 of 2 values in 1 rows differ, largest |Δ| 0, mean 0.5 → 1; first at uid 7: 0 → nan"],
        ),
        (rows([1.0], []), rows([1.0], [2.0]), ["values: lengths differ in 1 of 2 rows"]),
        (rows([1.0]), rows([1.0], [2.0]), ["rows differ: 1 recorded, 2 now, 1 in common"]),
        (
            rows([1.0]),
            rows([1.0], dtype=torch.float64),
            ["values: the same values, as torch.float32 → as torch.float64"],
        ),
        (
            One(value=torch.zeros(2, 3)),
            One(value=torch.tensor([[0.0, 0.0, 0.0], [0.0, 4.0, math.nan]])),
            ["value: 2 of 6 values in 1 rows differ, largest |Δ| 4, mean 0 → 0.8; first at row 1: 0 → 4"],
        ),
        (
            One(value=torch.tensor(1)),
            One(value=torch.tensor(3)),
            ["value: 1 of 1 values in 1 rows differ, largest |Δ| 2, mean 1 → 3; first at row 0: 1 → 3"],
        ),
        (One(value=torch.tensor([True])), One(value=torch.tensor([True])), []),
        (One(value=torch.zeros(2)), One(value=torch.zeros(3)), ["value: shape (2,) → (3,)"]),
    ],
)
def test_what_is_said(old, new, said):
    assert describe_difference(old, new) == said
