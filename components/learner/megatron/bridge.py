"""From a transformers configuration to megatron-core's GPTModel chunks, on top of mbridge's tables of tensor names.

Only mbridge's tables and its merging of tensors are used. Its own building, loading and saving require
TransformerEngine and CUDA, read `rope_theta` where transformers 5 has `rope_parameters`, hang all ranks if one cannot
read its file, and write the weight tying of one model into a table shared by all.
"""

import copy
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from creditgraph.components.learner.megatron.attention import (
    LayerRopeAttention,
    PackedAttention,
    PackedGPTModel,
    RMSNorm,
)
from creditgraph.components.learner.megatron.families import FAMILIES
from creditgraph.components.learner.megatron.layers.parts import Parts
from creditgraph.components.learner.megatron.weights import whole_shapes

# The padded vocabulary is a multiple of this times the tensor-parallel ranks: whole tiles for tensor cores.
VOCAB_MULTIPLE = 8
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class LocalBridge:
    """Differences from mbridge's bridges; `make_bridge` mixes it into the bridge of the model's family."""

    hf_config: Any
    config: Any

    def __init__(self, hf_config: Any, **kwargs: Any) -> None:
        # Tying is written into this table, which mbridge shares among all models of a class.
        self._DIRECT_MAPPING = dict(self._DIRECT_MAPPING)  # type: ignore[has-type]
        super().__init__(hf_config, **kwargs)  # type: ignore[call-arg]

    def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
        # Local layers have separate norms; TransformerEngine fuses them with the next matrix, as mbridge expects.
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        names: list[str] = super()._weight_name_mapping_mcore_to_hf(name)  # type: ignore[misc]
        return names

    def _adjust_mapping_for_shared_weights(self) -> None:
        # For every model type, not only Qwen.
        if self.hf_config.tie_word_embeddings:
            self._DIRECT_MAPPING["output_layer.weight"] = self._DIRECT_MAPPING["embedding.word_embeddings.weight"]


def make_bridge(hf_config: Any, dtype: torch.dtype, tensor_parallel: int, settings: dict[str, Any]) -> Any:
    """An mbridge bridge for the present process groups; `settings` are fields of TransformerConfig."""
    config = copy.deepcopy(hf_config)
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    family = FAMILIES[config.model_type]
    cls = type(f"Local{family.bridge.__name__}", (LocalBridge, family.bridge), {})
    multiple = VOCAB_MULTIPLE * tensor_parallel
    bridge = cls(config, dtype=dtype, make_vocab_size_divisible_by=multiple)
    bridge.set_extra_args(**settings)
    bridge.family = family
    bridge.shapes = whole_shapes(config)
    bridge.vocab_size = config.vocab_size
    bridge.padded_vocab_size = -(-config.vocab_size // multiple) * multiple
    _set_attention(bridge, config)
    return bridge


def _set_attention(bridge: Any, config: Any) -> None:
    """Rotary formulas and sliding windows of each layer, for the classes of attention.py."""
    ropes = rope_parameters(config)
    kinds = list(ropes)
    inverses, scalings = zip(*(rotary(config, kind, ropes[kind]) for kind in kinds), strict=True)
    bridge.inverse_frequencies = torch.stack(inverses)
    layers = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    bridge.config.rope_slots = [kinds.index(kind) if kind in kinds else 0 for kind in layers]
    bridge.config.rope_attention_scalings = [scalings[slot] for slot in bridge.config.rope_slots]
    bridge.config.attention_kernel = None  # torch's; see layers/attention.py
    bridge.config.attention_windows = [
        config.sliding_window if kind == "sliding_attention" else None for kind in layers
    ]


def rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """Rotary settings by layer type; "" when all layers share one."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = parameters and all(isinstance(value, dict) for value in parameters.values())
    return parameters if by_layer_type else {"": parameters}


def rotary(config: Any, kind: str, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """Inverse frequencies [D / 2] and the factor on queries and keys, by transformers' own formulas."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    formula = parameters.get("rope_type", "default")
    if formula == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    layer_type = {"layer_type": kind} if kind else {}
    inverse, scaling = ROPE_INIT_FUNCTIONS[formula](config, torch.device("cpu"), **layer_type)
    return inverse, float(scaling)


def build_chunks(bridge: Any, virtual_pipeline: int, parts: Parts) -> list[PackedGPTModel]:
    """This rank's GPTModels, weights undefined."""
    chunks = []
    for stage in range(virtual_pipeline):
        which = {"vp_stage": stage} if virtual_pipeline > 1 else {}
        place = {"ignore_virtual": False, **which} if which else {}
        chunk = PackedGPTModel(
            config=bridge.config,
            transformer_layer_spec=_layer_spec(bridge, parts, stage if which else None),
            vocab_size=bridge.padded_vocab_size,
            max_sequence_length=bridge.hf_config.max_position_embeddings,
            pre_process=mpu.is_pipeline_first_stage(**place),
            post_process=mpu.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=bridge.hf_config.tie_word_embeddings,
            position_embedding_type="rope",
            **which,
        )
        chunk.inverse_frequencies = bridge.inverse_frequencies
        chunk.vp_stage = stage if which else None
        chunks.append(chunk)
    return chunks


def _layer_spec(bridge: Any, parts: Parts, stage: int | None) -> Any:
    fused = parts.transformer_engine
    # Only TransformerEngine has one kernel for all experts of a rank; elsewhere they run one after the other.
    bridge.config.moe_grouped_gemm = bridge.config.moe_permute_fusion = fused
    spec = get_gpt_decoder_block_spec(
        bridge.config, use_transformer_engine=fused, normalization="RMSNorm", vp_stage=stage
    )
    spec.layer_norm = parts.norm
    for layer in spec.layer_specs:
        whole = layer.submodules
        attention = whole.self_attention.submodules
        attention.core_attention = PackedAttention
        if len(bridge.inverse_frequencies) > 1:
            whole.self_attention.module = LayerRopeAttention
        if not fused:
            whole.input_layernorm = whole.pre_mlp_layernorm = RMSNorm
            for norm in ("q_layernorm", "k_layernorm"):
                setattr(attention, norm, None if getattr(attention, norm) in (None, IdentityOp) else RMSNorm)
        if bridge.family.adapt is not None:
            bridge.family.adapt(layer, parts)
    return spec


def check_architecture(config: Any) -> list[str]:
    """Sentences why a transformers configuration has no counterpart here."""
    kind = getattr(config, "model_type", "unknown")
    if kind not in FAMILIES:
        return [
            f"model type '{kind}' is not supported; expected one of {', '.join(FAMILIES)}. Use learner.hf, or another "
            "model"
        ]
    problems = []
    for key, only in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        value = getattr(config, key, only)
        if value not in (only, None):
            problems.append(f"{key} is {value!r}; expected {only!r} for {kind}. Use learner.hf")
    ropes = {parameters.get("rope_type", "default") for parameters in rope_parameters(config).values()}
    return problems + [
        f"rope_type '{rope}' is not supported; expected one of {', '.join(ROPE_TYPES)}. Use learner.hf"
        for rope in sorted(ropes - set(ROPE_TYPES))
    ]
