"""Weights from GPU to GPU: NCCL broadcast to a vLLM server through vLLM's weight-transfer engine, in packed buckets.

Each server has a separate group (this process is rank 0, the server's workers follow), so a lost server blocks no
other one, and a server that comes back joins a new group. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from components.engine.served.addresses import free_port, own_address
from components.models.weights import read_file


class FileSource(WeightSource):  # type: ignore[misc]
    """The tensors of an update's files, moved to `device` one by one.

    Args:
        device: device of the tensors that are broadcast.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.files: Sequence[str] = ()

    def metadata(self) -> list[Any]:
        """Name, dtype and shape of every tensor."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._pairs()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._pairs():
            yield name, tensor.to(self._device, non_blocking=True)

    def _pairs(self) -> Iterator[tuple[str, Tensor]]:
        for file in self.files:
            yield from read_file(file)


class KeyedClient(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    """vLLM's client of a server's weight endpoints, which sends the server's key."""

    def __init__(self, url: str, key: str, seconds: float) -> None:
        super().__init__(url, timeout=seconds)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        response = httpx.post(
            f"{self.base_url}/{path}", json=json, headers=self._headers, timeout=self.timeout, trust_env=False
        )
        response.raise_for_status()


@dataclass
class _Link:
    source: FileSource
    engine: Any


class Broadcaster:
    """Sends updates to servers, each over its own NCCL group.

    Args:
        bucket_bytes: bytes per packed broadcast; two are in flight.
        seconds: until a server must respond to a request.
    """

    def __init__(self, bucket_bytes: int, seconds: float) -> None:
        self._bucket_bytes = bucket_bytes
        self._seconds = seconds
        self._links: dict[str, _Link] = {}

    def send(self, url: str, key: str, files: Sequence[str], workers: int) -> None:
        """Sends the tensors of `files` to the `workers` processes of the server at `url` with `key`; blocks."""
        link = self._links.get(url)
        if link is None:
            link = self._links[url] = self._open(url, key, files, workers)
        link.source.files = files
        try:
            link.engine.send_weights()
        except BaseException:
            self.drop(url)  # the group cannot be used again
            raise

    def drop(self, url: str) -> None:
        """Forgets a server's group."""
        self._links.pop(url, None)

    def _open(self, url: str, key: str, files: Sequence[str], workers: int) -> _Link:
        host, _, port = url.partition("://")[2].rpartition(":")
        source = FileSource(f"cuda:{torch.cuda.current_device()}")
        source.files = files
        info = NCCLTrainerInitInfo(
            rank=0,
            master_address=own_address(host, int(port)),
            master_port=free_port("0.0.0.0"),
            world_size=1 + workers,
            packed=True,
            packed_buffer_size_bytes=self._bucket_bytes,
        )
        client = KeyedClient(url, key, self._seconds)
        return _Link(source, NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=source))
