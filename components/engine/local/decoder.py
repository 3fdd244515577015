"""The interface of a model for generation and scoring, and an implementation through transformers' own forward."""

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.jagged import Jagged


class Decoder(Protocol):
    """A causal language model with a cache for one batch of rows at a time.

    Attributes:
        vocab_size: columns of the logits.
        device: where the model is.
        cached_bytes: bytes that one token of one row takes in the cache; 0 if unknown.
    """

    vocab_size: int
    cached_bytes: int
    device: torch.device

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads new weights, complete and checked, by Hugging Face name."""

    def prefill(self, prompts: Jagged, group: Tensor, room: int) -> Tensor:
        """Starts a batch of rows: runs each prompt once; returns the logits [B, V] of each row's next token.

        Args:
            prompts: Jagged int32 [P rows].
            group: int64 [B], prompt of each row.
            room: most tokens that a row may still get.
        """

    def step(self, tokens: Tensor) -> Tensor:
        """Appends one token per row [B]; returns the next logits [B, V]."""

    def keep(self, index: Tensor) -> None:
        """Keeps the rows at `index` [B'], in its order; index[i] is i, or a row at B' or beyond that fills a hole."""

    def release(self) -> None:
        """Frees the batch's cache."""

    def hidden(self, tokens: Tensor) -> Tensor:
        """Last hidden states [B, T, C] of left-aligned rows [B, T], causal, without a cache."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [M, V] of hidden states [M, C]."""


def left_padded(rows: Jagged) -> tuple[Tensor, Tensor]:
    """Rows aligned at their ends: values [N, longest], 0 elsewhere, and a bool mask of the real places."""
    longest = int(rows.lengths.max())
    starts = longest - rows.lengths
    out = rows.values.new_zeros((len(rows), longest), dtype=torch.int64)
    mask = torch.arange(longest, device=out.device) >= starts[:, None]
    out[mask] = rows.values.to(torch.int64)
    return out, mask


class TransformersDecoder:
    """Any transformers causal language model, through its own forward and cache.

    Args:
        model: a causal LM in evaluation mode.
        context: most tokens in a row.
    """

    def __init__(self, model: Any, context: int) -> None:
        self.model = model
        self.device: torch.device = model.device
        self._last_position = context - 1
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.cached_bytes = _cached_bytes(model)
        accepted = inspect.signature(model.forward).parameters
        self._has_positions = "position_ids" in accepted
        self._keep_last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.24
        self._cache: Any = None
        self._mask = torch.zeros(0, 0, dtype=torch.int64)
        # Whether logits are the output embedding of the last hidden states and nothing else.
        self._split = self._head_is_plain()

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads new weights by name."""
        own = self.model.state_dict()
        for name, tensor in tensors.items():
            own[name].copy_(tensor)

    @torch.inference_mode()
    def prefill(self, prompts: Jagged, group: Tensor, room: int) -> Tensor:
        """Runs the prompts, then copies their caches to the rows."""
        del room
        tokens, mask = left_padded(prompts)
        self._cache = None
        self._mask = mask.to(torch.int64)
        logits = self._forward(tokens, (self._mask.cumsum(1) - 1).clamp(min=0))
        if len(group) != len(prompts) or not torch.equal(group, torch.arange(len(group), device=group.device)):
            self.keep(group)
            logits = logits[group]
        return logits

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Appends one token per row."""
        # Rows that have ended may stay a few steps longer; their tokens are dropped, but learned positions must exist.
        positions = self._mask.sum(1, keepdim=True).clamp(max=self._last_position)
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], 1)
        return self._forward(tokens[:, None], positions)

    @torch.inference_mode()
    def keep(self, index: Tensor) -> None:
        """Keeps rows by index."""
        self._mask = self._mask[index]
        if hasattr(self._cache, "batch_select_indices"):
            self._cache.batch_select_indices(index)
        elif hasattr(self._cache, "reorder_cache"):
            self._cache.reorder_cache(index)
        else:
            raise CreditgraphError(
                f"engine.local: expected a model with a key-value cache, but {type(self.model).__name__} has a "
                f"{type(self._cache).__name__}, whose rows cannot be selected. Use another engine for this model."
            )

    def release(self) -> None:
        """Frees the cache."""
        self._cache = None

    @torch.inference_mode()
    def hidden(self, tokens: Tensor) -> Tensor:
        """Last hidden states; whole logits where the output head is not plain."""
        if self._split:
            out: Tensor = self.model.base_model(input_ids=tokens, use_cache=False)[0]
        else:
            out = self.model(input_ids=tokens, use_cache=False).logits
        return out

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""
        out: Tensor = self.model.get_output_embeddings()(hidden) if self._split else hidden
        return out

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        options: dict[str, Any] = {"position_ids": positions} if self._has_positions else {}
        out = self.model(
            input_ids=tokens,
            attention_mask=self._mask,
            use_cache=True,
            **{self._cache_name: self._cache},
            **options,
            **self._keep_last,
        )
        self._cache = getattr(out, self._cache_name)
        last: Tensor = out.logits[:, -1]
        return last

    @torch.inference_mode()
    def _head_is_plain(self) -> bool:
        # Some models scale or cap logits after the output embedding; those are scored through the whole forward.
        tokens = torch.arange(8, device=self.model.device)[None] % self.vocab_size
        try:
            hidden = self.model.base_model(input_ids=tokens, use_cache=False)[0]
            split = self.model.get_output_embeddings()(hidden)
        except (RuntimeError, TypeError, AttributeError):
            return False
        whole = self.model(input_ids=tokens, use_cache=False).logits
        return split.shape == whole.shape and torch.allclose(split.float(), whole.float(), rtol=1e-3, atol=1e-3)


def _cached_bytes(model: Any) -> int:
    """Bytes of keys and values per token, from the configuration; 0 where it does not say."""
    config = model.config.get_text_config()
    queries = getattr(config, "num_attention_heads", 0)
    heads = getattr(config, "num_key_value_heads", None) or queries
    dim = getattr(config, "head_dim", None) or (config.hidden_size // queries if queries else 0)
    return int(2 * config.num_hidden_layers * heads * dim * model.dtype.itemsize)
