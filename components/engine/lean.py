"""A lean decoder for Qwen2, Qwen3, Llama and Mistral: the same arithmetic as transformers with a fraction of its operations per step.

- Query, key and value are one matrix product, gate and up another.
- Rows of a batch are aligned at their ends, so a step writes one column of a preallocated cache and attends to a slice of it.
- Keys are stored [row, head, dim, time], values [row, head, time, dim]: both attention products are then batched matrix products over
  plain slices, and query heads that share a key head are rows of one product (no expansion).
- Rotary dimensions are stored in pairs, so that rotating is one complex product; queries and keys share the order, their product
  does not change.
- Rows that leave are replaced by rows from the end; nothing else moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.jagged import Jagged

MODEL_TYPES = ("qwen2", "qwen3", "llama", "mistral")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_PREFILL_TOKENS = 1 << 14


@dataclass
class _Layer:
    norm_1: Tensor  # [C]
    qkv: Tensor  # [(Hq + 2 Hkv) D, C]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None
    out: Tensor  # [C, Hq D]
    out_bias: Tensor | None
    norm_2: Tensor
    gate_up: Tensor  # [2 I, C]
    gate_up_bias: Tensor | None
    down: Tensor  # [C, I]
    down_bias: Tensor | None


def unsupported(model: Any) -> str:
    """Why a transformers model cannot be run by `LeanDecoder`, "" when it can."""
    config = model.config
    if config.model_type not in MODEL_TYPES:
        return f"model type '{config.model_type}' is not one of {', '.join(MODEL_TYPES)}"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (config.model_type == "mistral" and config.sliding_window):
        return "some layers use sliding-window attention"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _STATIC_ROPE:
        return f"rotary embedding '{rope}' changes with the length"
    if getattr(model, "hf_quantizer", None) is not None:
        return "the model is quantised"
    return ""


class LeanDecoder:
    """See the module's text. Owns its weights: the transformers model may be dropped afterwards.

    Args:
        model: a supported transformers model.
        context: most tokens in a row.
    """

    def __init__(self, model: Any, context: int) -> None:
        from transformers.activations import ACT2FN

        config = model.config
        self._act: Callable[[Tensor], Tensor] = F.silu if config.hidden_act == "silu" else ACT2FN[config.hidden_act]
        self._eps = float(config.rms_norm_eps)
        self._heads, self._kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self._dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._num_layers = int(config.num_hidden_layers)
        self._scale = self._dim**-0.5
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        # Pairs (i, i + D/2) that transformers rotates together become neighbours.
        self._order = torch.arange(self._dim).view(2, -1).T.reshape(-1)
        self._rotary, self._context = model.model.rotary_emb, context
        self._turn = torch.zeros(0, self._dim // 2, dtype=torch.complex64)
        self._layers: list[_Layer] = []
        self.load(model.state_dict())
        self.release()

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        weights = {k: v for k, v in tensors.items()}
        fresh = [self._layer(weights, f"model.layers.{n}.") for n in range(self._num_layers)]
        embed, norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        head = weights.get("lm_head.weight", embed)
        if not self._layers:
            self._layers = fresh
            self._embed, self._norm = embed.clone(), norm.clone()
            self._head = self._embed if head is embed or head.data_ptr() == embed.data_ptr() else head.clone()
            return
        for old, new in zip(self._layers, fresh, strict=True):
            for name, tensor in vars(old).items():
                if tensor is not None:
                    tensor.copy_(vars(new)[name])
        self._embed.copy_(embed)
        self._norm.copy_(norm)
        if self._head is not self._embed:
            self._head.copy_(head)

    def _layer(self, weights: Mapping[str, Tensor], prefix: str) -> _Layer:
        def joined(part: str, names: tuple[str, ...], kind: str) -> Tensor | None:
            found = [weights.get(f"{prefix}{part}.{n}_proj.{kind}") for n in names]
            if any(f is None for f in found):
                return None
            return torch.cat([self._paired(f) if n in "qk" else f for n, f in zip(names, found, strict=True) if f is not None])

        def needed(part: str, names: tuple[str, ...]) -> Tensor:
            tensor = joined(part, names, "weight")
            if tensor is None:
                raise KeyError(f"{prefix}{part}.{names}")
            return tensor

        def head_norm(name: str) -> Tensor | None:
            found = weights.get(f"{prefix}self_attn.{name}.weight")
            return None if found is None else self._paired(found)

        return _Layer(
            norm_1=weights[prefix + "input_layernorm.weight"].clone(),
            qkv=needed("self_attn", ("q", "k", "v")),
            qkv_bias=joined("self_attn", ("q", "k", "v"), "bias"),
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            out=needed("self_attn", ("o",)),
            out_bias=joined("self_attn", ("o",), "bias"),
            norm_2=weights[prefix + "post_attention_layernorm.weight"].clone(),
            gate_up=needed("mlp", ("gate", "up")),
            gate_up_bias=joined("mlp", ("gate", "up"), "bias"),
            down=needed("mlp", ("down",)),
            down_bias=joined("mlp", ("down",), "bias"),
        )

    def _paired(self, tensor: Tensor) -> Tensor:
        order = self._order.to(tensor.device)
        return tensor.view(-1, self._dim, *tensor.shape[1:])[:, order].reshape(tensor.shape)

    def _turns(self, length: int) -> Tensor:
        """cos + i·sin of positions 0 … length − 1: complex64 [length, D/2]."""
        if len(self._turn) < length:
            # A power of two, so that growing is rare; transformers' own module knows about frequency scaling.
            size = min(max(1 << (length - 1).bit_length(), 256), max(self._context, length))
            device = self._embed.device
            cos, sin = self._rotary(torch.zeros(1, device=device), torch.arange(size, device=device)[None])
            half = self._dim // 2
            self._turn = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())
        return self._turn[:length]

    def _project(self, layer: _Layer, x: Tensor, turn: Tensor) -> Tensor:
        """Rotated queries and keys, and values: [N, Hq + 2 Hkv, D] of x [N, C] at turns [N, 1, D/2]."""
        qkv = F.linear(F.rms_norm(x, x.shape[-1:], layer.norm_1, self._eps), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(len(x), -1, self._dim)
        rotated = self._heads + self._kv_heads
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qkv[:, : self._heads], qkv[:, self._heads : rotated]
            q.copy_(F.rms_norm(q, (self._dim,), layer.q_norm, self._eps))
            k.copy_(F.rms_norm(k, (self._dim,), layer.k_norm, self._eps))
        pairs = qkv[:, :rotated].unflatten(-1, (-1, 2))
        if qkv.dtype == torch.float32:
            torch.view_as_complex(pairs).mul_(turn)
        else:
            pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * turn))
        return qkv

    def _finish(self, layer: _Layer, x: Tensor, attended: Tensor) -> Tensor:
        """Residual stream [N, C] after the layer, from attended values [N, Hq D]."""
        x = _add_product(x, attended, layer.out, layer.out_bias)
        gate_up = F.linear(F.rms_norm(x, x.shape[-1:], layer.norm_2, self._eps), layer.gate_up, layer.gate_up_bias)
        gate, up = gate_up.chunk(2, -1)
        return _add_product(x, self._act(gate).mul_(up), layer.down, layer.down_bias)

    def _causal(self, tokens: Tensor, cached: Callable[[int, Tensor, Tensor], None] | None = None) -> Tensor:
        """Residual stream [B·T, C] of left-aligned rows [B, T]; `cached` receives (layer, keys, values), each [B, Hkv, T, D]."""
        rows, length = tokens.shape
        turn = self._turns(length).repeat(rows, 1)[:, None]
        x = F.embedding(tokens.reshape(-1), self._embed)
        heads = [self._heads, self._kv_heads, self._kv_heads]
        for n, layer in enumerate(self._layers):
            qkv = self._project(layer, x, turn).view(rows, length, -1, self._dim).transpose(1, 2)
            q, k, v = qkv.split(heads, 1)
            if cached is not None:
                cached(n, k, v)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=self._heads != self._kv_heads)
            x = self._finish(layer, x, attended.transpose(1, 2).reshape(rows * length, -1))
        return x

    @torch.inference_mode()
    def hidden(self, tokens: Tensor) -> Tensor:
        x = self._causal(tokens)
        return F.rms_norm(x, x.shape[-1:], self._norm, self._eps).view(*tokens.shape, -1)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._head)

    def release(self) -> None:
        empty = self._embed.new_empty(0)
        self._keys, self._values, self._mask = empty, empty, None
        self._filled = self._capacity = 0

    @torch.inference_mode()
    def prefill(self, prompts: Jagged, group: Tensor, room: int) -> Tensor:
        device, lengths = self._embed.device, prompts.lengths
        longest, rows = int(lengths.max()), len(group)
        self.release()
        self._filled = longest
        self._limit = longest + room
        self._reserve(rows, longest + min(room, 128))
        self._positions = lengths[group]
        pads = longest - lengths
        last = self._embed.new_empty(len(prompts), self._embed.shape[1])
        order = torch.argsort(lengths)
        for part in _token_parts(lengths[order].tolist(), _PREFILL_TOKENS):
            chosen = order[part]
            count = lengths[chosen]
            tokens = prompts.select(chosen).to_padded().to(torch.int64)
            # Cache column c of a prompt holds its token c − pad; columns before it are masked and may hold anything.
            source = (torch.arange(longest, device=device) - pads[chosen][:, None]).clamp(min=0)
            place = torch.full((len(prompts),), -1, device=device)
            place[chosen] = torch.arange(len(chosen), device=device)
            mine = place[group]
            targets = (mine >= 0).nonzero()[:, 0]
            fill = _CacheFill(self._keys, self._values, source, mine[targets], targets, longest)
            x = self._causal(tokens, fill).view(*tokens.shape, -1)
            last[chosen] = x[torch.arange(len(chosen), device=device), count - 1]
        if int(pads.max()) > 0:
            self._pads = pads[group]
            self._mask = self._pad_mask()
        logits = self.logits(F.rms_norm(last, last.shape[-1:], self._norm, self._eps))
        return logits[group]

    def _pad_mask(self) -> Tensor:
        """Additive mask [B, 1, 1, filled prompt columns]: padding gets the lowest number."""
        columns = torch.arange(int(self._pads.max()), device=self._pads.device)
        mask = torch.zeros(len(self._pads), len(columns), dtype=self._embed.dtype, device=self._pads.device)
        return mask.masked_fill_(columns < self._pads[:, None], torch.finfo(mask.dtype).min)[:, None, None]

    def _reserve(self, rows: int, capacity: int) -> None:
        keys = self._embed.new_empty(self._num_layers, rows, self._kv_heads, self._dim, capacity)
        values = self._embed.new_empty(self._num_layers, rows, self._kv_heads, capacity, self._dim)
        if self._capacity:
            keys[..., : self._filled] = self._keys[:, :rows, ..., : self._filled]
            values[..., : self._filled, :] = self._values[:, :rows, :, : self._filled]
        self._keys, self._values, self._capacity = keys, values, capacity

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        rows, column = len(tokens), self._filled
        if column == self._capacity:
            self._reserve(rows, min(self._limit, column + max(128, column // 2)))
        self._filled = end = column + 1
        turn = self._turns(end)[self._positions][:, None]
        self._positions = self._positions + 1
        x = F.embedding(tokens, self._embed)
        shared = self._heads // self._kv_heads
        first_kv, first_v = self._heads, self._heads + self._kv_heads
        for n, layer in enumerate(self._layers):
            qkv = self._project(layer, x, turn)
            keys, values = self._keys[n, :rows], self._values[n, :rows]
            keys[..., column] = qkv[:, first_kv:first_v]
            values[:, :, column] = qkv[:, first_v:]
            query = qkv[:, :first_kv].reshape(rows * self._kv_heads, shared, self._dim)
            scores = torch.bmm(query, keys[..., :end].flatten(0, 1)).mul_(self._scale)
            if self._mask is not None:
                scores.view(rows, self._kv_heads, shared, end)[..., : self._mask.shape[-1]] += self._mask
            weights = torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype)
            attended = torch.bmm(weights, values[:, :, :end].flatten(0, 1))
            x = self._finish(layer, x, attended.view(rows, -1))
        return self.logits(F.rms_norm(x, x.shape[-1:], self._norm, self._eps))

    @torch.inference_mode()
    def keep(self, index: Tensor) -> None:
        moved = (index != torch.arange(len(index), device=index.device)).nonzero()[:, 0]
        source, end = index[moved], self._filled
        self._keys[:, moved, ..., :end] = self._keys[:, source, ..., :end]
        self._values[:, moved, :, :end] = self._values[:, source, :, :end]
        self._positions = self._positions[index]
        if self._mask is not None:
            self._pads = self._pads[index]
            self._mask = self._mask[index] if int(self._pads.max()) else None


@dataclass
class _CacheFill:
    """Writes keys and values of prompts [U, Hkv, T, D] into the cache rows `targets`, aligned at their ends."""

    keys: Tensor
    values: Tensor
    source: Tensor  # [U, columns]: place in the prompt
    prompt: Tensor  # [rows]: prompt of each target
    targets: Tensor
    columns: int

    def __call__(self, layer: int, keys: Tensor, values: Tensor) -> None:
        rows = torch.arange(len(self.source), device=self.source.device)[:, None]
        aligned = keys.transpose(1, 2)[rows, self.source]  # [U, columns, Hkv, D]
        self.keys[layer, self.targets, :, :, : self.columns] = aligned.permute(0, 2, 3, 1)[self.prompt]
        aligned = values.transpose(1, 2)[rows, self.source]
        self.values[layer, self.targets, :, : self.columns] = aligned.transpose(1, 2)[self.prompt]


def _add_product(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x = torch.addmm(x, y, weight.T)
    return x if bias is None else x.add_(bias)


def _token_parts(lengths: list[int], limit: int) -> list[slice]:
    """Cuts ascending lengths into ranges whose padded size stays within `limit` tokens, at least one row each."""
    parts, start = [], 0
    for end, length in enumerate(lengths):
        if end > start and (end + 1 - start) * length > limit:
            parts.append(slice(start, end))
            start = end
    return [*parts, slice(start, len(lengths))]
