"""Scoring branches off shared trunks, and attribution of a log-prob to its context."""

import pytest
import torch

from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.jagged import Jagged


def _ragged(seed=0, trunks=5, branches=23):
    """Trunks of 1 to 40 tokens, the second one unused; branches of 0 to 6 tokens in no order."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    trunk = Jagged.from_rows([draw(3, 34, n) for n in [1, 9, *draw(2, 41, trunks - 2).tolist()]], torch.int32)
    row = draw(0, trunks, branches)
    row = torch.where(row == 1, 0, row)
    at = 1 + (torch.rand(branches, generator=generator) * trunk.lengths[row]).long()
    tokens = Jagged.from_rows([draw(3, 34, n) for n in [0, 1, *draw(0, 7, branches - 2).tolist()]], torch.int32)
    return trunk, row, at, tokens


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("score_tokens", [16384, 60])
def test_equal_to_scoring_each_branch_alone(start, kind, score_tokens):
    policy, _ = start(kind, decoder="lean", score_tokens=score_tokens)
    trunk, row, at, tokens = _ragged()
    fast = policy.score_branches(trunk, row, at, tokens, 0.7)
    slow = Policy.score_branches(policy, trunk, row, at, tokens, 0.7)
    assert fast.logprobs.lengths.tolist() == tokens.lengths.tolist()
    torch.testing.assert_close(fast.logprobs.values, slow.logprobs.values, rtol=0, atol=1e-5)
    torch.testing.assert_close(fast.entropies.values, slow.entropies.values, rtol=0, atol=1e-5)


def test_models_without_a_lean_decoder_give_the_same(start):
    policy, _ = start("gpt2")
    trunk, row, at, tokens = _ragged(2)
    result = policy.score_branches(trunk, row, at, tokens)
    alone = policy.score(
        Jagged.from_rows([trunk.row(r)[:a] for r, a in zip(row.tolist(), at.tolist(), strict=True)]), tokens
    )
    assert result.logprobs.equal(alone.logprobs)


def test_trunks_are_counted_once(start):
    policy, _ = start("qwen2", decoder="lean")
    policy.engine._counters.clear()
    # Branches off the first 4 and the first 6 of 8 tokens, of 3 and 1 tokens: 6 trunk tokens and 2 + 0 that predict
    # something.
    trunk = Jagged.from_rows([[3] * 8], torch.int32)
    policy.score_branches(
        trunk, torch.tensor([0, 0]), torch.tensor([4, 6]), Jagged.from_rows([[5, 6, 7], [8]], torch.int32)
    )
    assert policy.engine._counters["scored_tokens"] == 8
    policy.score(Jagged.from_rows([[3] * 8], torch.int32), Jagged.from_rows([[5, 6]], torch.int32))
    assert policy.engine._counters["scored_tokens"] == 18


def test_nothing_to_score(start):
    policy, _ = start("qwen2", decoder="lean")
    trunk = Jagged.from_rows([[3, 4]], torch.int32)
    none = torch.zeros(0, dtype=torch.int64)
    assert len(policy.score_branches(trunk, none, none, Jagged.from_rows([], torch.int32)).logprobs) == 0
    empty = Jagged.from_rows([[]], torch.int32)
    assert policy.score_branches(trunk, torch.tensor([0]), torch.tensor([0]), empty).logprobs.to_lists() == [[]]


@pytest.mark.parametrize(
    ("row", "at", "length", "message"),
    [
        ([0], [0], 1, "expected a start after 1 to 2 tokens .* but branch 0 starts after 0"),
        ([0], [3], 1, "branch 0 starts after 3"),
        ([1], [1], 1, "expected trunk rows 0 to 0, got 1 to 1"),
        ([0], [1, 1], 1, "1 rows, 2 places and 1 token rows"),
        ([0], [2], 95, "expected at most 96 tokens .* but prefix plus branch have 97"),
    ],
)
def test_bad_branches(start, row, at, length, message):
    policy, _ = start("qwen2", decoder="lean")
    trunk, tokens = Jagged.from_rows([[3, 4]], torch.int32), Jagged.from_rows([[5] * length], torch.int32)
    with pytest.raises(CreditgraphError, match=message):
        policy.score_branches(trunk, torch.tensor(row), torch.tensor(at), tokens)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_attribution_by_finite_differences(start, kind):
    policy, model = start(kind, attributions=kind == "qwen2")
    context = Jagged.from_rows([[3, 9, 12, 5], [7], [8, 8, 20]], torch.int32)
    tokens = Jagged.from_rows([[6, 11], [4, 5, 6], []], torch.int32)
    result = policy.attribute(context, tokens)
    model = model.double()
    for i in range(2):
        row, target = (x.row(i).long().to(model.device) for x in (context, tokens))
        embedded = model.get_input_embeddings()(torch.cat([row, target])[None]).detach()

        def logprob(scale, place, embedded=embedded, row=row, target=target):
            bent = embedded.clone()
            bent[0, place] *= scale
            table = model(inputs_embeds=bent).logits[0, len(row) - 1 : -1].log_softmax(-1)
            return table.gather(1, target[:, None]).sum().item()

        # d/ds log p(…, s·e_t, …) at s = 1 is gradient × embedding.
        slow = [(logprob(1 + 0.01, t) - logprob(1 - 0.01, t)) / 0.02 for t in range(len(row))]
        assert result.row(i).tolist() == pytest.approx(slow, abs=2e-3)
    assert result.row(2).tolist() == [0.0, 0.0, 0.0]
    model.float()


def test_engines_without_gradients_say_so(start):
    policy, _ = start("qwen2")
    context, tokens = Jagged.from_rows([[3]], torch.int32), Jagged.from_rows([[4]], torch.int32)
    with pytest.raises(CreditgraphError, match="gives no gradients; expected an engine that can attribute"):
        Policy.attribute(policy, context, tokens)
    with pytest.raises(CreditgraphError, match=r"gradients need attributions on, .* Set node\.attributions=true"):
        policy.attribute(context, tokens)
