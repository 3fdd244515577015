import math

import pytest
import torch

from creditgraph.components.learner.logprobs import Head, token_logprobs


def inputs(n=23, d=8, v=37, dtype=torch.float32, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g).to(device, dtype).requires_grad_()
    weight = torch.randn(v, d, generator=g).to(device, dtype).requires_grad_()
    bias = torch.randn(v, generator=g).to(device, dtype).requires_grad_()
    targets = torch.randint(0, v, (n,), generator=g).to(device)
    return hidden, weight, bias, targets


def test_by_hand():
    # One hidden value 1; logits 0 and log 3: p = (1/4, 3/4).
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3)]])
    logprobs, entropies = token_logprobs(hidden, torch.tensor([0, 1]), Head(weight=weight))
    assert logprobs.tolist() == pytest.approx([math.log(0.25), math.log(0.75)])
    # H = ¼ log 4 + ¾ log 4/3
    assert entropies.tolist() == pytest.approx([0.25 * math.log(4) + 0.75 * math.log(4 / 3)] * 2)


def test_temperature_by_hand():
    # At T = 2 the logits are 0 and log √3.
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [math.log(3)]])
    logprobs, _ = token_logprobs(hidden, torch.tensor([0]), Head(weight=weight), temperature=2.0)
    assert float(logprobs) == pytest.approx(-math.log(1 + math.sqrt(3)))


@pytest.mark.parametrize("chunk", [1, 5, 23, 100])
@pytest.mark.parametrize(
    ("with_bias", "softcap", "scale", "temperature"), [(False, 0, 1, 1), (True, 0, 0.5, 0.7), (True, 3.0, 2.0, 1.3)]
)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_equals_plain_softmax(reference, device, chunk, with_bias, softcap, scale, temperature, with_entropy):
    hidden, weight, bias, targets = inputs(device=device)
    g = torch.Generator().manual_seed(1)
    a, b = (torch.randn(len(targets), generator=g).to(device) for _ in range(2))
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    results = []
    for fast in (True, False):
        if fast:
            head = Head(weight=weight, bias=bias if with_bias else None, softcap=softcap, scale=scale)
            logprobs, entropies = token_logprobs(hidden, targets, head, temperature, chunk)
        else:
            logprobs, entropies = reference.plain_logprobs(
                hidden, weight, targets, temperature, bias if with_bias else None, softcap, scale
            )
        loss = (a * logprobs).sum() + ((b * entropies).sum() if with_entropy else 0)
        results.append([logprobs, entropies, *torch.autograd.grad(loss, leaves)])
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)


def test_entropy_of_impossible_tokens_is_finite():
    # A masked vocabulary column: logit −inf has probability 0 and adds nothing to the entropy.
    hidden, weight, bias = torch.ones(1, 1), torch.zeros(3, 1), torch.tensor([0.0, 0.0, -math.inf])
    logprobs, entropies = token_logprobs(hidden.requires_grad_(), torch.tensor([0]), Head(weight=weight, bias=bias))
    (logprobs + entropies).sum().backward()
    assert float(entropies.detach()) == pytest.approx(math.log(2))
    assert bool(torch.isfinite(hidden.grad).all())


def test_frozen_head_gets_no_gradient():
    hidden, weight, _, targets = inputs()
    token_logprobs(hidden, targets, Head(weight=weight.detach()))[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_bfloat16_close_to_float32():
    hidden, weight, _, targets = inputs()
    exact = token_logprobs(hidden, targets, Head(weight=weight))[0]
    rough = token_logprobs(hidden.bfloat16(), targets, Head(weight=weight.bfloat16()))[0]
    assert rough.dtype == torch.float32
    assert float((exact - rough).detach().abs().max()) < 0.2


def test_no_tokens():
    logprobs, entropies = token_logprobs(
        torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), Head(weight=torch.zeros(5, 4))
    )
    assert logprobs.shape == entropies.shape == (0,)


def test_errors():
    with pytest.raises(
        ValueError, match=r"expected hidden \[N, D\] and targets \[N\] or \[N, K\], got \(3, 4\) and \(2,\)"
    ):
        token_logprobs(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64), Head(weight=torch.zeros(5, 4)))
    with pytest.raises(ValueError, match=r"expected temperature > 0 .*, got 0\."):
        token_logprobs(
            torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), Head(weight=torch.zeros(5, 4)), temperature=0
        )


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_several_targets_of_each_place(device, chunk):
    hidden, weight, bias, _ = inputs(device=device)
    targets = torch.randint(0, 37, (23, 4), generator=torch.Generator().manual_seed(2)).to(device)
    factors = torch.linspace(-1, 1, 4).to(device)
    head = Head(weight=weight, bias=bias)
    together, entropies = token_logprobs(hidden, targets, head, 0.7, chunk)
    apart = [token_logprobs(hidden, column, head, 0.7, chunk) for column in targets.T]
    torch.testing.assert_close(together, torch.stack([logprobs for logprobs, _ in apart], 1))
    assert torch.equal(entropies, apart[0][1])
    fast = torch.autograd.grad((together * factors).sum() + entropies.sum(), [hidden, weight, bias])
    slow = sum((logprobs * f).sum() for (logprobs, _), f in zip(apart, factors, strict=True)) + apart[0][1].sum()
    for a, b in zip(fast, torch.autograd.grad(slow, [hidden, weight, bias]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
