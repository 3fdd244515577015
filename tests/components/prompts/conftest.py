"""Model folders with small tokenizers in the chat formats of well-known models: specials, template, stop tokens."""

import json
from pathlib import Path

import pytest

from creditgraph.components.models.load import resolve_model_path

QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim "
    "}}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
OLMO = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content }}{{ eos_token }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt "
    "%}<|assistant|>\n{% endif %}"
)
# name → template, end of text, begin of text, further special tokens, stop tokens of the generation configuration
FORMATS = {
    "qwen_base": (QWEN, "<|endoftext|>", None, ["<|im_start|>", "<|im_end|>"], ["<|endoftext|>"]),
    "qwen": (QWEN, "<|im_end|>", None, ["<|endoftext|>", "<|im_start|>"], ["<|im_end|>", "<|endoftext|>"]),
    "llama": (
        LLAMA,
        "<|eot_id|>",
        "<|begin_of_text|>",
        ["<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
        ["<|end_of_text|>", "<|eot_id|>"],
    ),
    "olmo": (OLMO, "<|endoftext|>", "<|endoftext|>", ["<|user|>", "<|assistant|>"], None),
}


@pytest.fixture(scope="session")
def format_folders(tmp_path_factory):
    """Format → a folder as `model.path` takes it: one token per byte, and the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    root, folders = tmp_path_factory.mktemp("formats"), {}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    for name, (template, eos, bos, further, stops) in FORMATS.items():
        inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=inner, eos_token=eos, bos_token=bos, additional_special_tokens=further
        )
        tokenizer.chat_template = template
        folder = root / name
        tokenizer.save_pretrained(folder)
        config = json.loads((Path(resolve_model_path("tiny")) / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(config | {"vocab_size": len(tokenizer), "max_position_embeddings": 1024})
        )
        if stops:
            ids = tokenizer.convert_tokens_to_ids(stops)
            (folder / "generation_config.json").write_text(
                json.dumps({"eos_token_id": ids, "transformers_version": "5.0.0"})
            )
        folders[name] = folder
    return folders
