"""A rank's share of the optimizer's state as boxes of the parameters, which any other layout can read.

The distributed optimizer gives each data-parallel rank a flat range of every parameter's main weight and moments. In a
checkpoint that any layout reads, megatron-core first gathers these ranges on one rank, for all its parameters at every
save. A flat range of a row-major tensor is a few boxes of it, though, and torch's distributed checkpoints hold any
boxes: so here every rank writes its own range and reads the range that it needs.
"""

import math
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

Box = tuple[int, tuple[int, ...], tuple[int, ...]]


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Boxes that hold the elements `start` … `stop` − 1 of a row-major tensor, at most 2 · dimensions − 1 of them.

    Args:
        shape: sizes of the tensor.
        start: number of the first element.
        stop: number after the last element.

    Yields:
        For each box the number of its first element, its corner and its sizes; elements within it are consecutive.
    """
    if not shape and start < stop:
        yield start, (), ()
    row = math.prod(shape[1:])
    while shape and start < stop:
        place, inside = divmod(start, row)
        if not inside and stop - start >= row:
            count = (stop - start) // row
            yield start, (place, *[0] * (len(shape) - 1)), (count, *shape[1:])
            start += count * row
        else:
            end = min(stop, (place + 1) * row)
            for first, corner, size in boxes(shape[1:], inside, end - place * row):
                yield place * row + first, (place, *corner), (1, *size)
            start = end


def write_own_ranges(part: Any) -> None:
    """Has a part of the optimizer save and load its own ranges; other optimizers have whole tensors and stay."""
    if isinstance(part, DistributedOptimizer):
        part.sharded_param_state_fully_reshardable = types.MethodType(_own_ranges, part)
        part.load_parameter_state_from_fully_reshardable = types.MethodType(_load_own_ranges, part)


def _own_ranges(part: Any, model: Any, is_loading: bool = False, metadata: Any = None) -> dict[int, Any]:
    """Replaces a method that gathers: parameter → state → its boxes on this rank."""
    described = {base.data: base for base in nested_values(extract_sharded_tensors_and_factories(model)[0])}
    state: dict[int, Any] = {}
    for place, (parameter, start) in enumerate(_ranges(part)):
        state[place] = {
            name: _boxed(described[parameter], f"optimizer.state.{name}", flat, start, is_loading)
            for name, flat in part._get_main_param_and_optimizer_states(parameter).items()
            if name != "step"
        }
    return state


@torch.no_grad()
def _load_own_ranges(part: Any, state: dict[int, Any]) -> None:
    """Replaces a method that cuts this rank's ranges out of whole tensors."""
    for place, (parameter, _) in enumerate(_ranges(part)):
        for name, flat in part._get_main_param_and_optimizer_states(parameter).items():
            if name != "step":  # one for all parameters
                flat.copy_(torch.cat([box.flatten() for box in state[place][name]]))


def _ranges(part: Any) -> Iterator[tuple[Tensor, int]]:
    """Parameters of which this rank holds elements, and the number of the first one."""
    for dtypes in part.gbuf_ranges:
        for buckets in dtypes.values():
            for bucket in buckets:
                yield from ((parameter, own["param"].start) for parameter, own in bucket["param_map"].items())


def _boxed(whole: Any, prefix: str, flat: Tensor, start: int, is_loading: bool) -> list[ShardedTensor]:
    """The elements from `start` on of a parameter that is described by `whole`, as boxes in ascending order."""
    place = torch.empty(whole.data.shape, dtype=whole.data.dtype, device="meta")
    whole = replace(whole, data=place)
    # A factory makes several tensors of a parameter, such as gate and up, as views of it.
    tensors = list(nested_values(whole.build())) if isinstance(whole, ShardedTensorFactory) else [whole]
    found: list[ShardedTensor] = []
    for tensor in sorted(tensors, key=lambda x: x.data.storage_offset()):
        offset = tensor.data.storage_offset()
        if not tensor.data.is_contiguous() or (tensor.data is not place and tensor.data._base is not place):
            raise NotImplementedError(f"{tensor.key}: expected rows of its parameter, got other elements of it.")
        outer = len(tensor.global_shape) - tensor.data.dim()  # such as the number of an expert
        ends = max(start - offset, 0), min(start + len(flat) - offset, tensor.data.numel())
        for first, corner, size in boxes(tensor.data.shape, *ends):
            values = flat[offset + first - start :][: math.prod(size)].view(*[1] * outer, *size)
            found.append(
                ShardedTensor(
                    f"{prefix}.{tensor.key}",
                    None if is_loading else values,
                    values.dtype,
                    tuple(values.shape),
                    tensor.global_shape,
                    (
                        *tensor.global_offset[:outer],
                        *(o + c for o, c in zip(tensor.global_offset[outer:], corner, strict=True)),
                    ),
                    axis_fragmentations=None,  # boxes of unlike sizes
                    replica_id=(*tensor.replica_id[:2], 0),  # no other data-parallel rank has these elements
                    allow_shape_mismatch=tensor.allow_shape_mismatch,
                )
            )
    return found
