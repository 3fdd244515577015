"""Token ids that end a response, and logit columns without a token."""

from typing import Any

import torch
from torch import Tensor

from creditgraph.components.models.load import resolve_model_path
from creditgraph.components.text.templates import turn_end_ids
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import DataError


def generation_config(spec: ModelSpec) -> Any:
    """The model's generation defaults, None if it has none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(resolve_model_path(spec.path))
    except OSError:
        return None


def eos_mask(generation: Any, tokenizer: Any, vocab_size: int) -> Tensor:
    """Bool [V]: ids that end a response, of the generation configuration (or None), the tokenizer and chat turns."""
    listed = getattr(generation, "eos_token_id", None)
    ids = [] if listed is None else [listed] if isinstance(listed, int) else list(listed)
    ids += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids += turn_end_ids(tokenizer)
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[[i for i in ids if 0 <= i < vocab_size]] = True
    return mask


def padding_columns(tokenizer: Any, vocab_size: int, device: str) -> Tensor | None:
    """Bool [V]: logit columns without a token in the tokenizer; None if all have one."""
    known = [i for i in tokenizer.get_vocab().values() if i < vocab_size]
    if not known:
        raise DataError(
            "tokenizer: expected the one the model was trained with, got one without any token id of the model."
        )
    mask = torch.ones(vocab_size, dtype=torch.bool)
    mask[known] = False
    return mask.to(device) if bool(mask.any()) else None
