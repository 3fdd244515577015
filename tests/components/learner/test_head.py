import pytest
import torch

from creditgraph.components.learner.logprobs import Head, token_logprobs
from creditgraph.components.learner.settings import Compute


def passes(dtype, chunk, wide):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 16, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(37, 16, generator=g).to(dtype).requires_grad_()
    a, b = (torch.randn(23, generator=g) for _ in range(2))
    logprobs, entropies = token_logprobs(hidden, torch.arange(23), Head(weight=weight), 0.7, chunk, wide)
    grads = torch.autograd.grad((a * logprobs + b * entropies).sum(), (hidden, weight))
    return logprobs.detach(), entropies.detach(), *grads


@pytest.mark.parametrize("chunk", [1, 4, 7, 22, 23])
@pytest.mark.parametrize("wide", [False, True])
def test_every_chunk_gives_the_same_values_and_gradients(chunk, wide):
    for part, whole in zip(passes(torch.float32, chunk, wide), passes(torch.float32, 100, wide), strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 7, 22])
def test_kept_in_float32_a_16_bit_head_does_not_depend_on_the_chunk(chunk):
    for part, whole in zip(passes(torch.bfloat16, chunk, True), passes(torch.bfloat16, 100, True), strict=True):
        # The weight's gradient is summed in float32 and rounded once.
        tolerance = 1e-5 if part.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(part, whole, rtol=tolerance, atol=1e-5)


def test_float32_products_are_nearer_to_the_exact_ones():
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=g).bfloat16() for n in (32, 50))
    exact, _ = token_logprobs(hidden.double().float(), torch.arange(32), Head(weight=weight.float()))
    errors = []
    for wide in (False, True):
        logprobs, _ = token_logprobs(hidden, torch.arange(32), Head(weight=weight), wide=wide)
        errors.append(float((logprobs - exact).abs().max()))
    assert errors[1] < 1e-5 < 1e-3 < errors[0]


def test_settings_are_the_arguments_of_the_head():
    assert Compute().head == (0, True)
    assert Compute(head_chunk=5, head_precision="model").head == (5, False)


def test_a_negative_chunk_is_refused():
    with pytest.raises(ValueError, match=r"expected head_chunk ≥ 0 \(0 chooses\), got -1"):
        Compute(head_chunk=-1)
