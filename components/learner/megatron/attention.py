"""Attention, rotary angles and norms for megatron-core layers on packed sequences and shared-prefix trees.

The attention itself is that of components.learner.packing.attention, so packed batches mean the same for every learner.
This module passes its layout through megatron-core, and shards it over context-parallel ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from components.learner.packing.attention import PackedLayout, make_layout, packed_attention
from components.learner.packing.pack import PackedBatch
from pipeline.core.jagged import Jagged


@dataclass
class PackedParams(PackedSeqParams):  # type: ignore[misc]
    """Passes a layout to the attention of each layer, also when activations are recomputed.

    megatron-core passes its packed parameters on unread unless `qkv_format` is "thd", for which it would apply rotary
    embeddings itself.
    """

    qkv_format: str = "creditgraph"
    layout: PackedLayout | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class RankInputs:
    """Input of one rank's model chunks for one packed batch.

    Attributes:
        input_ids, position_ids: int64 [1, s], this context-parallel rank's tokens.
        layout: queries are those tokens; keys are the tokens of all context-parallel ranks.
        start, stop: the tokens' places in the packed batch, with the padding after it.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: PackedLayout
    start: int
    stop: int


def prepare(batch: PackedBatch, tensor: int, context: int, context_rank: int) -> RankInputs:
    """Pads a packed batch to a multiple of `tensor` · `context` tokens and returns one context-parallel rank's slice.

    Args:
        batch: packed batch of this replica.
        tensor: ranks that share the tokens between matrix products (1 without sequence parallel).
        context: context-parallel ranks.
        context_rank: number of this one.
    """
    ids = batch.input_ids
    positions = batch.position_ids
    layout = batch.layout
    extra = -layout.total % (tensor * context)
    if extra:
        places = torch.arange(extra, device=ids.device)
        ids = torch.cat([ids, ids.new_zeros(1, extra)], 1)
        positions = torch.cat([positions, places[None]], 1)
        layout = _append(layout, places + layout.total)
    if context == 1:
        return RankInputs(input_ids=ids, position_ids=positions, layout=layout, start=0, stop=layout.total)
    size = layout.total // context
    start = context_rank * size
    stop = start + size
    return RankInputs(
        input_ids=ids[:, start:stop],
        position_ids=positions[:, start:stop],
        layout=_cut(layout, start, stop),
        start=start,
        stop=stop,
    )


def _append(layout: PackedLayout, places: Tensor) -> PackedLayout:
    """The layout with one more row, of padding, to which no token attends."""
    lengths = torch.cat([layout.lengths, layout.lengths.new_tensor([len(places)])])
    if layout.keys is None:
        return make_layout(lengths)
    keys = Jagged.from_lengths(layout.keys, layout.starts + layout.lengths)
    return make_layout(lengths, Jagged.concat([keys, Jagged.from_lengths(places, lengths[-1:])]))


def _cut(layout: PackedLayout, start: int, stop: int) -> PackedLayout:
    """The parts of rows among the tokens [start, stop); a row's later part continues its earlier one."""
    own = torch.arange(layout.total, device=layout.lengths.device) if layout.keys is None else layout.keys
    keys = Jagged.from_lengths(own, layout.starts + layout.lengths)
    before = layout.lengths.cumsum(0) - layout.lengths
    low = (start - before).clamp(min=0).minimum(layout.lengths)
    high = (stop - before).clamp(min=0).minimum(layout.lengths)
    kept = (high > low).nonzero(as_tuple=True)[0]
    paths = keys.slice_rows(torch.zeros_like(low), layout.starts + high).select(kept)
    return replace(make_layout((high - low)[kept], paths), sources=layout.total)


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Core attention on [s, 1, heads, D] queries, keys and values → [s, 1, heads · D]."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.group = pg_collection.cp
        layer = layer_number - 1
        # The rotary factor is on queries and on keys, so on their product it is squared.
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.scale *= config.rope_attention_scalings[layer] ** 2
        self.window = config.attention_windows[layer]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedParams | None = None,
    ) -> Tensor:
        """Computes attention; without a layout, plain causal attention."""
        if self.group.size() > 1:
            # Each rank keeps its own queries and sees the keys and values of all: the backward pass sums and scatters
            # their gradients.
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), tensor_parallel_output_grad=True, group=self.group)
                for x in (key, value)
            )
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        layout = None if packed_seq_params is None else packed_seq_params.layout
        out, _ = packed_attention(
            self,
            q,
            k,
            v,
            None,
            scaling=self.scale,
            sliding_window=self.window,
            packed=layout,
            recomputed=self.config.recompute_granularity is not None,
        )
        return out.transpose(0, 1).flatten(2)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """No weights."""
        return {}


class LayerRopeAttention(SelfAttention):  # type: ignore[misc]
    """Self-attention that selects its layer's rotary formula of several."""

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        """`rotary_pos_emb` is [s, 1, formulas, D]."""
        slot = self.config.rope_slots[self.layer_number - 1]
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb[:, :, slot : slot + 1], **kwargs)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm as a megatron-core layer, because megatron-core's own wrapper refuses sequence parallel."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Each rank sees its part of the tokens; marked weights have their gradients summed over the tensor-parallel
        # ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PackedGPTModel(GPTModel):  # type: ignore[misc]
    """GPTModel with rotary angles from `position_ids`, returning the last hidden states instead of logits."""

    inverse_frequencies: Tensor
    """[formulas, D / 2]; OLMo-3 has one for layers with a sliding window and one for the others"""

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        decoder_input: Tensor | None = None,
        padding_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        if decoder_input is None and self.pre_process:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
            if self.config.recompute_granularity == "full" and torch.is_grad_enabled():
                # Recomputed layers have gradients only when their input has one, which a frozen embedding has not.
                decoder_input.requires_grad_()
        # Angles by index, as in GPTModel, are wrong where rows continue a shared prefix.
        angles = position_ids.t().float()[..., None, None] * self.inverse_frequencies.to(position_ids.device)
        rotary = torch.cat((angles, angles), -1)
        return decoder_input, rotary, None, None, None, padding_mask

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # The output head is applied a chunk of tokens at a time (see components/learner/logprobs.py).
        return hidden_states
