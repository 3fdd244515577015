"""Loads this rank's shards of Hugging Face tensors, and exports whole tensors from all ranks' shards.

A rank reads the tensors of its stage, one at a time, and keeps its shard; export gathers one parameter at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from creditgraph.components.learner.megatron.experts import local_expert, of_all_experts
from creditgraph.components.models.experts import unstack
from creditgraph.components.models.weights import Files, Shape, check_shapes
from creditgraph.pipeline.core.errors import DataError

TIED_HEAD = "lm_head.weight"


@dataclass(frozen=True, eq=False)
class Part:
    """One parameter of this rank, and the Hugging Face tensors of which it is a shard.

    Of an expert's weight, `place` is the expert's number on this rank, and `name` without it names all of the layer's.
    """

    name: str
    parameter: Tensor
    sources: list[str]
    place: int | None = None


def parts(bridge: Any, chunks: list[Any]) -> list[Part]:
    """All parameters of this rank but adapters, named by their place in the whole model."""
    out = []
    for chunk in chunks:
        whole = bridge._weight_name_mapping_mcore_local_to_global(chunk, consider_ep=False)
        for name, parameter in chunk.named_parameters():
            if ".adapters." in name:
                continue
            base, place = local_expert(whole[name]) or (whole[name], None)
            numbered = base if place is None else _numbered(bridge, base, place, bridge.mpu.ep_rank)
            out.append(Part(base, parameter, bridge._weight_name_mapping_mcore_to_hf(numbered), place))
    return out


def _numbered(bridge: Any, base: str, place: int, rank: int) -> str:
    """Name of an expert's weight in the whole model."""
    return f"{base}{rank * (bridge.config.num_moe_experts // bridge.mpu.ep_size) + place}"


# --- files ---


def read(own: list[Part], files: Files) -> Iterator[tuple[str, Tensor]]:
    """The tensors of which this rank needs a shard, file by file."""
    from safetensors import safe_open

    needed: dict[Path, set[str]] = {}
    for part in own:
        for source in part.sources:
            needed.setdefault(files[source][0], set()).add(source)
    for file, names in sorted(needed.items()):
        with safe_open(file, framework="pt") as opened:
            for name in sorted(names):
                yield name, opened.get_tensor(name)


def check_files(path: str, files: Files, expected: dict[str, Shape]) -> None:
    """Raises DataError unless a model folder holds the expected tensors and no others."""
    # Old checkpoints carry rotary buffers, and some a copy of a tied head.
    shapes = {
        name: shape
        for name, (_, shape) in files.items()
        if name in expected or not (name.endswith("rotary_emb.inv_freq") or name == TIED_HEAD)
    }
    hint = "config.json and weights must belong together: export or download them again."
    check_shapes(f"model folder {path}", shapes, expected, hint)


def whole_shapes(hf_config: Any) -> dict[str, Shape]:
    """Shapes of a model's tensors by name in files, from an empty transformers model; without a tied output head."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    shapes = {name: tuple(tensor.shape) for name, tensor in unstack(model.state_dict())}
    if hf_config.tie_word_embeddings:
        del shapes[TIED_HEAD]
    return shapes


# --- loading ---


@torch.no_grad()
def fill(bridge: Any, own: list[Part], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Copies this rank's shards of whole tensors, given in any order, into its parameters.

    Only the sources of parameters that are not complete yet are held.
    """
    waiting: dict[str, list[Part]] = {}
    for part in own:
        for source in part.sources:
            waiting.setdefault(source, []).append(part)
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        for part in waiting.pop(name, []):
            group = held.setdefault(part.sources[0], {})
            group[name] = tensor
            if len(group) == len(part.sources):
                _copy(bridge, part, [group[source] for source in part.sources])
                del held[part.sources[0]]
    if waiting:
        raise DataError(f"weights: expected all tensors of the model, got none named '{min(waiting)}'.")


def _copy(bridge: Any, part: Part, sources: list[Tensor]) -> None:
    whole = bridge._weight_to_mcore_format(part.name, sources)
    if part.place is not None:
        part.parameter.copy_(whole)
        return
    shards = bridge._weight_split_across_tp(part.name, whole, part.parameter, bridge.mpu.tp_size)
    part.parameter.copy_(shards[bridge.mpu.tp_rank])


def _sharded_dim(parameter: Tensor) -> int | None:
    return getattr(parameter, "partition_dim", None) if getattr(parameter, "tensor_model_parallel", False) else None


# --- export ---


@torch.no_grad()
def gather(bridge: Any, own: list[Part]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors in Hugging Face names on every rank of a replica, one parameter at a time.

    Collective: all ranks of the replica iterate, and of all replicas that share experts.
    """
    states = bridge.mpu
    device = own[0].parameter.device
    mine = [(p.name, tuple(p.parameter.shape), p.parameter.dtype, _sharded_dim(p.parameter), p.place) for p in own]
    plans: list[Any] = [None] * states.pp_size
    dist.all_gather_object(plans, mine, group=states.pp_group)
    for stage, plan in enumerate(plans):
        source = dist.get_global_rank(states.pp_group, stage)
        for number, (name, shape, dtype, dim, place) in enumerate(plan):
            if bridge.hf_config.tie_word_embeddings and name == "output_layer.weight":
                continue  # the embedding's copy on the last stage
            if stage == states.pp_rank:
                shard = own[number].parameter.detach().contiguous()
            else:
                shard = torch.empty(shape, dtype=dtype, device=device)
            if states.pp_size > 1:
                dist.broadcast(shard, source, group=states.pp_group)
            if place is not None:
                for rank, expert in enumerate(of_all_experts(shard)):
                    yield from _to_hf(bridge, _numbered(bridge, name, place, rank), [expert], None)
                continue
            shards = [shard]
            if dim is not None and states.tp_size > 1:
                shards = [torch.empty_like(shard) for _ in range(states.tp_size)]
                dist.all_gather(shards, shard, group=states.tp_group)
            yield from _to_hf(bridge, name, shards, dim)


def _to_hf(bridge: Any, name: str, shards: list[Tensor], dim: int | None) -> Iterator[tuple[str, Tensor]]:
    whole = shards[0]
    if len(shards) > 1:
        stub = torch.empty(0)  # mbridge reads the sharded dimension from attributes of a parameter
        stub.tensor_model_parallel = True  # type: ignore[attr-defined]
        stub.partition_dim = dim  # type: ignore[attr-defined]
        whole = bridge._weight_merge_across_tp(name, shards, stub)
    # Copies: the parameters change with the next step, and slices of one tensor cannot be written as files.
    for hf_name, tensor in zip(*bridge._weight_to_hf_format(name, whole), strict=True):
        yield hf_name, tensor.clone(memory_format=torch.contiguous_format)
