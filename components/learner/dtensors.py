"""Tensors of which every rank holds some rows (DTensors of FSDP2), and plain ones, in the same words."""

from torch import Tensor
from torch.distributed.tensor import DTensor


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
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def cut(whole: Tensor, like: Tensor) -> Tensor:
    """A copy of a tensor, on the device of `like` and sharded as that is; a number is not sharded."""
    if isinstance(like, DTensor) and whole.dim():
        return shard_of(whole[slice(*rows(like))].to(like.device, copy=True), like)
    return whole.to(like.device, copy=True)


def gather(tensor: Tensor) -> Tensor:
    """A tensor gathered from all ranks, which all call it; the tensor itself where it is not sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
