import pytest
import torch

from creditgraph.components.learner.hf.model import LearnerModel, _packs
from creditgraph.components.learner.hf.sharding import Entry
from creditgraph.components.learner.packing.attention import make_layout
from creditgraph.components.learner.packing.pack import check_rows, pack, plan
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.jagged import Jagged


@pytest.fixture
def model(model_folder, device):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder()).to(device).eval()


def rows(device):
    prompts = Jagged.from_rows([[5, 6, 7], [1], [2, 9], [4, 4, 4, 4]], torch.int32).to(device)
    responses = Jagged.from_rows([[8, 9], [3, 4, 5, 6, 7], [11], [1, 2, 3, 4, 5, 6, 7, 8, 9]], torch.int32).to(device)
    return prompts, responses


def test_packed_equals_separate(model, reference, device):
    prompts, responses = rows(device)
    expected, wanted_entropy = reference.separate_logprobs(model, prompts.to_lists(), responses.to_lists(), 0.7)
    learner = LearnerModel(model, slow_attention=True)
    assert learner.packs
    index = torch.tensor([2, 0, 3, 1], device=device)
    logprobs, entropies = learner.logprobs(pack(prompts, responses, index), 0.7)
    for place, row in enumerate(index.tolist()):
        torch.testing.assert_close(logprobs.row(place), expected[row], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropies.row(place), wanted_entropy[row], rtol=1e-5, atol=1e-5)


def test_packed_gradient_equals_separate(model, reference, device):
    prompts, responses = rows(device)
    loss = torch.cat(reference.separate_logprobs(model, prompts.to_lists(), responses.to_lists())[0]).square().sum()
    expected = torch.autograd.grad(loss, list(model.parameters()))
    learner = LearnerModel(model, slow_attention=True)
    actual, _ = learner.logprobs(pack(prompts, responses, torch.arange(4, device=device)), 1.0)
    gradient = torch.autograd.grad(actual.values.square().sum(), list(model.parameters()))
    scale = max(float(x.abs().max()) for x in expected)
    assert max(float((x - y).abs().max()) for x, y in zip(gradient, expected, strict=True)) < 1e-5 * scale


def test_sliding_window_equals_separate(reference, device):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=42,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=4,
    )
    model = MistralForCausalLM(config).to(device).eval()
    prompts, responses = rows(device)
    expected, _ = reference.separate_logprobs(model, prompts.to_lists(), responses.to_lists())
    learner = LearnerModel(model, slow_attention=True)
    assert learner.packs
    actual, _ = learner.logprobs(pack(prompts, responses, torch.arange(4, device=device)), 1.0)
    torch.testing.assert_close(actual.values, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_rows_go_one_by_one_through_a_model_that_refuses(reference, device, caplog):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=42,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        attn_implementation="eager",
    )
    model = Gemma2ForCausalLM(config).to(device).eval()
    prompts, responses = rows(device)
    expected, _ = reference.separate_logprobs(model, prompts.to_lists(), responses.to_lists())
    assert _packs(Entry(model)) is False
    assert "does not take packed sequences" in caplog.text
    learner = LearnerModel(model, slow_attention=True)
    actual, _ = learner.logprobs(pack(prompts, responses, torch.arange(4, device=device)), 1.0)
    torch.testing.assert_close(actual.values, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_layout_by_hand():
    layout = make_layout(torch.tensor([3, 1, 4]))
    assert layout.offsets.tolist() == layout.key_offsets.tolist() == [0, 3, 4, 8]
    # A 1 × 1 grid for row 1, then a 2 × 4 grid for rows 0 and 2: slots 0 | 1 2 3 . | 5 6 7 8
    grids = layout.grids
    assert [(g.rows, g.queries, g.keys) for g in grids.grids] == [(1, 1, 1), (2, 4, 4)]
    assert grids.slots.tolist() == [1, 2, 3, 0, 5, 6, 7, 8]
    assert grids.unused.tolist() == [4]
    assert grids.tokens.tolist() == [3, 0, 1, 2, 0, 4, 5, 6, 7]


def test_layout_with_a_shared_prefix_by_hand():
    # A B C computed whole; D E at the end of the path A B D E.
    layout = make_layout(torch.tensor([3, 2]), Jagged.from_rows([[0, 1, 2], [0, 1, 3, 4]]))
    assert layout.starts.tolist() == [0, 2]
    assert layout.key_offsets.tolist() == [0, 3, 7]
    root, branch = layout.grids.grids
    assert root.mask(None) is None
    assert branch.mask(None)[0, 0].tolist() == [[True, True, True, False], [True] * 4]
    assert branch.mask(2)[0, 0].tolist() == [[False, True, True, False], [False, False, True, True]]
    assert layout.grids.key_tokens.tolist() == [0, 1, 2, 0, 1, 3, 4]


def test_pack_by_hand():
    batch = pack(Jagged.from_rows([[1, 2], [3]]), Jagged.from_rows([[4, 5], [6, 7]]), torch.tensor([0, 1]))
    # Sequences 1 2 4 (5 dropped) and 3 6 (7 dropped); 4 is predicted at 1, 5 at 2, 6 at 3, 7 at 4.
    assert batch.input_ids.tolist() == [[1, 2, 4, 3, 6]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.predict.tolist() == [1, 2, 3, 4]
    assert batch.targets.to_lists() == [[4, 5], [6, 7]]
    assert batch.tokens == 5


@pytest.mark.parametrize("budget", [0, 1, 10, 64, 1000])
def test_plan_covers_every_row_once_within_budget(budget):
    lengths = torch.randint(0, 30, (50,), generator=torch.Generator().manual_seed(0))
    pieces = plan(lengths, budget)
    assert sorted(torch.cat(pieces).tolist()) == lengths.nonzero()[:, 0].tolist()
    for piece in pieces:
        assert budget == 0 or int(lengths[piece].sum()) <= budget or len(piece) == 1


def test_plan_of_a_row_longer_than_the_budget():
    assert [p.tolist() for p in plan(torch.tensor([3, 50, 4]), 10)] == [[0, 2], [1]]


def test_plan_of_nothing():
    assert plan(torch.tensor([0, 0]), 10) == []
    assert plan(torch.zeros(0, dtype=torch.int64), 10) == []


def test_too_long_row_is_named():
    with pytest.raises(DataError, match=r"row 1 has 7 tokens \(prompt 3, response 4\), but the model's context is 6"):
        check_rows(Jagged.from_rows([[1], [1, 2, 3]]), Jagged.from_rows([[1], [1, 2, 3, 4]]), 6)


def test_empty_prompt_is_named():
    with pytest.raises(DataError, match="row 1 has an empty prompt"):
        check_rows(Jagged.from_rows([[1], []], torch.int32), Jagged.from_rows([[1], [2]], torch.int32), 6)


def test_candidates_beside_the_response_tokens(model, device):
    """With and without shared prefixes; each row keeps candidates of its own, and its own tokens come first."""
    prompts = Jagged.from_rows([[5, 6, 7]] * 3, torch.int32).to(device)
    responses = Jagged.from_rows([[8, 9, 3], [8, 9, 4, 1], [8]], torch.int32).to(device)
    candidates = torch.arange(16, device=device).view(8, 2)
    index = torch.arange(3, device=device)
    learner = LearnerModel(model, slow_attention=True)
    plain, entropies = learner.logprobs(pack(prompts, responses, index), 0.7)
    for share in (False, True):
        batch = pack(prompts, responses, index, share=share, candidates=candidates)
        assert (batch.saved > 0) == share
        logprobs, shared_entropies = learner.logprobs(batch, 0.7)
        assert logprobs.lengths.tolist() == [9, 12, 3]
        own, first, second = logprobs.values.view(8, 3).T
        torch.testing.assert_close(own, plain.values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(shared_entropies.values, entropies.values, rtol=1e-5, atol=1e-5)
        for which, values in enumerate((first, second)):
            replaced = responses.with_values(candidates[:, which].int())
            # Only a row's first token has the same context when the candidates stand in the response.
            alone, _ = learner.logprobs(pack(prompts, replaced, index), 0.7)
            at = responses.offsets[:-1]
            torch.testing.assert_close(values[at], alone.values[at], rtol=1e-5, atol=1e-5)
    (a, b) = (
        torch.autograd.grad(
            learner.logprobs(pack(prompts, responses, index, share=s, candidates=candidates), 1.0)[0].values.sum(),
            list(learner.trainable().values()),
        )
        for s in (False, True)
    )
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
