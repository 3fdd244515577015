"""Loading tokenizers and models, and the sentence each kind of broken folder gets."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from creditgraph.components.models.load import (
    context_length,
    load_causal_lm,
    load_config,
    load_tokenizer,
    resolve_model_path,
)
from creditgraph.components.tasks import chains
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(chains.TINY_MODEL, tmp_path / "model"))


def test_the_embedded_model_loads(device):
    model = load_causal_lm(ModelSpec(), device)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.device.type for p in model.parameters()} == {device}
    assert load_causal_lm(ModelSpec(dtype="bfloat16"), device).lm_head.weight.dtype == torch.bfloat16


def test_the_embedded_folder_is_small():
    assert sum(f.stat().st_size for f in chains.TINY_MODEL.iterdir()) < 3 * 2**20


def test_tokenizer_round_trips_and_pieces_join():
    tokenizer = load_tokenizer(ModelSpec())
    assert tokenizer.is_fast
    assert tokenizer.chat_template is None
    assert len(tokenizer) == load_config(ModelSpec()).vocab_size
    prompt, response = (
        "<solve> 7 s1 * 4 s12 + 3 </problem>",
        " s1 7 * 4 2 </thought> s2 2 + 3 5 \\boxed{ 5 } </thought>",
    )
    ids = [tokenizer(text)["input_ids"] for text in (prompt, response)]
    assert [len(row) for row in ids] == [9, 15]  # one token per word
    assert tokenizer(prompt + response)["input_ids"] == ids[0] + ids[1]
    # Decoding in any two pieces and joining gives the text, so thoughts can be cut out of it.
    for cut in range(len(ids[1])):
        assert tokenizer.decode(ids[1][:cut]) + tokenizer.decode(ids[1][cut:]) == response
    assert tokenizer.decode([*ids[1], tokenizer.eos_token_id]) == f"{response}<eos>"
    assert tokenizer.decode([*ids[1], tokenizer.eos_token_id], skip_special_tokens=True) == response


def test_embedded_words_are_one_token_each():
    tokenizer = load_tokenizer(ModelSpec())
    for i in range(len(tokenizer)):
        assert tokenizer(tokenizer.decode([i]))["input_ids"] == [i]


def test_paths(tmp_path):
    assert resolve_model_path("tiny") == str(chains.TINY_MODEL)
    assert resolve_model_path(str(tmp_path)) == str(tmp_path)
    assert resolve_model_path("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    for path in ("./none", str(tmp_path / "none"), "a/b/c"):
        with pytest.raises(
            DataError, match=r"expected an existing folder, a hub name 'owner/name', or 'tiny', but .* does not exist"
        ):
            resolve_model_path(path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"expected a folder in Hugging Face layout, got a file"):
        resolve_model_path(str(tmp_path / "file"))


def test_folder_without_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        DataError,
        match=r"model folder .*: expected the tokenizer .* none of tokenizer.json, .*run tokenizer.save_pretrained",
    ):
        load_tokenizer(ModelSpec(path=str(folder)))


def test_broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"model folder .*: its tokenizer cannot be loaded"):
        load_tokenizer(ModelSpec(path=str(folder)))


def test_tokenizer_without_end_of_text(folder):
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "eos_token": None}))
    with pytest.raises(DataError, match=r"has no end-of-text token. Set eos_token in tokenizer_config.json"):
        load_tokenizer(ModelSpec(path=str(folder)))


def test_folder_without_config_or_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"expected a complete model, but it has no weights \(\*.safetensors\)"):
        load_causal_lm(ModelSpec(path=str(folder)))
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match=r"no config.json; expected a folder written by save_pretrained"):
        load_causal_lm(ModelSpec(path=str(folder)))


def test_weights_in_a_pickle_are_refused(folder):
    torch.save({"w": torch.zeros(1)}, folder / "pytorch_model.bin")
    load_causal_lm(ModelSpec(path=str(folder)))  # safetensors are there too
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        DataError,
        match=r"^model folder .*: expected weights as \*\.safetensors, got pytorch_model\.bin, a pickle, which can run "
        r"code when it is read\. Convert it where you trust it, with save_pretrained\.$",
    ):
        load_causal_lm(ModelSpec(path=str(folder)))


def test_an_index_of_pickles_is_not_followed(folder):
    model = folder / "model.safetensors"
    model.rename(folder / "other.safetensors")
    torch.save({"w": torch.zeros(1)}, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match="its weights cannot be loaded"):
        load_causal_lm(ModelSpec(path=str(folder)))


def test_damaged_weights(folder):
    (folder / "model.safetensors").write_bytes(b"\x10" + b"\0" * 40)
    with pytest.raises(DataError, match="its weights cannot be loaded"):
        load_causal_lm(ModelSpec(path=str(folder)))


def test_a_model_of_another_kind(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(DataError, match="expected a causal language model of transformers, got type 'vit'"):
        load_causal_lm(ModelSpec(path=str(folder)))


def test_context_length():
    assert context_length(ModelSpec()) == 512
    assert context_length(ModelSpec(max_context=100)) == 100
    with pytest.raises(DataError, match=r"expected model.max_context ≤ 512, the context of the model, got 600"):
        context_length(ModelSpec(max_context=600))


def test_hub_that_cannot_be_reached(monkeypatch):
    import transformers

    def unreachable(*_args, **_kwargs):
        raise OSError("We couldn't connect to 'https://huggingface.co'\nmore")

    for auto in (transformers.AutoConfig, transformers.AutoTokenizer):
        monkeypatch.setattr(auto, "from_pretrained", unreachable)
    for load in (load_tokenizer, load_causal_lm, context_length):
        with pytest.raises(
            DataError, match=r"model 'some/model': .* cannot be loaded from the Hugging Face hub .* model.path=tiny"
        ):
            load(ModelSpec(path="some/model"))


def test_the_hub_is_asked_once_and_a_missing_model_is_one_sentence(monkeypatch):
    import huggingface_hub

    from creditgraph.components.models import load

    asked = []

    def model_info(self, name, timeout):
        asked.append((name, timeout))
        raise OSError("Repository Not Found")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    for function in (load.load_config, load.load_tokenizer, load.load_causal_lm):
        with pytest.raises(DataError, match=r"^model 'owner/typo': .*\(Repository Not Found\)\. Check the name, .*$"):
            function(ModelSpec(path="owner/typo"))
    assert asked == [("owner/typo", load.HUB_SECONDS)] * 3


def test_the_check_of_a_configuration_asks_no_hub(monkeypatch):
    def refuse(name):
        raise AssertionError(f"asked for {name}")

    monkeypatch.setattr("creditgraph.components.models.load._check_hub", refuse)
    assert build_experiment(compose(["recipe=s_trace_qwen3_4b"])).model.path == "Qwen/Qwen3-4B"
