"""Vocabulary-parallel log-probs and entropies against numbers by hand, a plain loop and a float64 softmax; memory."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from creditgraph.components.learner.logprobs import Head, VocabShard, token_logprobs


def draw(rows: int = 23, width: int = 6, vocab: int = 40, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(rows, width, generator=g), torch.randn(vocab, width, generator=g)
    return hidden, weight, torch.randint(0, vocab - 3, (rows,), generator=g)


def of_one_rank(hidden: Tensor, weight: Tensor, targets: Tensor, vocab: int, **more: Any) -> tuple[Tensor, Tensor]:
    """One rank has the whole vocabulary; rows beyond `vocab` are padding."""
    return token_logprobs(hidden, targets, Head(weight=weight, shard=VocabShard(start=0, size=vocab)), **more)


def test_numbers_by_hand() -> None:
    # Logits 0, ln 2, ln 3 → probabilities 1/6, 2/6, 3/6; the fourth entry is padding.
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(3)], [50.0]])
    logprobs, entropies = of_one_rank(torch.ones(2, 1), weight, torch.tensor([1, 2]), 3)
    assert logprobs.tolist() == pytest.approx([math.log(1 / 3), math.log(1 / 2)])
    # ln 6 / 6 + ln 3 / 3 + ln 2 / 2
    assert entropies.tolist() == pytest.approx([1.011404] * 2)


def test_equals_a_plain_loop() -> None:
    hidden, weight, targets = draw(rows=5)
    logprobs, entropies = of_one_rank(hidden, weight, targets, 37, temperature=0.5, chunk=2)
    for i in range(5):
        exponentials = [math.exp(float(hidden[i] @ weight[j]) / 0.5) for j in range(37)]
        p = [e / sum(exponentials) for e in exponentials]
        assert float(logprobs[i]) == pytest.approx(math.log(p[int(targets[i])]), abs=1e-5)
        assert float(entropies[i]) == pytest.approx(-sum(q * math.log(q) for q in p), abs=1e-5)


def test_a_shard_of_everything_is_no_shard_bit_for_bit() -> None:
    hidden, weight, targets = draw()
    sharded = of_one_rank(hidden, weight, targets, len(weight), temperature=0.7, chunk=4)
    whole = token_logprobs(hidden, targets, Head(weight=weight), temperature=0.7, chunk=4)
    assert all(torch.equal(x, y) for x, y in zip(sharded, whole, strict=True))


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab: int, temperature: float, by: str
) -> tuple[Tensor, ...]:
    """Float64 softmax over all logits: log-probs, entropies, gradients of hidden and weight."""
    h, w = (x.double().requires_grad_() for x in (hidden, weight))
    log_p = (h @ w[:vocab].t() / temperature).log_softmax(-1)
    logprobs, entropies = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    c = torch.linspace(-1.0, 2.0, len(targets), dtype=torch.float64)
    ((c * logprobs).sum() * (by != "entropies") + (c.flip(0) * entropies).sum() * (by != "logprobs")).backward()
    return logprobs.detach(), entropies.detach(), h.grad, w.grad


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_value_and_gradient_equal_float64_softmax(tensor: int, pool: Any, ranks: Any) -> None:
    cases = [(v, t, by) for v, t in ((40, 1.0), (29, 0.6)) for by in ("logprobs", "entropies", "both")]
    given = draw()
    given[2].clamp_(max=28)
    answers = pool.run(ranks.head, tensor, *given, cases)
    for i, (vocab, temperature, by) in enumerate(cases):
        expected = plain(*given, vocab, temperature, by)
        replica = [a[i] for a in answers[:tensor]]
        for logprobs, entropies, d_hidden, _ in replica:
            for x, y in zip((logprobs, entropies, d_hidden), expected[:3], strict=True):
                torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.cat([r[3] for r in replica]).double(), expected[3], rtol=1e-5, atol=1e-5)


def peak(rows: int, vocab: int, chunk: int) -> int:
    """Most bytes alive at once in a forward and backward pass, beside the inputs."""
    hidden, weight = torch.randn(rows, 2, requires_grad=True), torch.randn(vocab, 2, requires_grad=True)
    targets = torch.randint(0, vocab, (rows,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        logprobs, entropies = of_one_rank(hidden, weight, targets, vocab, chunk=chunk)
        (logprobs.sum() + entropies.sum()).backward()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = torch.tensor([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).cumsum(0)
    return int(alive.max())


def test_memory_does_not_grow_with_the_sequence_beyond_a_chunk() -> None:
    vocab = 151_936
    short, long = peak(8, vocab, 2), peak(64, vocab, 2)
    logits = 2 * vocab * 4
    assert short > logits
    # Beside the chunk's logits only [N]-sized tensors grow: at most 100 floats per token here.
    assert long - short < 56 * 400 < logits
