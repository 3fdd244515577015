"""Code that runs in vLLM's workers: new weights by vLLM's own weight transfer (`vllm.distributed.weight_transfer`).

A version is started, taken part by part and finished; vLLM calls this engine, by its name in the server's
`weight_transfer_config`, for each of these. vLLM's own engines need GPUs. Here parts are also tensors of this process,
files, shared memory and gloo's broadcasts, and a checksum of what has arrived is kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from creditgraph.components.engine.bucket import Form, cut, open_shared, size_of
from creditgraph.components.engine.group import Meeting, UpdateGroup
from creditgraph.components.engine.weight_files import Checksum, wait_for
from creditgraph.components.models.weights import read_file


@dataclass
class Joining(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the members of a group meet, as JSON, and the number that the first of these workers has in it."""

    meeting: dict[str, Any]
    first: int


@dataclass
class Part(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Tensors of a version, as JSON but for `tensors`.

    Attributes:
        version: its number.
        tensors: Hugging Face tensors of this process.
        files: safetensors files, each read as soon as it exists.
        wait_seconds: limit of waiting for all of them.
        forms: of the tensors of a bucket.
        shared: the memory that holds the bucket; None for one that comes over the group.
    """

    version: int
    tensors: Mapping[str, Tensor] | None = None
    files: Sequence[str] = ()
    wait_seconds: float = 0.0
    forms: Sequence[Form] = ()
    shared: dict[str, Any] | None = None


class Receiver(NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's engine, with other ways for tensors to come.

    Attributes:
        loaded: version and checksum of the weights held; −1 and "" before the first, and until all tensors are loaded.
        own: whether the model's own weights are loaded, on which adapters build.
    """

    init_info_cls: ClassVar[type] = Joining
    update_info_cls: ClassVar[type] = Part

    model: Any
    device: torch.device
    loaded: tuple[int, str] = (-1, "")
    own: bool = True
    _group: UpdateGroup | None = None
    _started: bool = False
    _version: int
    _checksum: Checksum
    _forms: dict[str, tuple[Any, ...]]

    def init_transfer_engine(self, init_info: Joining) -> None:
        """Joins the group of a transfer, and leaves the one before."""
        self.shutdown()
        number = init_info.first + self.parallel_config.rank
        self._group = UpdateGroup(Meeting(**init_info.meeting), number, self.device)

    def shutdown(self) -> None:
        """Leaves the group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def start_weight_update(self) -> None:
        """Prepares the model for new weights."""
        self.drop()
        self._started = True
        self.loaded = (-1, "")
        self.own = False
        self._version, self._checksum, self._forms = -1, Checksum(), {}
        super().start_weight_update()

    def drop(self) -> None:
        """Ends an update that was not finished: vLLM cannot start one on layers that are loaded in part."""
        if self._started:
            with torch.inference_mode():
                super().finish_weight_update()
            self._started = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads a part; ValueError for one that has other fields."""
        if self.device.type == "cpu":
            self.receive_weights(self.parse_update_info(update_info))  # vLLM waits for an accelerator
        else:
            super().update_weights(update_info)

    def receive_weights(self, update_info: Part) -> None:
        """Loads a part."""
        self._version = update_info.version
        with torch.inference_mode():
            self.load(self._noted(self._pairs(update_info)))

    def load(self, pairs: Iterator[tuple[str, Tensor]]) -> None:
        """Loads tensors layer by layer."""
        self.model.load_weights(pairs)

    def finish_weight_update(self) -> None:
        """Finishes the layers; the checksum is complete."""
        with torch.inference_mode():
            super().finish_weight_update()
            refresh_tied(self.model)
        self._started = False
        # Tensors that the engine holds under the same name and form are the better evidence; fused and packed ones are
        # not kept under their names.
        for name, parameter in self.model.named_parameters():
            if self._forms.get(name) == (parameter.shape, parameter.dtype):
                self._checksum.add(name, parameter.data)
        self.loaded = (self._version, self._checksum.result())

    def _pairs(self, part: Part) -> Iterator[tuple[str, Tensor]]:
        if part.tensors is not None:
            yield from part.tensors.items()
        elif part.files:
            deadline = time.monotonic() + part.wait_seconds
            for file in part.files:
                wait_for(file, deadline)
                yield from read_file(file)
        elif part.shared is not None:
            yield from cut(open_shared(part.shared, self.device), part.forms)
        elif self._group is not None:
            empty = torch.empty(size_of(part.forms), dtype=torch.uint8, device=self.device)
            yield from cut(self._group.broadcast(empty), part.forms)
        else:
            raise RuntimeError("creditgraph: expected a group to receive from, got a bucket before one was joined.")

    def _noted(self, pairs: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            self._forms[name] = (tensor.shape, tensor.dtype)
            self._checksum.add(name, tensor)
            yield name, tensor


def refresh_tied(model: Any) -> None:
    """Packs a tied output head again: on CPUs it has a packed copy of the embedding, which a reload does not update."""
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)


WeightTransferEngineFactory.register_engine("creditgraph", Receiver)
