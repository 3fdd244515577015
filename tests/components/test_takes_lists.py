"""Pure functions of segmenters, advantages and objectives take plain lists of numbers."""

import pytest
import torch

from creditgraph import group_advantage, group_sum
from creditgraph.components.advantage.gae import adaptive_lambda
from creditgraph.components.advantage.process import sum_of_later
from creditgraph.components.learner.objective.kl import kl_estimate
from creditgraph.components.segmenter.entropy_cuts import entropy_ends
from creditgraph.components.segmenter.fixed import fixed_ends
from creditgraph.pipeline.core.jagged import Jagged, takes_lists


def test_lists_give_what_tensors_give() -> None:
    # Mean 1/2, population standard deviation 1/2: (1 − 1/2) / (1/2 + 1e-6) ≈ 1.
    assert group_advantage([1, 0, 0, 1]).tolist() == pytest.approx([1, -1, -1, 1], abs=1e-5)
    # Two groups: [2, 0] → ±1, and one alone → 0.
    assert group_advantage([2.0, 0.0, 5.0], [7, 7, 8]).tolist() == pytest.approx([1, -1, 0], abs=1e-5)
    assert group_advantage([1.0, 0.0, 9.0], [0, 0, 0], [True, True, False]).tolist()[2] == 0.0
    assert group_sum([1.0, 2.0, 4.0], [3, 1, 3])[0].tolist() == [2.0, 5.0]
    assert fixed_ends([5, 2], 2).to_lists() == [[2, 4, 5], [2]]
    assert sum_of_later([[1.0, 2.0, 4.0], [8.0]]).to_lists() == [[7.0, 6.0, 4.0], [8.0]]
    # One cut before the token of the largest entropy.
    assert (
        entropy_ends([[0.1, 3.0, 0.2]], 2).to_lists() == entropy_ends(Jagged.from_rows([[0.1, 3.0, 0.2]]), 2).to_lists()
    )
    assert adaptive_lambda([10, 100], 0.05).tolist() == adaptive_lambda(torch.tensor([10, 100]), 0.05).tolist()
    # k1 is the log-ratio itself: log p − log p_ref.
    assert kl_estimate([-1.0, -2.0], [-1.5, -2.0], "k1").tolist() == [0.5, 0.0]


def test_other_arguments_and_keywords_pass_as_they_are() -> None:
    @takes_lists
    def f(x: "torch.Tensor", names: "list[str]", *, rows: "Jagged | None" = None) -> tuple:
        return x, names, rows

    x, names, rows = f([1.5], ["a"], rows=[[1], []])
    assert torch.is_tensor(x)
    assert names == ["a"]
    assert isinstance(rows, Jagged)
    assert f(x, names=["b"]) == (x, ["b"], None)
