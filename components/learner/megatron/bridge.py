"""Hugging Face configurations and weights to megatron-core's and back, on top of mbridge's tables.

mbridge knows which Hugging Face tensors make up which parameter and how they are merged. Its own building, loading and
saving are not used: they want TransformerEngine and CUDA, read `rope_theta` where transformers 5 keeps
`rope_parameters`, hang all ranks when one cannot read its file, and write the weight tying of one model into a table
shared by all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mbridge.core.bridge import _MODEL_REGISTRY
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from components.learner.megatron.attention import LayerRopeAttention, PackedAttention, PackedGPTModel, RMSNorm
from components.learner.megatron.families.olmo import OlmoBridge, adapt
from pipeline.core.errors import ConfigError, DataError

# The padded vocabulary is a multiple of this times the tensor-parallel ranks: whole tiles for tensor cores.
VOCAB_MULTIPLE = 8
TIED_HEAD = "lm_head.weight"
OLMO = ("olmo2", "olmo3")


class LocalBridge:
    """What differs from mbridge's bridges; mixed into the one of the model's type by `make_bridge`."""

    hf_config: Any
    config: Any

    def __init__(self, hf_config: Any, **kwargs: Any) -> None:
        # Tying is written into this table, which mbridge shares among all models of a class.
        self._DIRECT_MAPPING = dict(self._DIRECT_MAPPING)  # type: ignore[has-type]
        super().__init__(hf_config, **kwargs)  # type: ignore[call-arg]

    def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
        # Local layers keep norms by themselves; TransformerEngine fuses them with the matrix behind, as mbridge
        # expects.
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        names: list[str] = super()._weight_name_mapping_mcore_to_hf(name)  # type: ignore[misc]
        return names

    def _adjust_mapping_for_shared_weights(self) -> None:
        # For every model type, not only Qwen.
        if self.hf_config.tie_word_embeddings:
            self._DIRECT_MAPPING["output_layer.weight"] = self._DIRECT_MAPPING["embedding.word_embeddings.weight"]


def make_bridge(hf_config: Any, dtype: torch.dtype, tensor: int, settings: dict[str, Any]) -> Any:
    """An mbridge bridge for the present process groups; `settings` are fields of TransformerConfig."""
    config = copy.deepcopy(hf_config)
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    base = OlmoBridge if config.model_type in OLMO else _MODEL_REGISTRY[config.model_type]
    kind = type(f"Local{base.__name__}", (LocalBridge, base), {})
    bridge = kind(config, dtype=dtype, make_vocab_size_divisible_by=VOCAB_MULTIPLE * tensor)
    bridge.set_extra_args(**settings)
    multiple = bridge.make_vocab_size_divisible_by
    bridge.vocab_size, bridge.padded_vocab_size = config.vocab_size, -(-config.vocab_size // multiple) * multiple
    ropes = rope_parameters(config)
    kinds = list(ropes)
    inverses, scalings = zip(*(rotary(config, kind, ropes[kind]) for kind in kinds), strict=True)
    bridge.inverse_frequencies = torch.stack(inverses)
    layers = layer_types(config)
    bridge.config.rope_slots = [kinds.index(kind) if kind in kinds else 0 for kind in layers]
    bridge.config.rope_attention_scalings = [scalings[slot] for slot in bridge.config.rope_slots]
    bridge.config.attention_windows = [
        config.sliding_window if kind == "sliding_attention" else None for kind in layers
    ]
    return bridge


def rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """Rotary settings by layer type; "" when all layers share one."""
    found = getattr(config, "rope_parameters", None) or {}
    return found if found and all(isinstance(value, dict) for value in found.values()) else {"": found}


def rotary(config: Any, kind: str, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """Inverse frequencies [D / 2] and the factor on queries and keys, by transformers' own formulas."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    formula = parameters.get("rope_type", "default")
    if formula == "default":
        return 1.0 / (
            parameters["rope_theta"] ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
        ), 1.0
    inverse, scaling = ROPE_INIT_FUNCTIONS[formula](
        config, torch.device("cpu"), **({"layer_type": kind} if kind else {})
    )
    return inverse, float(scaling)


def layer_types(config: Any) -> list[str]:
    """ "full_attention" or "sliding_attention" of each layer."""
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)


def build_chunks(bridge: Any, virtual: int, transformer_engine: bool) -> list[PackedGPTModel]:
    """This rank's GPTModels, weights undefined."""
    chunks = []
    for stage in range(virtual):
        which = {"vp_stage": stage} if virtual > 1 else {}
        place = {"ignore_virtual": False, **which} if which else {}
        chunk = PackedGPTModel(
            config=bridge.config,
            transformer_layer_spec=_layer_spec(bridge, transformer_engine, stage if which else None),
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


def _layer_spec(bridge: Any, transformer_engine: bool, stage: int | None) -> Any:
    config, olmo = bridge.config, isinstance(bridge, OlmoBridge)
    # TransformerEngine fuses a norm before each matrix; OLMo's are behind.
    transformer_engine = transformer_engine and not olmo
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=transformer_engine, normalization="RMSNorm", vp_stage=stage
    )
    if not transformer_engine:
        spec.layer_norm = RMSNorm
    for layer in spec.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if len(bridge.inverse_frequencies) > 1:
            parts.self_attention.module = LayerRopeAttention
        if not transformer_engine:
            parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
            attention.q_layernorm, attention.k_layernorm = (
                None if norm in (None, IdentityOp) else RMSNorm
                for norm in (attention.q_layernorm, attention.k_layernorm)
            )
        if olmo:
            adapt(layer)
    return spec


@dataclass(frozen=True, eq=False)
class Part:
    """One parameter of this rank and the Hugging Face tensors it is cut from."""

    name: str
    parameter: Tensor
    sources: list[str]


def parts(bridge: Any, chunks: list[Any]) -> list[Part]:
    """All parameters of this rank, named by their place in the whole model."""
    out = []
    for chunk in chunks:
        whole = bridge._weight_name_mapping_mcore_local_to_global(chunk)
        for name, parameter in chunk.named_parameters():
            out.append(Part(whole[name], parameter, bridge._weight_name_mapping_mcore_to_hf(whole[name])))
    return out


def expected(bridge: Any, own: list[Part]) -> dict[str, tuple[int, ...]]:
    """Shapes of the whole model's tensors by Hugging Face name. Layers are alike, so one rank's layer tells all."""
    wide = (bridge.vocab_size, bridge.hf_config.hidden_size)
    out: dict[str, tuple[int, ...]] = {
        hf: wide[1:] if "norm" in name else wide for name, hf in bridge._DIRECT_MAPPING.items()
    }
    for part in own:
        for source, shape in zip(part.sources, _source_shapes(bridge, part), strict=True):
            head, found, rest = source.partition("model.layers.")
            if found and not head:
                tail = rest.split(".", 1)[1]
                out.update({f"model.layers.{i}.{tail}": shape for i in range(bridge.hf_config.num_hidden_layers)})
    return out


@torch.no_grad()
def fill(bridge: Any, own: list[Part], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Copies this rank's cut of whole tensors, given in any order, into its parameters; one parameter's sources are held at a time."""
    waiting: dict[str, list[Part]] = {}
    for part in own:
        for source in part.sources:
            waiting.setdefault(source, []).append(part)
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        for part in waiting.pop(name, []):
            group = held.setdefault(part.name, {})
            group[name] = tensor
            if len(group) == len(part.sources):
                _copy(bridge, part, [held[part.name][source] for source in part.sources])
                del held[part.name]
    if waiting:
        raise DataError(missing_text("weights", sorted(waiting)))


def missing_text(place: str, names: list[str]) -> str:
    """The sentence for tensors that a checkpoint lacks."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{place}: no tensor {shown}; wanted all tensors of the model its config.json describes. Export or download it again."


def shape_text(place: str, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """The sentence for a tensor of another size."""
    return f"{place}: {name} is {found}; wanted {wanted} by config.json. The weights belong to another configuration."


def _copy(bridge: Any, part: Part, sources: list[Tensor]) -> None:
    wanted = _source_shapes(bridge, part)
    for name, tensor, shape in zip(part.sources, sources, wanted, strict=True):
        if tuple(tensor.shape) != shape:
            raise DataError(shape_text("weights", name, tuple(tensor.shape), shape))
    whole = bridge._weight_to_mcore_format(part.name, sources)
    pieces = bridge._weight_split_across_tp(part.name, whole, part.parameter, bridge.mpu.tp_size)
    piece = pieces[bridge.mpu.tp_rank]
    part.parameter.copy_(piece)


def _source_shapes(bridge: Any, part: Part) -> list[tuple[int, ...]]:
    c, config, name = bridge.hf_config, bridge.config, part.sources[0]
    tail = tuple(part.parameter.shape[1:])
    if len(part.sources) == 3:
        rows = (config.num_attention_heads, config.num_query_groups, config.num_query_groups)
        return [(n * config.kv_channels, *tail) for n in rows]
    if len(part.sources) == 2:
        return [(c.intermediate_size, *tail)] * 2
    if name in bridge._DIRECT_MAPPING.values() and part.parameter.dim() == 2:
        return [(bridge.vocab_size, *tail)]
    whole = list(part.parameter.shape)
    dim = _cut_dim(part.parameter)
    if dim is not None:
        whole[dim] *= bridge.mpu.tp_size
    return [tuple(whole)]


def _cut_dim(parameter: Tensor) -> int | None:
    return getattr(parameter, "partition_dim", None) if getattr(parameter, "tensor_model_parallel", False) else None


@torch.no_grad()
def gather(bridge: Any, own: list[Part]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors in Hugging Face names on every rank of a replica, one parameter at a time. Collective over the replica."""
    states, device = bridge.mpu, own[0].parameter.device
    mine = [(p.name, tuple(p.parameter.shape), p.parameter.dtype, _cut_dim(p.parameter)) for p in own]
    plans: list[Any] = [None] * states.pp_size
    dist.all_gather_object(plans, mine, group=states.pp_group)
    tied = bridge.hf_config.tie_word_embeddings
    for stage, plan in enumerate(plans):
        source = dist.get_global_rank(states.pp_group, stage)
        for place, (name, shape, dtype, dim) in enumerate(plan):
            if tied and name == "output_layer.weight":  # the embedding's copy on the last stage
                continue
            here = stage == states.pp_rank
            piece = own[place].parameter.detach() if here else torch.empty(shape, dtype=dtype, device=device)
            if states.pp_size > 1:
                dist.broadcast(piece.contiguous() if here else piece, source, group=states.pp_group)
            pieces = [piece]
            if dim is not None and states.tp_size > 1:
                pieces = [torch.empty_like(piece) for _ in range(states.tp_size)]
                dist.all_gather(pieces, piece.contiguous(), group=states.tp_group)
            yield from _to_hf(bridge, name, pieces, dim)


def _to_hf(bridge: Any, name: str, pieces: list[Tensor], dim: int | None) -> Iterator[tuple[str, Tensor]]:
    whole = pieces[0]
    if len(pieces) > 1:
        stub = torch.empty(0)  # mbridge reads the cut off a parameter
        stub.tensor_model_parallel, stub.partition_dim = True, dim  # type: ignore[attr-defined]
        whole = bridge._weight_merge_across_tp(name, pieces, stub)
    # Copies: the parameters change with the next step, and slices of one tensor cannot be written as files.
    for hf_name, tensor in zip(*bridge._weight_to_hf_format(name, whole), strict=True):
        yield hf_name, tensor.clone(memory_format=torch.contiguous_format)


def check_architecture(config: Any, supported: tuple[str, ...]) -> list[str]:
    """Sentences why a transformers configuration has no counterpart here."""
    kind = getattr(config, "model_type", "unknown")
    if kind not in supported:
        return [
            f"model type '{kind}' is not supported; wanted one of {', '.join(supported)}. Use learner.hf, or another model"
        ]
    problems = []
    for key, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        found = getattr(config, key, wanted)
        if found not in (wanted, None):
            problems.append(f"{key} is {found!r}; wanted {wanted!r} for {kind}. Use learner.hf")
    ropes = {parameters.get("rope_type", "default") for parameters in rope_parameters(config).values()}
    unknown = sorted(ropes - {"default", "linear", "llama3", "yarn"})
    return problems + [
        f"rope_type '{rope}' is not supported; wanted default, linear, llama3 or yarn. Use learner.hf"
        for rope in unknown
    ]


def unsupported(path: str, problems: list[str]) -> ConfigError:
    """One error for all problems of a model."""
    return ConfigError(f"learner.megatron, model '{path}': " + "; ".join(problems) + ".")
