"""The pool itself: results in rank order, failures with their rank, a failed pool starts again."""

from typing import Any

import pytest


def total(number: int) -> tuple[int, float]:
    import torch
    import torch.distributed as dist

    x = torch.tensor([float(number + dist.get_rank())])
    dist.all_reduce(x)
    return dist.get_rank(), float(x)


def fail_on_one() -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("rank 1 says no")
    dist.all_reduce(torch.zeros(1))


def test_results_come_in_rank_order_and_a_failure_names_its_rank(pool: Any) -> None:
    assert pool.run(total, 1) == [(rank, 10.0) for rank in range(4)]
    with pytest.raises(AssertionError, match="rank 1 says no"):
        pool.run(fail_on_one, grace=1.0)
    assert pool.run(total, 2) == [(rank, 14.0) for rank in range(4)]
