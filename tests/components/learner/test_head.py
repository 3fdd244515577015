import math

import pytest
import torch

from creditgraph.components.learner import head, measure
from creditgraph.components.learner.head import HeadPlan, fastest, plan_head, plans_of
from creditgraph.components.learner.logprobs import Head, token_logprobs
from creditgraph.components.learner.settings import Compute

CPU = torch.device("cpu")


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


def test_plans_by_memory_vocabulary_and_settings():
    # 12 bytes per element of a chunk within 5 % of the memory: 2²⁸ · 12 = 3.2 GB of 80 GB · .05 = 4 GB.
    assert plans_of(Compute(head_precision="model"), (150_000, 64), 80 * 10**9) == [
        HeadPlan(chunk=n) for n in (447, 894, 1789)
    ]
    assert plans_of(Compute(head_precision="float32"), (150_000, 64), 10**9) == [HeadPlan(chunk=447, wide=True)]
    both = [HeadPlan(chunk=300, wide=wide) for wide in (False, True)]
    assert plans_of(Compute(head_chunk=300), (150_000, 64), 80 * 10**9) == both


@pytest.mark.parametrize(("wide_seconds", "expected"), [(0.9, "wide"), (1.09, "wide"), (1.11, "narrow")])
def test_float32_is_taken_unless_it_costs_over_a_tenth(wide_seconds, expected):
    plans = {"slow": HeadPlan(), "narrow": HeadPlan(chunk=2), "wide": HeadPlan(wide=True)}
    assert fastest({"slow": 3.0, "narrow": 1.0, "wide": wide_seconds}, plans) == expected
    assert fastest({"slow": 3.0, "narrow": 1.0}, plans) == "narrow"


def test_on_a_cpu_nothing_is_measured():
    def unused(times):
        raise AssertionError

    shape = (10, 4)
    assert plan_head(Compute(), shape, torch.float32, CPU, unused) == HeadPlan()
    fixed = Compute(head_chunk=5, head_precision="float32")
    assert plan_head(fixed, shape, torch.float32, CPU, unused) == HeadPlan(chunk=5, wide=True)


class GPU:
    type = "cuda"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which each pass takes the seconds that `times` gives by chunk and precision."""
    clock = [0.0]
    times = {}
    failing = set()

    def run(plan, shape, dtype, device):
        if (plan.chunk, plan.wide) in failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        clock[0] += times[plan.chunk, plan.wide]

    memory = type("Properties", (), {"total_memory": 80 * 10**9})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(measure, "_wait", lambda device: None)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(head, "_pass", run)
    return times, failing


def test_on_a_gpu_the_fastest_is_taken_and_logged_with_the_setting(gpu, caplog):
    times, failing = gpu
    chunks = (447, 894, 1789)
    times.update({(c, wide): 1 / c for c in chunks for wide in (False, True)})
    failing.add((1789, True))
    with caplog.at_level("INFO"):
        plan = plan_head(Compute(), (150_000, 64), torch.bfloat16, GPU(), lambda t: t)
    # Of float32 only 894 is left, twice as slow as 1,789 in the model's dtype.
    assert plan == HeadPlan(chunk=1789)
    assert "fastest here: learner.compute.head_chunk=1789 learner.compute.head_precision=model" in caplog.text
    assert (
        "head_chunk=1789 learner.compute.head_precision=float32 (OutOfMemoryError: CUDA out of memory)" in caplog.text
    )


def test_ranks_choose_by_their_sum(gpu):
    times, _ = gpu
    times.update({(300, False): 1.0, (300, True): 1.0})
    other = torch.tensor([math.inf, 5.0], dtype=torch.float64)  # where the first one failed
    plan = plan_head(Compute(head_chunk=300), (9, 4), torch.bfloat16, GPU(), lambda t: t + other)
    assert plan == HeadPlan(chunk=300, wide=True)


def test_a_negative_chunk_is_refused():
    with pytest.raises(ValueError, match=r"expected head_chunk ≥ 0 \(0 chooses\), got -1"):
        Compute(head_chunk=-1)
