"""Models of random weights for measuring, made on the spot; nothing is downloaded."""

from pathlib import Path

# name: (hidden size, size of the MLP, layers, heads); parameters: hidden² · 4 + hidden · MLP · 3 per layer
SHAPES = {"random-30m": (512, 1472, 9, 8), "random-100m": (768, 2720, 12, 12)}


def random_model(folder: Path, name: str) -> str:
    """A folder with a Qwen2 model of random weights (float32, seed 0) and the embedded model's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config
    from transformers.utils import logging

    from creditgraph.components.models.load import resolve_model_path

    if name not in SHAPES:
        raise SystemExit(f"--model {name}: expected tiny, {', '.join(SHAPES)} or a folder in Hugging Face layout.")
    hidden, mlp, layers, heads = SHAPES[name]
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("tiny"))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
