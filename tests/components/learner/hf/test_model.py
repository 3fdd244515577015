from types import SimpleNamespace

import pytest
import torch

from creditgraph.components.learner.hf import model as hf_model
from creditgraph.components.learner.hf.model import LearnerModel
from creditgraph.pipeline.core.errors import ConfigError

SMALL = {
    "vocab_size": 42,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}


def wrap(model):
    return LearnerModel(model.eval(), slow_attention=True)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Olmo2", "Granite", "Mistral", "Cohere"])
def test_architectures_take_packed_sequences(kind, device):
    import transformers

    torch.manual_seed(0)
    more = {"Granite": {"logits_scaling": 3.0}, "Cohere": {"logit_scale": 0.5}}.get(kind, {})
    config = getattr(transformers, f"{kind}Config")(**SMALL, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(device)
    assert wrap(model).packs


def test_head_that_does_more_is_refused():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    class Doubled(Qwen2ForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 50
            return out

    with pytest.raises(ValueError, match="log-probs of Doubled from its output head differ from its own logits by"):
        wrap(Doubled(Qwen2Config(**SMALL)))


class OnGPU:
    """The part of a model that is read to choose its attention, on a GPU that is not there."""

    dtype = torch.bfloat16

    def __init__(self, **shape):
        values = {"head_dim": 128, "hidden_size": 64, "num_attention_heads": 2, **shape}
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**values))

    def parameters(self):
        return iter([SimpleNamespace(device=torch.device("cuda:0"))])

    def modules(self):
        return [SimpleNamespace(sliding_window=None)]


def entry(**shape):
    return SimpleNamespace(model=OnGPU(**shape), dtype=OnGPU.dtype)


def test_on_a_gpu_no_rows_go_one_by_one_unless_accepted(monkeypatch, caplog):
    monkeypatch.setattr(hf_model, "_unpackable", lambda model: "TypeError: no such argument")
    text = r"OnGPU does not take packed sequences \(TypeError: no such argument\)\. .*compute\.slow_attention=true"
    with pytest.raises(ConfigError, match=text):
        hf_model._packs(entry())
    assert not hf_model._packs(entry(), slow_attention=True)
    assert "rows go through it one by one" in caplog.text


def test_on_a_gpu_padded_grids_must_be_accepted(monkeypatch):
    monkeypatch.setattr(hf_model, "_unpackable", lambda model: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert hf_model._packs(entry())
    wide = entry(head_dim=320)
    with pytest.raises(ConfigError, match=r"its heads have 320 numbers .*learner\.compute\.slow_attention=true"):
        hf_model._packs(wide)
    assert hf_model._packs(wide, slow_attention=True)
