"""Experts under the names of files and stacked, against what transformers writes and reads."""

import torch
from safetensors.torch import load_file

from creditgraph.components.models.experts import stack, unstack


def test_names_and_tensors_are_those_that_transformers_saves(tmp_path):
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        moe_intermediate_size=6,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    own = model.state_dict()
    files = dict(unstack(own))
    assert files.keys() == saved.keys()
    assert all(torch.equal(files[name], tensor) for name, tensor in saved.items())
    again = stack(saved, own)
    assert list(again) == list(own)
    assert all(torch.equal(again[name], tensor) for name, tensor in own.items())


def test_tensors_of_models_without_experts_are_untouched():
    tensors = {"model.layers.0.mlp.down_proj.weight": torch.ones(2, 3), "lm_head.weight": torch.ones(4, 2)}
    assert dict(unstack(tensors)) == tensors
    assert stack(tensors, tensors) == tensors
