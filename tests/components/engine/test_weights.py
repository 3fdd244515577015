"""Loading weights: tensors and folders, tied embeddings, and sentences for wrong ones."""

import pytest
import torch
from safetensors.torch import save_file

from creditgraph.components.engine.local.engine import LocalEngine
from creditgraph.components.models.experts import unstack
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Weights


@pytest.fixture(params=["lean", "transformers"])
def pair(request, start):
    return start("qwen2", decoder=request.param)


def halved(model):
    return {k: v.clone() * 0.5 for k, v in model.state_dict().items()}


def scores(policy):
    return policy.score(
        Jagged.from_rows([[5, 6]], torch.int32), Jagged.from_rows([[7, 8, 9]], torch.int32)
    ).logprobs.values


def expected(model, tensors):
    model.load_state_dict(tensors)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5, 6, 7, 8, 9]], device=model.device)).logits[0, 1:-1].cpu()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor([[7], [8], [9]]))[:, 0]


@pytest.mark.parametrize("way", ["all", "without the tied head", "only the tied head", "files"])
def test_new_weights_take_effect(pair, way, tmp_path):
    policy, model = pair
    tensors = halved(model)
    given = dict(tensors)
    if way in ("without the tied head", "files"):
        del given["lm_head.weight"]
    if way == "only the tied head":
        del given["model.embed_tokens.weight"]
    weights = Weights(version=9, tensors=given)
    if way == "files":
        names = sorted(given)
        for part, chosen in enumerate((names[:5], names[5:])):
            save_file({n: given[n].contiguous().cpu() for n in chosen}, tmp_path / f"model-{part}.safetensors")
        weights = Weights(version=9, path=str(tmp_path))
    fresh = policy.engine.run(weights=weights).policy
    assert fresh.version == 9
    torch.testing.assert_close(scores(fresh), expected(model, tensors), rtol=0, atol=1e-5)


def test_experts_load_under_the_names_of_files(start):
    policy, model = start("qwen3_moe")
    own = dict(model.state_dict())
    from_files = policy.engine.run(weights=Weights(version=4)).policy
    torch.testing.assert_close(scores(from_files), expected(model, own), rtol=0, atol=1e-5)
    tensors = halved(model)
    published = dict(unstack(tensors))
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in published
    fresh = policy.engine.run(weights=Weights(version=5, tensors=published)).policy
    torch.testing.assert_close(scores(fresh), expected(model, tensors), rtol=0, atol=1e-5)
    with pytest.raises(DataError, match=r"others, first 'model.layers.0.mlp.experts.down_proj'"):
        policy.engine.run(weights=Weights(version=6, tensors=tensors))


def test_published_tensors_are_copied(pair):
    policy, model = pair
    tensors = halved(model)
    fresh = policy.engine.run(weights=Weights(version=5, tensors=tensors)).policy
    before = scores(fresh)
    for tensor in tensors.values():
        tensor.zero_()
    assert torch.equal(scores(fresh), before)


def test_wrong_weights_get_a_sentence(pair, tmp_path):
    policy, model = pair
    good = halved(model)

    def load(tensors=None, path=None):
        policy.engine.run(weights=Weights(version=2, tensors=tensors, path=path))

    renamed = {
        k.replace("norm_", "norm_") if k != "model.norm.weight" else "model.nrom.weight": v for k, v in good.items()
    }
    with pytest.raises(
        DataError,
        match=r"got 1 others, first 'model.nrom.weight'.* Did you mean 'model.norm.weight'",
    ):
        load(renamed)
    with pytest.raises(
        DataError, match=r"weights version 2: expected all \d+ weights, but 1 are missing, first 'model.norm.weight'"
    ):
        load({k: v for k, v in good.items() if k != "model.norm.weight"})
    with pytest.raises(DataError, match=r"expected shape \(32,\) for 'model.norm.weight', got \(3,\)"):
        load(good | {"model.norm.weight": torch.zeros(3)})
    with pytest.raises(
        DataError, match=r"expected equal tensors '.*' and '.*', which the model ties, got tensors that differ"
    ):
        load(good | {"lm_head.weight": good["lm_head.weight"] + 1})
    with pytest.raises(DataError, match=r"expected either tensors or a path, got both"):
        load(good, path=str(tmp_path))
    with pytest.raises(DataError, match=r"expected a folder in Hugging Face layout, got no \*.safetensors file"):
        load(path=str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"model.safetensors: cannot be read .* Write or copy it again"):
        load(path=str(tmp_path))


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"expected max_rows ≥ 1, got 0"):
        LocalEngine.Config(max_rows=0)


def test_weights_with_neither_tensors_nor_path_are_the_models_own(pair):
    policy, model = pair
    policy.engine.run(weights=Weights(version=1, tensors=halved(model)))
    fresh = policy.engine.run(weights=Weights(version=0)).policy
    own = {k: v.clone() for k, v in model.state_dict().items()}
    torch.testing.assert_close(scores(fresh), expected(model, own), rtol=0, atol=1e-5)
