"""Draws: exact inverse CDF, truncation, distribution."""

import numpy as np
import pytest
import torch

from creditgraph.components.engine.local import batches
from creditgraph.components.engine.local.sampling import draw, inverse_cdf, truncate
from creditgraph.pipeline.core.handles import Requests, Sampling
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.streams import counter_uniform


def test_inverse_cdf_by_hand():
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75]])
    points = torch.tensor([0.0, 0.2499, 0.25, 0.9, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(weights.expand(5, -1), points).tolist() == [1, 1, 3, 3, 3]


def test_zero_probability_is_never_drawn_at_the_edges():
    weights = torch.zeros(64, 50_000)
    weights[:, 7], weights[:, 40_000] = 1e-30, 1e-38
    points = torch.linspace(0, 1 - 2**-53, 64, dtype=torch.float64)
    assert set(inverse_cdf(weights, points).tolist()) <= {7, 40_000}


def test_truncation_by_hand():
    p = torch.tensor([[0.5, 0.1, 0.3, 0.1]])
    assert truncate(p, 1.0, 2).tolist() == torch.tensor([[0.5, 0, 0.3, 0]]).tolist()
    # 0.5 + 0.3 reaches 0.75; a smaller top_p keeps only the first.
    assert (truncate(p, 0.75, 0) > 0).tolist() == [[True, False, True, False]]
    assert (truncate(p, 0.2, 0) > 0).tolist() == [[True, False, False, False]]
    # top-p counts within what top-k left: 0.5 of 0.8 is 0.625 ≥ 0.6.
    assert (truncate(p, 0.6, 2) > 0).tolist() == [[True, False, False, False]]
    assert (truncate(p, 0.85, 0) > 0).all()  # equal probabilities at the cut stay together


@pytest.mark.parametrize("vocab", [40, 1000])
def test_truncation_equals_transformers_warpers(vocab):
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(64, vocab, generator=torch.Generator().manual_seed(0)) * 0.5
    warped = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(vocab - 10)(None, logits.clone()))
    assert torch.equal(truncate(logits.softmax(-1), 0.9, vocab - 10) > 0, warped > -torch.inf)


def test_forbidden_columns_stay_in_the_softmax_but_are_not_drawn():
    logits = torch.tensor([[0.0, 5.0, 0.0]])
    forbidden = torch.tensor([False, True, False])
    for temperature in (0.0, 1.0):
        token, logprob, _ = draw(logits, torch.tensor([0.3], dtype=torch.float64), temperature, 1.0, 0, forbidden)
        assert token.tolist() == [0]
        assert float(logprob) == pytest.approx(float(torch.log_softmax(logits, -1)[0, 0]))


def test_infinite_logits_give_finite_entropy():
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    _, _, entropy = draw(logits, torch.tensor([0.3], dtype=torch.float64), 1.0, 1.0, 0, None)
    assert float(entropy) == pytest.approx(np.log(2))


def test_blocks_do_not_change_the_draw(monkeypatch):
    logits, uniform = torch.randn(33, 20), torch.rand(33, dtype=torch.float64)
    whole = draw(logits, uniform, 0.8, 0.9, 0, None)
    monkeypatch.setattr(batches, "BLOCK", 100)
    for a, b in zip(whole, draw(logits, uniform, 0.8, 0.9, 0, None), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.7)])
def test_first_token_has_the_exact_distribution(temperature, top_p, start):
    policy, model = start()
    count, prompt = 20_000, [5, 9, 30]
    rows = Jagged.from_rows([prompt] * count, torch.int32)
    sampled = policy.generate(
        Requests(
            tokens=rows, seed=torch.arange(count), sampling=Sampling(temperature=temperature, top_p=top_p, max_tokens=1)
        )
    )
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt], device=model.device)).logits[0, -1].cpu()
    exact = truncate((logits / temperature).softmax(-1)[None], top_p, 0)[0].double()
    expected = exact / exact.sum() * count
    seen = torch.bincount(sampled.tokens.values.long(), minlength=len(expected)).double()
    assert seen[expected == 0].sum() == 0
    common = expected >= 5
    rest = torch.stack([seen[~common].sum(), expected[~common].sum()])
    chi2 = float(((seen - expected) ** 2 / expected)[common].sum()) + (
        float((rest[0] - rest[1]) ** 2 / rest[1]) if rest[1] > 0 else 0
    )
    degrees = int(common.sum())
    # Wilson-Hilferty: the 99.9 % point of chi-square with n degrees of freedom.
    assert chi2 < degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3


def test_streams_of_rows_and_steps_are_independent():
    u = counter_uniform(np.arange(4000, dtype=np.uint64)[:, None], np.arange(2, dtype=np.uint64)[None])
    assert abs(np.corrcoef(u[:, 0], u[:, 1])[0, 1]) < 0.06
    assert abs(np.corrcoef(u[:-1, 0], u[1:, 0])[0, 1]) < 0.06
