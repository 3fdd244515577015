import pytest
import torch

from components.learner.hf.model import LearnerModel

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
    return LearnerModel(model.eval())


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
