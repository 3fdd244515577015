"""Tensors of which every rank holds some rows (DTensors of FSDP2), and plain ones, in the same words.

torch's modules of them take a second to import, so what shards nothing leaves them alone.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def is_unit(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether `fully_shard` has made a module a unit, whose parameters are gathered together."""
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def rows(shard: DTensor) -> tuple[int, int]:
    """First row of this rank's shard in the whole tensor, and the row after its last.

    FSDP cuts as `torch.chunk` does: ranks have as many rows each, until none are left.
    """
    axis = shard.device_mesh.ndim - 1
    step = -(-shard.shape[0] // shard.device_mesh.size(axis))
    first = min(shard.device_mesh.get_local_rank(axis) * step, shard.shape[0])
    return first, min(first + step, shard.shape[0])


def shard_of(own: Tensor, like: DTensor) -> DTensor:
    """This rank's rows of a tensor as a tensor that is sharded as `like` is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def cut(whole: Tensor, like: Tensor) -> Tensor:
    """A copy of a tensor, on the device of `like` and sharded as that is; a number is not sharded."""
    if is_sharded(like) and whole.dim():
        return shard_of(whole[slice(*rows(like))].to(like.device, copy=True), like)
    return whole.to(like.device, copy=True)


def gather(tensor: Tensor) -> Tensor:
    """A tensor gathered from all ranks, which all call it; the tensor itself where it is not sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor
