"""A lean decoder for Qwen2, Qwen3, Llama and Mistral: the arithmetic of transformers in a fraction of its operations.

- Query, key and value are one matrix product, gate and up another.
- Prompts are cached once per group of rows, and all rows of a group attend to them in one matrix product.
- Sampled tokens are cached per row; all rows have sampled equally many, so a step writes one column and attends to a
  slice.
- Keys are stored [row, head, dim, time], values [row, head, time, dim]: attention is batched matrix products over plain
  slices, and query heads that share a key head are rows of one product (no expansion).
- Rotary dimensions are stored in pairs, so that rotating is one complex product; queries and keys share the order, so
  their product does not change.
- Rows that leave are replaced by rows from the end; nothing else moves.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from creditgraph.components.engine.local.batches import token_batches
from creditgraph.components.engine.local.cache import GroupCache
from creditgraph.pipeline.core.jagged import Jagged

MODEL_TYPES = ("qwen2", "qwen3", "llama", "mistral")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_PREFILL_TOKENS = 1 << 14  # padded prompt tokens per forward pass


class _Linear(NamedTuple):
    weight: Tensor  # [out, in]
    bias: Tensor | None


class _Layer(NamedTuple):
    norm_1: Tensor  # [C]
    qkv: _Linear  # [(Hq + 2 Hkv) D, C]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None
    out: _Linear  # [C, Hq D]
    norm_2: Tensor
    gate_up: _Linear  # [2 I, C]
    down: _Linear  # [C, I]


def unsupported(model: Any) -> str:
    """The reason why `LeanDecoder` does not support a transformers model, "" if it does."""
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
    """See the module docstring. Copies the weights, so the transformers model may be dropped afterwards.

    Args:
        model: a supported transformers model.
        context: most tokens in a row.
    """

    def __init__(self, model: Any, context: int) -> None:
        from transformers.activations import ACT2FN

        config = model.config
        self._act: Callable[[Tensor], Tensor] = F.silu if config.hidden_act == "silu" else ACT2FN[config.hidden_act]
        self._eps = float(config.rms_norm_eps)
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._num_layers = int(config.num_hidden_layers)
        self._scale = self._dim**-0.5
        head = model.get_output_embeddings().weight
        self.vocab_size = int(head.shape[0])
        self._tied = head.data_ptr() == model.get_input_embeddings().weight.data_ptr()
        self.device: torch.device = model.device
        self._dtype = model.dtype
        # Pairs (i, i + D/2) that transformers rotates together become neighbours.
        self._order = torch.arange(self._dim, device=self.device).view(2, -1).T.reshape(-1)
        self._rotary = model.model.rotary_emb
        self._context = context
        self.cached_bytes = 2 * self._num_layers * self._kv_heads * self._dim * self._dtype.itemsize
        self._turn = torch.zeros(0, self._dim // 2, dtype=torch.complex64)
        self.load(model.state_dict())
        self.release()

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies new weights into fused ones, in the model's dtype and on its device."""
        self._layers = [self._layer(tensors, f"model.layers.{n}.") for n in range(self._num_layers)]
        self._embed = self._copy(tensors["model.embed_tokens.weight"])
        self._norm = self._copy(tensors["model.norm.weight"])
        self._head = self._embed if self._tied else self._copy(tensors["lm_head.weight"])

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self._dtype, copy=True)

    def _layer(self, tensors: Mapping[str, Tensor], prefix: str) -> _Layer:
        def own(name: str) -> Tensor:
            tensor = self._copy(tensors[prefix + name])
            rotated = name.split(".")[-2] in ("q_proj", "k_proj", "q_norm", "k_norm")
            return self._paired(tensor) if rotated else tensor

        def linear(*names: str) -> _Linear:
            has_bias = f"{prefix}{names[0]}.bias" in tensors
            bias = torch.cat([own(f"{name}.bias") for name in names]) if has_bias else None
            return _Linear(torch.cat([own(f"{name}.weight") for name in names]), bias)

        has_norms = f"{prefix}self_attn.q_norm.weight" in tensors
        return _Layer(
            norm_1=own("input_layernorm.weight"),
            qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            q_norm=own("self_attn.q_norm.weight") if has_norms else None,
            k_norm=own("self_attn.k_norm.weight") if has_norms else None,
            out=linear("self_attn.o_proj"),
            norm_2=own("post_attention_layernorm.weight"),
            gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
            down=linear("mlp.down_proj"),
        )

    def _paired(self, tensor: Tensor) -> Tensor:
        """Rows of each head in the order of rotary pairs."""
        return tensor.view(-1, self._dim, *tensor.shape[1:])[:, self._order].reshape(tensor.shape)

    def _turns(self, length: int) -> Tensor:
        """cos + i·sin of positions 0 … length − 1: complex64 [length, D/2]."""
        if len(self._turn) < length:
            # A power of two, so that growing is rare; transformers' own module applies frequency scaling.
            size = min(max(1 << (length - 1).bit_length(), 256), max(self._context, length))
            positions = torch.arange(size, device=self.device)[None]
            cos, sin = self._rotary(torch.zeros(1, device=self.device), positions)
            half = self._dim // 2
            self._turn = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())
        return self._turn[:length]

    def _project(self, layer: _Layer, x: Tensor, turn: Tensor) -> Tensor:
        """Rotated queries and keys, and values: [N, Hq + 2 Hkv, D] of x [N, C] at turns [N, 1, D/2]."""
        qkv = F.linear(F.rms_norm(x, x.shape[-1:], layer.norm_1, self._eps), *layer.qkv)
        qkv = qkv.view(len(x), -1, self._dim)
        rotated = self._heads + self._kv_heads
        if layer.q_norm is not None and layer.k_norm is not None:
            q = qkv[:, : self._heads]
            k = qkv[:, self._heads : rotated]
            q.copy_(F.rms_norm(q, (self._dim,), layer.q_norm, self._eps))
            k.copy_(F.rms_norm(k, (self._dim,), layer.k_norm, self._eps))
        # Rotating a pair is multiplying it, as a complex number, by cos + i·sin.
        pairs = qkv[:, :rotated].view(len(x), rotated, -1, 2)
        if qkv.dtype == torch.float32:
            torch.view_as_complex(pairs).mul_(turn)
        else:
            # torch has no 16-bit complex type.
            pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * turn))
        return qkv

    def _finish(self, layer: _Layer, x: Tensor, attended: Tensor) -> Tensor:
        """Residual stream [N, C] after the layer, from attended values [N, Hq D]."""
        x = _add_product(x, attended, layer.out)
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:], layer.norm_2, self._eps), *layer.gate_up).chunk(2, -1)
        return _add_product(x, self._act(gate).mul_(up), layer.down)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention of queries [B, Hq, S, D] to keys and values [B, Hkv, T, D], causal without a mask [B, 1, S, T]."""
        grouped = self._heads != self._kv_heads
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=grouped
        )

    def _final(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._norm, self._eps)

    def _causal(self, tokens: Tensor, cached: Callable[[int, Tensor, Tensor], None] | None = None) -> Tensor:
        """Residual stream [B·T, C] of left-aligned rows [B, T]; cached(layer, k, v) gets [B, Hkv, T, D] each."""
        rows, length = tokens.shape
        turn = self._turns(length).repeat(rows, 1)[:, None]
        x = F.embedding(tokens.reshape(-1), self._embed)
        for n, layer in enumerate(self._layers):
            qkv = self._project(layer, x, turn).view(rows, length, -1, self._dim).transpose(1, 2)
            q, k, v = torch.split(qkv, [self._heads, self._kv_heads, self._kv_heads], 1)
            if cached is not None:
                cached(n, k, v)
            attended = self._attend(q, k, v)
            x = self._finish(layer, x, attended.transpose(1, 2).reshape(rows * length, -1))
        return x

    @torch.inference_mode()
    def hidden(self, tokens: Tensor) -> Tensor:
        """Last hidden states [B, T, C]."""
        return self._final(self._causal(tokens)).view(*tokens.shape, -1)

    @torch.inference_mode()
    def branched(self, trunks: Tensor, branches: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Last hidden states [B, T + S, C] of trunks [B, T], causal, followed by branch tokens [B, S].

        Args:
            trunks: int64 [B, T], left-aligned.
            branches: int64 [B, S], the tokens of all branches of a trunk, one after the other.
            positions: int64 [B, S], position of each branch token.
            visible: bool [B, S, T + S], what each branch token attends to; at least one place each.
        """
        rows, length = trunks.shape
        place = torch.cat([torch.arange(length, device=trunks.device).expand(rows, -1), positions], 1).reshape(-1)
        turn = self._turns(int(place.max()) + 1)[place][:, None]
        x = F.embedding(torch.cat([trunks, branches], 1).reshape(-1), self._embed)
        for layer in self._layers:
            qkv = self._project(layer, x, turn).view(rows, -1, self._heads + 2 * self._kv_heads, self._dim)
            q, k, v = torch.split(qkv.transpose(1, 2), [self._heads, self._kv_heads, self._kv_heads], 1)
            trunk = self._attend(q[:, :, :length], k[:, :, :length], v[:, :, :length])
            branch = self._attend(q[:, :, length:], k, v, visible[:, None])
            x = self._finish(layer, x, torch.cat([trunk, branch], 2).transpose(1, 2).reshape(len(x), -1))
        return self._final(x).view(rows, length + branches.shape[1], -1)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""
        return F.linear(hidden, self._head)

    def release(self) -> None:
        """Frees the cache."""
        self._batch: GroupCache | None = None

    @torch.inference_mode()
    def prefill(self, prompts: Jagged, group: Tensor, room: int) -> Tensor:
        """Runs each prompt once and stores its cache once per entry."""
        lengths = prompts.lengths
        self.release()
        batch = GroupCache(lengths, group, room, self._num_layers, self._kv_heads, self._dim, self._embed)
        last = self._embed.new_empty(len(prompts), self._embed.shape[1])
        order = torch.argsort(lengths)
        for part in token_batches(lengths[order].tolist(), _PREFILL_TOKENS):
            rows = order[part]
            tokens = prompts.select(rows).to_padded().to(torch.int64)
            x = self._causal(tokens, partial(batch.store, rows)).view(*tokens.shape, -1)
            last[rows] = x[torch.arange(len(rows), device=self.device), lengths[rows] - 1]
        self._batch = batch
        return self.logits(self._final(last))[group]

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Appends one token per row."""
        batch = self._batch
        assert batch is not None, "prefill starts a batch"
        batch.append_column()
        shape = (len(tokens) * self._kv_heads, -1)
        shared = self._heads // self._kv_heads  # query heads per key head
        turn = self._turns(int(batch.prompt_columns) + batch.filled)[batch.positions][:, None]
        batch.positions = batch.positions + 1
        x = F.embedding(tokens, self._embed)
        for n, layer in enumerate(self._layers):
            qkv = self._project(layer, x, turn)
            keys, values = batch.write(n, qkv[:, self._heads : -self._kv_heads], qkv[:, -self._kv_heads :])
            # Query heads that share a key head are rows of one product [B · Hkv, shared, …].
            query = qkv[:, : self._heads].reshape(*shape, self._dim)
            scores = torch.bmm(query, keys)
            prompt_scores = torch.bmm(batch.to_entries(query.view(shape[0], -1), shared), batch.keys[n].flatten(0, 1))
            if batch.mask is not None:
                prompt_scores.view(*batch.keys[n].shape[:2], -1, batch.prompt_columns).add_(batch.mask[:, None, None])
            # Prompt columns first, then the sampled tokens of the row.
            scores = torch.cat([batch.to_rows(prompt_scores).view(shape[0], shared, -1), scores], -1)
            weights = torch.softmax(scores.mul_(self._scale), -1, dtype=torch.float32).to(x.dtype)
            prompt_weights = weights[..., : batch.prompt_columns].reshape(shape)
            attended = torch.bmm(batch.to_entries(prompt_weights, shared), batch.values[n].flatten(0, 1))
            attended = torch.baddbmm(
                batch.to_rows(attended).view_as(query), weights[..., batch.prompt_columns :], values
            )
            x = self._finish(layer, x, attended.view(len(tokens), -1))
        return self.logits(self._final(x))

    @torch.inference_mode()
    def keep(self, index: Tensor) -> None:
        """Keeps rows by index."""
        if self._batch is not None:
            self._batch.keep(index)


def _add_product(x: Tensor, y: Tensor, linear: _Linear) -> Tensor:
    x = torch.addmm(x, y, linear.weight.T)
    return x if linear.bias is None else x.add_(linear.bias)
