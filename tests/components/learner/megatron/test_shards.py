"""Flat ranges of a tensor as boxes: every element once, in order."""

import random
from typing import Any

import pytest


@pytest.fixture(scope="module")
def boxes() -> Any:
    """The function; its module imports megatron-core, which takes seconds."""
    pytest.importorskip("megatron.core")
    from creditgraph.components.learner.megatron.shards import boxes

    return boxes


def elements(shape: tuple[int, ...], corner: tuple[int, ...], size: tuple[int, ...]) -> list[int]:
    """Numbers of a box's elements, one by one."""
    found = [0]
    for rows, first, count in zip(shape, corner, size, strict=True):
        assert 0 <= first < first + count <= rows
        found = [n * rows + first + i for n in found for i in range(count)]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_boxes_hold_every_element_of_a_range_once_in_order(boxes: Any, seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 4)))
    total = len(elements(shape, (0,) * len(shape), shape))
    start = draw.randint(0, total)
    stop = draw.randint(start, total)
    found = list(boxes(shape, start, stop))
    assert [n for _, corner, size in found for n in elements(shape, corner, size)] == list(range(start, stop))
    assert [first for first, corner, size in found] == [elements(shape, c, s)[0] for _, c, s in found]
    assert len(found) <= 2 * len(shape) - 1


def test_by_hand(boxes: Any) -> None:
    # Of a 3 × 4 matrix the elements 2 … 9: the end of row 0, row 1, and the beginning of row 2.
    assert list(boxes((3, 4), 2, 10)) == [(2, (0, 2), (1, 2)), (4, (1, 0), (1, 4)), (8, (2, 0), (1, 2))]
    assert list(boxes((), 0, 1)) == [(0, (), ())]
    assert list(boxes((3, 4), 5, 5)) == []
