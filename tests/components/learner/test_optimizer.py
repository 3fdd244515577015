import math

import pytest
import torch
from torch import nn

from creditgraph.components.learner.optimizer import Optimizer, OptimizerSettings, learning_rate


def settings(**more):
    return OptimizerSettings(**{"lr": 0.1, "grad_clip": 0.0, **more})


def test_schedules_by_hand():
    linear, cosine, constant = (settings(schedule=s, warmup=2) for s in ("linear", "cosine", "constant"))
    assert [learning_rate(constant, i, 6) for i in range(4)] == pytest.approx([0.05, 0.1, 0.1, 0.1])
    # 4 steps after 2 of warm-up: shares 0, ¼, ½, ¾, then 1
    assert [learning_rate(linear, i, 6) for i in range(2, 8)] == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0, 0.0])
    halves = [0.1 * (1 + math.cos(math.pi * x / 4)) / 2 for x in range(5)]
    assert [learning_rate(cosine, i, 6) for i in range(2, 7)] == pytest.approx(halves)


def test_first_step_by_hand():
    # Adam's first step is lr·g/(|g| + eps); a matrix also decays by lr·wd, a vector does not.
    matrix, vector = nn.Parameter(torch.tensor([[1.0]])), nn.Parameter(torch.tensor([1.0]))
    optimizer = Optimizer({"w": matrix, "b": vector}, settings(weight_decay=0.5), 10, no_decay=set())
    matrix.grad, vector.grad = torch.tensor([[3.0]]), torch.tensor([-4.0])
    norm, rate, made = optimizer.step()
    assert (norm, rate, made) == (5.0, 0.1, True)
    assert float(matrix.detach()) == pytest.approx(1 - 0.1 * 0.5 - 0.1)
    assert float(vector.detach()) == pytest.approx(1 + 0.1)


def test_names_without_decay():
    embedding = nn.Parameter(torch.ones(1, 1))
    optimizer = Optimizer({"e": embedding}, settings(weight_decay=0.5), 10, no_decay={"e"})
    embedding.grad = torch.zeros(1, 1)
    optimizer.step()
    assert float(embedding.detach()) == 1.0


def test_equals_torch_adamw_with_clipping():
    g = torch.Generator().manual_seed(0)
    start = torch.randn(4, 3, generator=g)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = Optimizer({"w": mine}, settings(weight_decay=0.1, grad_clip=1.0, betas=(0.8, 0.9)), 10, no_decay=set())
    plain = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1, betas=(0.8, 0.9), foreach=False)
    for _ in range(5):
        grad = torch.randn(4, 3, generator=g)
        mine.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step()
        nn.utils.clip_grad_norm_([theirs], 1.0)
        plain.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradient_changes_nothing(bad):
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = Optimizer({"w": weight}, settings(), 10, no_decay=set())
    weight.grad = torch.tensor([[1.0, bad], [0.0, 0.0]])
    assert optimizer.step()[2] is False
    assert weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert optimizer.state_dict()["moments"] == {}
    assert weight.grad is None


def test_bfloat16_keeps_small_updates_in_the_master():
    # 1e-3 is below half a bfloat16 step at 1 (2⁻⁸ ≈ .004): without a master every update would be rounded away.
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = Optimizer({"w": weight}, settings(lr=1e-3), 100, no_decay=set())
    for _ in range(8):
        for _ in range(2):  # two micro-batches
            weight.grad = torch.full((2, 2), 0.5, dtype=torch.bfloat16)
            optimizer.collect()
        assert weight.grad is None
        assert optimizer.step()[0] == pytest.approx(2.0)
    assert optimizer.state_dict()["masters"]["w"][0, 0] == pytest.approx(1 - 8e-3, abs=1e-5)
    assert float(weight[0, 0].detach()) == pytest.approx(1 - 2**-7)


def test_replicas_sum_their_gradients():
    weight = nn.Parameter(torch.zeros(1, 1))
    optimizer = Optimizer({"w": weight}, settings(), 10, no_decay=set())
    weight.grad = torch.tensor([[2.0]])
    assert optimizer.step(lambda x: 3 * x)[0] == 6.0


def test_checkpoint_of_another_model_is_refused():
    one = Optimizer({"a": nn.Parameter(torch.ones(1))}, settings(), 10, no_decay=set())
    two = Optimizer({"b": nn.Parameter(torch.ones(1))}, settings(), 10, no_decay=set())
    with pytest.raises(ValueError, match="differ in 2 trained parameters, first 'a'"):
        two.load_state_dict(one.state_dict())


def test_wrong_settings():
    with pytest.raises(ValueError, match=r"expected lr, .* ≥ 0, got -1.0, 0.0, 1.0 and 0"):
        OptimizerSettings(lr=-1.0)
    with pytest.raises(ValueError, match=r"expected two betas in \[0, 1\), got \(0.9, 1.0\)"):
        OptimizerSettings(betas=(0.9, 1.0))
