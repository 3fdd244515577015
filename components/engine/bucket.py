"""Buckets of whole tensors, in which weights travel from a learner to servers, and their memory for other processes."""

import base64
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.engine.weight_files import Checksum

Form = tuple[str, str, list[int]]
"""name, dtype without "torch." and shape of a tensor"""


@dataclass(frozen=True, eq=False, kw_only=True)
class Bucket:
    """Some tensors of one version of the weights.

    Attributes:
        tensors: name → tensor, by falling element size, so that each starts at a multiple of it in `flat`.
        label: with the last bucket, the version and the checksum of all tensors; else None.
    """

    tensors: Mapping[str, Tensor]
    label: str | None = None

    @cached_property
    def flat(self) -> Tensor:
        """uint8 [bytes]: all tensors, one after the other."""
        return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in self.tensors.values()])

    @property
    def forms(self) -> list[Form]:
        """The forms of the tensors in `flat`."""
        return [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in self.tensors.items()
        ]

    @property
    def views(self) -> list[tuple[str, Tensor]]:
        """Names, and tensors that are views of `flat`."""
        return cut(self.flat, self.forms)


def cut(flat: Tensor, forms: Iterable[Form]) -> list[tuple[str, Tensor]]:
    """The tensors of these forms, views of `flat`, uint8 [bytes]."""
    pairs = []
    start = 0
    for name, kind, shape in forms:
        dtype: torch.dtype = getattr(torch, kind)
        size = dtype.itemsize * torch.Size(shape).numel()
        pairs.append((name, flat[start : start + size].view(dtype).view(shape)))
        start += size
    return pairs


def size_of(forms: Iterable[Form]) -> int:
    """Bytes of tensors of these forms."""
    return sum(getattr(torch, kind).itemsize * torch.Size(shape).numel() for _, kind, shape in forms)


def in_buckets(
    pairs: Iterable[tuple[str, Tensor]], version: int, dtype: torch.dtype, limit: int, checksum: Checksum
) -> Iterator[Bucket]:
    """Cuts a stream of tensors into buckets; holds the tensors of one at a time.

    Args:
        pairs: names and tensors.
        version: number of the weights, for the label of the last bucket.
        dtype: dtype of floating-point tensors in transfer.
        limit: most bytes of a bucket; a tensor of more is alone.
        checksum: gets every tensor, as it is sent.
    """
    held: dict[str, Tensor] = {}
    size = 0
    for name, tensor in pairs:
        sent = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        if held and size + sent.nbytes > limit:
            yield Bucket(tensors=_in_order(held))
            held = {}
            size = 0
        checksum.add(name, sent)
        held[name] = sent
        size += sent.nbytes
    yield Bucket(tensors=_in_order(held), label=f"{version}-{checksum.result()}")


def _in_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


# The arguments of torch's `rebuild_cuda_tensor` that say where memory is; the others say what is in it.
_HANDLE = (
    "tensor_offset",
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)


def share(flat: Tensor) -> dict[str, Any]:
    """What another process of this host needs to open the memory of `flat` (uint8 [bytes]), as JSON.

    Memory of a GPU is shared by a CUDA IPC handle, and `flat` must live until the other process has closed it. Bytes on
    a CPU are sent as they are.
    """
    if flat.device.type == "cpu":
        return {"bytes": base64.b64encode(flat.numpy().tobytes()).decode()}
    from torch.multiprocessing import reductions

    reduce: Any = reductions.reduce_tensor
    rebuild, arguments = reduce(flat)
    torch.cuda.current_stream(flat.device).synchronize()  # the other process has streams of its own
    given = inspect.signature(rebuild).bind(*arguments).arguments
    handle = {
        name: {"bytes": base64.b64encode(given[name]).decode()} if isinstance(given[name], bytes) else given[name]
        for name in _HANDLE
    }
    return {"gpu": gpu_id(flat.device), "size": len(flat), "handle": handle}


def open_shared(shared: Mapping[str, Any], device: torch.device) -> Tensor:
    """A copy on `device` of what another process has shared.

    Raises:
        RuntimeError: the memory is on another GPU.
    """
    if "bytes" in shared:
        raw = bytearray(base64.b64decode(shared["bytes"]))
        return torch.frombuffer(raw, dtype=torch.uint8).to(device)
    if shared["gpu"] != gpu_id(device):
        raise RuntimeError(
            f"creditgraph: expected weights on GPU {gpu_id(device)}, which this server uses, got some on GPU "
            f"{shared['gpu']}. Start the server on the learner's GPU, or set engine.channel.kind=file."
        )
    from torch.multiprocessing import reductions

    handle = {
        name: base64.b64decode(value["bytes"]) if isinstance(value, dict) else value
        for name, value in shared["handle"].items()
    }
    rebuild: Any = reductions.rebuild_cuda_tensor
    memory: Tensor = rebuild(
        tensor_cls=torch.Tensor,
        tensor_size=torch.Size([shared["size"]]),
        tensor_stride=(1,),
        storage_cls=torch.storage.TypedStorage,
        dtype=torch.uint8,
        storage_device=torch.cuda.current_device() if device.index is None else device.index,
        requires_grad=False,
        **handle,
    )
    copy = memory.clone()
    torch.cuda.current_stream(device).synchronize()
    return copy


def gpu_id(device: torch.device) -> str:
    """The id that a GPU has in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)
