"""Gradient statistics: a slow double loop, a toy whose variance is known, and the learner's own gradient."""

import math

import pytest
import torch

from creditgraph.components.learner.hf.model import LearnerModel
from creditgraph.components.models.load import load_causal_lm
from creditgraph.lab.bench.gradients import GradientSums, leave_one_out, pooled, prompt_gradients
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.jagged import Jagged


def draws(count, size=6, seed=0, mean=1.0, sd=0.5):
    generator = torch.Generator().manual_seed(seed)
    return {i: mean + sd * torch.randn(size, generator=generator, dtype=torch.float64) for i in range(count)}


def test_sums_are_those_of_a_double_loop():
    g, t = draws(5), {i: v for i, v in draws(7, seed=1).items() if i != 2}
    result = GradientSums.of(g, t, tokens=100.0).metrics()
    cross = [float(g[p] @ t[q]) for p in g for q in t if p != q]
    size = [float(g[p] @ g[q]) for p in g for q in g if p != q]
    true_size = [float(t[p] @ t[q]) for p in t for q in t if p != q]
    mean = [sum(x) / len(x) for x in (cross, size, true_size)]
    noise = sum(float(v @ v) for v in g.values()) / 5 - mean[1]
    assert result["cosine"] == pytest.approx(mean[0] / math.sqrt(mean[1] * mean[2]))
    assert result["signal"] == pytest.approx(mean[0] / math.sqrt(mean[2]))
    assert result["noise"] == pytest.approx(noise)
    assert result["tokens"] == pytest.approx(noise * 20 / result["signal"] ** 2)
    # Two steps learn from the five prompts.
    steps = GradientSums.of(g, t, 100.0, steps=2).metrics()["steps"]
    assert steps == pytest.approx(noise * 2 / 5 / result["signal"] ** 2)


def test_noise_is_the_trace_of_the_sample_covariance():
    g = draws(40)
    stacked = torch.stack(list(g.values()))
    assert GradientSums.of(g, g, 1.0).metrics()["noise"] == pytest.approx(float(torch.cov(stacked.T).trace()))


def test_known_variance_is_found():
    # six independent coordinates with sd ½: trace 6/4; mean 1 in each: ‖ḡ‖ = √6; one token per prompt: 1.5/6 tokens
    result = GradientSums.of(draws(20_000), draws(20_000, seed=9, sd=0.1), tokens=20_000.0).metrics()
    assert result["noise"] == pytest.approx(1.5, rel=0.02)
    assert result["signal"] == pytest.approx(math.sqrt(6), rel=0.01)
    assert result["cosine"] == pytest.approx(1.0, abs=0.01)
    assert result["tokens"] == pytest.approx(0.25, rel=0.03)


def test_a_scaled_gradient_needs_the_same_tokens_and_a_noisier_one_more():
    t = draws(2000, seed=5)
    plain = GradientSums.of(draws(2000), t, 2000.0).metrics()
    scaled = GradientSums.of({k: 10 * v for k, v in draws(2000).items()}, t, 2000.0).metrics()
    noisy = GradientSums.of(draws(2000, sd=1.0), t, 2000.0).metrics()
    assert scaled["tokens"] == pytest.approx(plain["tokens"])
    assert noisy["tokens"] == pytest.approx(4 * plain["tokens"], rel=0.1)


def test_shared_rollouts_do_not_make_noise_look_like_signal():
    # zero-mean gradients that equal the true ones prompt by prompt: no signal remains
    result = []
    for seed in range(200):
        g = draws(8, seed=seed, mean=0.0)
        sums = GradientSums.of(g, g, 1.0)
        result.append((float(sums.total @ sums.true_total) - sums.common) / 56)
    spread = torch.tensor(result).std() / math.sqrt(200)
    assert abs(sum(result) / 200) < 3 * float(spread)


def test_parts_add_up_to_the_whole():
    parts = [GradientSums.of(draws(4, seed=s), draws(4, seed=s + 50), 10.0) for s in range(3)]
    whole = pooled(parts)
    assert leave_one_out(parts, "noise")[0] == pooled(parts[1:])["noise"]
    assert whole["noise"] != pooled(parts[:2])["noise"]
    assert parts[0].prompts == 4  # adding has not changed the parts


def test_too_few_prompts_give_no_number():
    assert math.isnan(GradientSums.of(draws(1), draws(1), 1.0).metrics()["tokens"])


@pytest.fixture(scope="module")
def model():
    return LearnerModel(load_causal_lm(ModelSpec(), "cpu"))


def test_mean_of_prompt_gradients_is_the_gradient_of_the_batch(toolbox, model):
    from creditgraph.components.learner.packing.pack import pack

    tokens = Jagged.from_rows([[5, 6, 7], [8, 9], [10, 11, 12]], torch.int32)
    rows = toolbox.trajectories(
        ["abc", "de", "fgh"],
        response_tokens=tokens,
        prompt_uid=torch.tensor([100, 101, 101]),
        prompt_tokens=Jagged.from_rows([[3, 4]] * 3, torch.int32),
        thought_ends=Jagged.from_rows([[3], [2], [3]], torch.int32),
    )
    weight = tokens.with_values(torch.tensor([0.1, 0.2, 0.3, 0.0, 0.0, -0.4, 0.5, 0.6], dtype=torch.float64))
    actual = prompt_gradients(model, rows, weight, 1.0)
    assert sorted(actual) == [100, 101]
    parameters = list(model.trainable().values())
    logprobs, _ = model.logprobs(pack(rows.prompt_tokens, tokens, torch.arange(3)), 1.0)
    expected = torch.autograd.grad((logprobs.values * weight.values.float()).sum(), parameters)
    whole = torch.cat([g.flatten() for g in expected])
    assert torch.allclose((actual[100] + actual[101]) / 2, whole, atol=1e-5)


def test_a_prompt_without_credit_has_a_zero_gradient(toolbox, model):
    tokens = Jagged.from_rows([[5, 6]], torch.int32)
    rows = toolbox.trajectories(
        ["ab"],
        response_tokens=tokens,
        prompt_tokens=Jagged.from_rows([[3]], torch.int32),
        thought_ends=Jagged.from_rows([[2]], torch.int32),
    )
    result = prompt_gradients(model, rows, tokens.with_values(torch.zeros(2, dtype=torch.float64)), 1.0)
    assert float(result[100].abs().sum()) == 0.0
