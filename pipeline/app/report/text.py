"""Tokens as text, by the tokenizer of a run's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.core.errors import CreditgraphError


def load_tokenizer(model: str) -> Any:
    """The `tokenizers.Tokenizer` of a model folder, or of a hub model in the local cache; None when there is none.

    Never uses the network, so that a report can be written anywhere.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from tokenizers import Tokenizer

    from components.models.load import resolve_model_path

    try:
        path = resolve_model_path(model)
        file: Any = Path(path) / "tokenizer.json"
        if not file.is_file():
            file = try_to_load_from_cache(path, "tokenizer.json")
    except (CreditgraphError, HFValidationError, ValueError):
        return None
    if not isinstance(file, str | Path):
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises bare Exception for a file that it cannot read
        return None


def piece(tokenizer: Any, token: int) -> str:
    """Text of one token; "⟨id⟩" without a tokenizer or outside its vocabulary."""
    if tokenizer is None or tokenizer.id_to_token(token) is None:
        return f"⟨{token}⟩"
    return str(tokenizer.decode([token], skip_special_tokens=False))
