"""Attention, rotary angles and norms for megatron-core layers on packed sequences and shared-prefix trees.

The attention itself is that of `packing/attention.py`, so packed batches mean the same for every learner.
This module passes its layout through megatron-core, and shards it over context-parallel ranks.
"""

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
from torch.nn import functional as F

from creditgraph.components.learner.packing.attention import PackedLayout, make_layout, packed_attention
from creditgraph.components.learner.packing.pack import PackedBatch
from creditgraph.pipeline.core.jagged import Jagged


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
        input_ids, position_ids: int64 [1, s], this context-parallel rank's tokens, then padding.
        layout: queries are those tokens; keys are the tokens of all context-parallel ranks.
        places: int64 [≤ s], the tokens' places in the packed batch, in order; padding has none.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: PackedLayout
    places: Tensor


def prepare(batch: PackedBatch, tensor: int, context: int, context_rank: int) -> RankInputs:
    """One context-parallel rank's tokens of a packed batch, padded to a multiple of `tensor`; all ranks have as many.

    Args:
        batch: packed batch of this replica.
        tensor: ranks that share the tokens between matrix products (1 without sequence parallel).
        context: context-parallel ranks.
        context_rank: number of this one.
    """
    layout = batch.layout
    numbers = torch.arange(layout.total, device=layout.lengths.device)
    if context == 1 and layout.total % tensor == 0:
        return RankInputs(input_ids=batch.input_ids, position_ids=batch.position_ids, layout=layout, places=numbers)
    shares = zigzag(layout.lengths, context)
    size = max(int(lengths.sum()) for _, lengths in shares)
    size += -size % tensor
    all_places = Jagged.from_lengths(numbers, layout.lengths.sum()[None])
    own = [all_places.slice_rows(begins, begins + n, torch.zeros_like(begins)) for begins, n in shares]
    # Keys are gathered rank after rank; where each token then is.
    gathered = layout.lengths.new_empty(layout.total)
    for rank, rows in enumerate(own):
        gathered[rows.values] = rank * size + numbers[: len(rows.values)]
    rows = own[context_rank]
    paths = _paths(layout, *shares[context_rank])
    keys = paths.with_values(gathered[paths.values])
    padding = torch.arange(len(rows.values), size, device=gathered.device)
    lengths = rows.lengths
    if len(padding):
        # One more row, to which no token attends.
        lengths = torch.cat([lengths, lengths.new_tensor([len(padding)])])
        keys = Jagged.concat([keys, Jagged.from_lengths(padding + context_rank * size, lengths[-1:])])
    plain = context == 1 and layout.keys is None
    return RankInputs(
        input_ids=F.pad(batch.input_ids[:, rows.values], (0, len(padding))),
        position_ids=torch.cat([batch.position_ids[:, rows.values], (padding - len(rows.values))[None]], 1),
        layout=make_layout(lengths) if plain else replace(make_layout(lengths, keys), sources=context * size),
        places=rows.values,
    )


def zigzag(lengths: Tensor, context: int) -> list[tuple[Tensor, Tensor]]:
    """Cuts every row into 2 · `context` chunks, of which rank i gets chunks i and 2 · `context` − 1 − i.

    A token attends to as many tokens as its path has up to it: one more than the token before it in the row, whatever
    prefix the row continues. So where chunks are equally long, a row's two chunks on each rank make as many query-key
    pairs as those on any other. Where they are not, one token more goes to the next rank in turn: ranks differ by at
    most one token in all, and in a row's pairs by less than two tokens with its whole path.

    Args:
        lengths: int64 [rows], tokens that rows of a packed batch compute.
        context: context-parallel ranks.

    Returns:
        for each rank int64 [parts], places in the packed batch where its chunks begin, and their lengths, at least 1.
        A rank's chunks that follow each other are one.

    >>> [(b.tolist(), n.tolist()) for b, n in zigzag(torch.tensor([8, 5]), 2)]
    [([0, 6, 8, 12], [2, 2, 2, 1]), ([2, 10], [4, 2])]
    """
    begin = lengths.cumsum(0) - lengths
    if context == 1:
        return [(begin, lengths)]
    chunks = torch.arange(2 * context, device=lengths.device)
    rank = torch.minimum(chunks, 2 * context - 1 - chunks)
    extra = lengths % (2 * context)
    # The extra tokens of a row continue where those of the row before it ended: rank after rank, twice around at most.
    first = (extra.cumsum(0) - extra) % context
    turn = (rank - first[:, None]) % context + context * (chunks >= context)
    sizes = (lengths // (2 * context))[:, None] + (turn < extra[:, None])
    begins = begin[:, None] + sizes.cumsum(1) - sizes
    out = []
    for i in range(context):
        mine = [i, 2 * context - 1 - i]
        starts, counts = begins[:, mine], sizes[:, mine]
        if i == context - 1:
            starts, counts = starts[:, :1], counts.sum(1, keepdim=True)
        kept = counts > 0
        out.append((starts[kept], counts[kept]))
    return out


def _paths(layout: PackedLayout, begins: Tensor, lengths: Tensor) -> Jagged:
    """For each chunk the places in the packed batch of its row's path, up to the chunk's last token."""
    offsets = layout.lengths.cumsum(0)
    row = torch.searchsorted(offsets, begins, right=True)
    ends = layout.starts[row] + begins + lengths - (offsets - layout.lengths)[row]
    own = torch.arange(layout.total, device=begins.device) if layout.keys is None else layout.keys
    return Jagged.from_lengths(own, layout.starts + layout.lengths).slice_rows(torch.zeros_like(ends), ends, row)


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
            kernel=self.config.attention_kernel,
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
