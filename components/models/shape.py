"""The sizes of a decoder-only transformer, and the operations and bytes that follow from them.

The check of GPU memory and the learners' metrics count with the same formulas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from creditgraph.pipeline.core.errors import ConfigError

if TYPE_CHECKING:  # the command that plans layouts starts without torch
    from torch import Tensor

Number = TypeVar("Number", float, "Tensor")
_UNSUPPORTED = ("q_lora_rank", "shared_expert_intermediate_size", "n_shared_experts", "n_routed_experts")


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer with grouped-query attention and gated MLPs, dense or with experts.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, mlp, vocab: as in the model's configuration; with experts, `mlp` is
            the width of one.
        tied: input and output embedding are one matrix.
        experts, active: experts of a layer, and how many each token takes; 0 for a dense model.
        window, windowed: attention window [tokens] of some layers, and their number.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool = False
    experts: int = 0
    active: int = 0
    window: int = 0
    windowed: int = 0

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer beside its MLP or experts: projections and router; norms and biases left out."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads) + self.hidden * self.experts

    @property
    def mlp_parameters(self) -> int:
        """Weights of one layer's MLP, or of all its experts: gate, up and down projections."""
        return 3 * self.hidden * self.mlp * max(self.experts, 1)

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer."""
        return self.attention_parameters + self.mlp_parameters

    @property
    def embedding_parameters(self) -> int:
        """Weights of one embedding matrix."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.layers * self.layer_parameters + self.embedding_parameters * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Weights that multiply one token, the output head left out."""
        share = self.active / self.experts if self.experts else 1.0
        return self.layers * (self.attention_parameters + round(self.mlp_parameters * share))

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers, bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def lora_parameters(self, rank: int) -> int:
        """Weights of adapters of a rank at all linear layers but the head: rank × (inputs + outputs) for each."""
        heads = self.heads * self.head_dim
        kv_heads = self.kv_heads * self.head_dim
        projections = 2 * (self.hidden + heads) + 2 * (self.hidden + kv_heads)
        mlp = 3 * (self.hidden + self.mlp) * max(self.experts, 1) + (self.hidden + self.experts) * bool(self.experts)
        return rank * self.layers * (projections + mlp)

    def forward_flops(self, tokens: float, pairs: Number, predicted: float) -> Number:
        """Operations of a forward pass.

        Args:
            tokens: tokens that are computed.
            pairs: pairs of a token and one that it attends to, in a layer without a window: of a causal sequence half
                its square.
            predicted: tokens whose logits are computed.
        """
        # Every weight is multiplied once per token; the input embedding is a lookup. Scores and values: two products.
        products = tokens * self.active_parameters + predicted * self.embedding_parameters
        attended = self.layers * pairs
        if self.windowed and pairs > tokens * self.window:
            attended += self.windowed * (tokens * self.window - pairs)
        return attended * (4.0 * self.heads * self.head_dim) + 2.0 * products

    @staticmethod
    def of_numbers(text: str) -> Shape:
        """A shape from "layers,hidden,heads,kv_heads,head_dim,mlp,vocab"."""
        try:
            layers, hidden, heads, kv_heads, head_dim, mlp, vocab = (int(n) for n in text.split(","))
            return Shape(text, layers, hidden, heads, kv_heads, head_dim, mlp, vocab)
        except ValueError as error:
            raise ConfigError(
                f"model shape '{text}': expected the seven numbers layers,hidden,heads,kv_heads,head_dim,mlp,vocab, "
                f"or one of {', '.join(SHAPES)}."
            ) from error

    @staticmethod
    def read(path: str) -> Shape:
        """The shape in a Hugging Face config.json (the file, or its folder)."""
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        try:
            values: dict[str, Any] = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model shape: {file} cannot be read ({error}); expected a config.json or one of {', '.join(SHAPES)}."
            ) from error
        return Shape.of_config(values, file.resolve().parent.name, str(file))

    @staticmethod
    def of_config(c: Mapping[str, Any], name: str, place: str = "") -> Shape:
        """The shape in the values of a Hugging Face configuration."""
        place = place or name
        odd = [key for key in _UNSUPPORTED if c.get(key)]
        if odd:
            raise ConfigError(
                f"model shape: {place} has {odd[0]}, which the formulas do not cover; expected a dense model, or one "
                "whose experts are all routed, such as Qwen3-30B-A3B."
            )
        experts = c.get("num_experts") or c.get("num_local_experts") or 0
        try:
            return Shape(
                name=name,
                layers=c["num_hidden_layers"],
                hidden=c["hidden_size"],
                heads=c["num_attention_heads"],
                kv_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
                head_dim=c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
                mlp=(c.get("moe_intermediate_size") if experts else 0) or c["intermediate_size"],
                vocab=c["vocab_size"],
                tied=bool(c.get("tie_word_embeddings", False)),
                experts=experts,
                active=c["num_experts_per_tok"] if experts else 0,
                window=c.get("sliding_window") or 0,
                windowed=sum(kind == "sliding_attention" for kind in c.get("layer_types") or ()),
            )
        except KeyError as error:
            raise ConfigError(
                f"model shape: {place} has no {error}; expected a Qwen, Llama or OLMo style configuration."
            ) from error


_QWEN_1_5B = (28, 1536, 12, 2, 128, 8960, 151936)
_QWEN_7B = (28, 3584, 28, 4, 128, 18944, 152064)
_DEEPSEEK_7B = (30, 4096, 32, 32, 128, 11008, 102400)

# From the models' configurations, under the hub's names without the owner, lower case.
SHAPES = {
    s.name: s
    for s in (
        Shape("qwen2.5-0.5b-instruct", 24, 896, 14, 2, 64, 4864, 151936, tied=True),
        Shape("qwen2.5-1.5b", *_QWEN_1_5B, tied=True),
        Shape("qwen2.5-math-1.5b", *_QWEN_1_5B, tied=True),
        Shape("deepseek-r1-distill-qwen-1.5b", *_QWEN_1_5B),
        Shape("qwen2.5-7b", *_QWEN_7B),
        Shape("qwen2.5-7b-instruct", *_QWEN_7B),
        Shape("qwen2.5-math-7b", *_QWEN_7B),
        Shape("qwen2.5-14b-instruct", 48, 5120, 40, 8, 128, 13824, 152064),
        Shape("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064),
        Shape("qwen3-1.7b", 28, 2048, 16, 8, 128, 6144, 151936, tied=True),
        Shape("qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151936, tied=True),
        Shape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
        Shape("qwen3-8b-base", 36, 4096, 32, 8, 128, 12288, 151936),
        Shape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936),
        Shape("qwen3-30b-a3b-base", 48, 2048, 32, 4, 128, 768, 151936, experts=128, active=8),
        Shape("olmo-3-7b-instruct", 32, 4096, 32, 32, 128, 11008, 100278, window=4096, windowed=24),
        Shape("deepseek-math-7b-instruct", *_DEEPSEEK_7B),
        Shape("deepseekmath-7b-sft-math-v2", *_DEEPSEEK_7B),
        Shape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        Shape("llama-3.1-8b-instruct", 32, 4096, 32, 8, 128, 14336, 128256),
    )
}


def known_shape(path: str) -> Shape | None:
    """The shape of `model.path` without a question to the hub: from its files here, else from `SHAPES`.

    None for a model that is in neither, or that the formulas do not cover.
    """
    from creditgraph.components.models.load import EMBEDDED, cached_file

    file = (EMBEDDED.get(path) or Path(path).expanduser()) / "config.json"
    if not file.is_file():
        known = SHAPES.get(path.rpartition("/")[2].lower())
        cached = cached_file(path, "config.json") if known is None and path.count("/") == 1 else None
        if cached is None:
            return known
        file = cached
    try:
        return Shape.read(str(file))
    except ConfigError:
        return None
