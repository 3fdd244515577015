"""Token ids as text, one string per id, from the tokenizer file of the run's model. Never uses the network."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from pipeline.core.errors import CreditgraphError

# Named by text: pipeline/ imports nothing of components/.
RESOLVE = "components.models.load"


def load_tokenizer(model: str) -> Any:
    """The `tokenizers.Tokenizer` of a model folder, or of a hub model that was fetched before; None when there is none."""
    try:
        path = importlib.import_module(RESOLVE).resolve_model_path(model)
    except (CreditgraphError, ImportError):
        return None
    file: Any = Path(path) / "tokenizer.json"
    if not file.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            file = try_to_load_from_cache(path, "tokenizer.json")
        except (HFValidationError, ValueError):
            return None
        if not isinstance(file, str):
            return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises bare Exception for a file that it cannot read
        return None


def piece(tokenizer: Any, token: int) -> str:
    """Text of one token; "⟨id⟩" without a tokenizer or outside its vocabulary."""
    if tokenizer is None or tokenizer.id_to_token(token) is None:
        return f"⟨{token}⟩"
    return str(tokenizer.decode([token], skip_special_tokens=False))
