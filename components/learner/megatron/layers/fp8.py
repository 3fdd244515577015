"""Matrix products in 8 bits by TransformerEngine: fields of megatron-core's TransformerConfig, and what they need."""

from __future__ import annotations

from typing import Any

import torch

from creditgraph.components.learner.megatron.layers.parts import Parts
from creditgraph.components.learner.megatron.settings import Fp8, ParallelLayout
from creditgraph.pipeline.core.errors import ConfigError


def fp8_fields(settings: Fp8) -> dict[str, Any]:
    """Fields of TransformerConfig."""
    if settings.recipe == "off":
        return {}
    return {
        "fp8": settings.format,
        "fp8_recipe": settings.recipe,
        # Replicas have different numbers of micro-batches: a maximum taken over them too would wait forever.
        "tp_only_amax_red": True,
    }


def check_fp8(settings: Fp8, parts: Parts, dtype: torch.dtype, layout: ParallelLayout, config: Any) -> None:
    """Raises ConfigError where 8 bits cannot be had: library, GPU, dtype or widths of the model.

    Args:
        settings: the wish.
        parts: the library of the layers.
        dtype: dtype of the parameters.
        layout: how matrices are sharded.
        config: transformers' configuration of the model.
    """
    if settings.recipe == "off":
        return
    reason = _obstacle(settings, parts, dtype) or _odd_width(settings, layout, config)
    if reason:
        raise ConfigError(f"learner.layers.fp8.recipe '{settings.recipe}': {reason}; change that, or set recipe: off.")


def _obstacle(settings: Fp8, parts: Parts, dtype: torch.dtype) -> str:
    if not parts.transformer_engine:
        return "expected TransformerEngine's layers (a GPU, and pip install 'creditgraph[transformer-engine]')"
    if dtype != torch.bfloat16:
        return f"expected model.dtype bfloat16, got {str(dtype).removeprefix('torch.')}"
    from transformer_engine import pytorch as engine

    available = {"blockwise": engine.is_fp8_block_scaling_available, "mxfp8": engine.is_mxfp8_available}
    fits, reason = available.get(settings.recipe, engine.is_fp8_available)(return_reason=True)
    return "" if fits else f"TransformerEngine says: {reason.rstrip('.')}"


def _odd_width(settings: Fp8, layout: ParallelLayout, config: Any) -> str:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tensor = layout.tensor_parallel
    heads = config.num_attention_heads // tensor
    groups = max(config.num_key_value_heads // tensor, 1)
    widths = {
        "hidden size": config.hidden_size,
        "queries, keys and values of a rank": (heads + 2 * groups) * head_dim,
        "attention output of a rank": heads * head_dim,
        "MLP width of a rank": config.intermediate_size // tensor,
    }
    odd = [f"{name} {width}" for name, width in widths.items() if width % settings.token_multiple]
    return f"expected widths in multiples of {settings.token_multiple}, got {', '.join(odd)}" if odd else ""
