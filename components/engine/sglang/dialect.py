"""Starts SGLang servers (0.5.23) and implements their HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from creditgraph.components.engine.bucket import Bucket
from creditgraph.components.engine.channel import Update
from creditgraph.components.engine.group import Meeting
from creditgraph.components.engine.messages import BadResponse, RowRequest, RowResponse, ScoreRequest, ScoreResponse
from creditgraph.components.engine.served.dialect import (
    InFlight,
    ServedModel,
    ServerError,
    Take,
    as_arguments,
    call,
    failures,
    parsing,
    read_stream,
    result_of,
)
from creditgraph.components.engine.served.parts import Part
from creditgraph.components.engine.served.process import KEY_VARIABLE, Launch
from creditgraph.components.engine.sglang import wire
from creditgraph.components.engine.sglang.checks import expected_hashes, first_difference
from creditgraph.components.engine.sglang.settings import SGLangSettings
from creditgraph.components.engine.weight_files import checksum_of
from creditgraph.components.models.weights import read_file

if TYPE_CHECKING:
    import httpx

# Without CUDA: SGLang's own CPU engine, no compilation, plain attention.
_CPU_VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "TORCHINDUCTOR_DISABLE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
_CPU_OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 65536,
}
START = Path(__file__).with_name("start.py")
# SGLang reserves two positions of the context; a row may fill all of ours.
_CONTEXT_MARGIN = 8
_POLL_SECONDS = 0.02


def engine_options(settings: SGLangSettings, model: ServedModel) -> dict[str, Any]:
    """SGLang's server arguments, in the format of its `Engine`."""
    cpu = model.device == "cpu"
    options: dict[str, Any] = {
        "model_path": model.path,
        "dtype": model.dtype,
        "context_length": model.context_length + _CONTEXT_MARGIN,
        "max_running_requests": settings.max_rows,
        "tp_size": settings.tensor_parallel,
        "grammar_backend": "none",
        "log_level": "warning",
        "enable_deterministic_inference": settings.deterministic,
        "enable_memory_saver": model.sleeps,
        "sleep_on_idle": True,
        # Each event of a stream holds new tokens only.
        "incremental_streaming_output": True,
        "trust_remote_code": model.trust_remote_code,
        "enable_return_routed_experts": settings.return_routed_experts,
    }
    return options | (_CPU_OPTIONS if cpu else {"mem_fraction_static": settings.gpu_memory})


def engine_variables(settings: SGLangSettings, model: ServedModel) -> dict[str, str | None]:
    """Environment of SGLang's processes."""
    variables: dict[str, str | None] = {
        # Health checks that generate a token would wait for all requests.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # A connection that the server closes just when it is reused would look like a fault.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",
        # No folder of the user may hide a module of SGLang's.
        "PYTHONSAFEPATH": "1",
        KEY_VARIABLE: "{key}",
        "TMPDIR": "{scratch}",  # SGLang leaves sockets there
    }
    if model.device == "cpu":
        variables |= {"OMP_NUM_THREADS": "1", **_CPU_VARIABLES}
    return variables | settings.process.environment


class SGLangDialect:
    """`Dialect` of SGLang.

    Log-probs are SGLang's own: at the sampling temperature, before truncation. Seeds count where servers run with
    --enable-deterministic-inference.

    Args:
        settings: settings of the engine.
        model: the served model.
        part: this node's part of a server over several nodes, None for a whole server.
    """

    def __init__(self, settings: SGLangSettings, model: ServedModel, part: Part | None = None) -> None:
        self._settings = settings
        self._model = model
        self._part = part
        # For entropies SGLang must send all log-probs of each token's vocabulary.
        self._entropies = model.vocab_size <= settings.entropy_vocab
        self._top = model.vocab_size if self._entropies else 0
        self._busy: set[str] = set()
        # Servers whose weights were compared since they were started, and what the others have been given.
        self._checked: weakref.WeakSet[httpx.AsyncClient] = weakref.WeakSet()
        self._hashes: weakref.WeakKeyDictionary[httpx.AsyncClient, dict[str, str]] = weakref.WeakKeyDictionary()

    @property
    def sockets(self) -> bool:
        """SGLang 0.5.23 listens on TCP only."""
        return False

    def launch(self, port: int, identity: str) -> Launch:
        """Command and environment of a server."""
        process = self._settings.process
        options = {
            "host": "{host}",
            "port": port,
            "served_model_name": identity,
            "skip_server_warmup": True,
            "log_level_http": "warning",
            **engine_options(self._settings, self._model),
        }
        environment = engine_variables(self._settings, self._model)
        if part := self._part:
            options |= {"nnodes": part.nodes, "node_rank": part.rank, "dist_init_addr": part.meeting}
            environment["SGLANG_HOST_IP"] = part.host
        command = [process.python or sys.executable, str(START), *as_arguments(options)]
        return Launch(command=[*command, *process.arguments], environment=environment)

    async def ready(self, client: httpx.AsyncClient, identity: str) -> bool:
        """Whether its HTTP and scheduler processes respond; a scheduler that loads weights counts as responding."""
        await call(client, "GET", "/health")
        url = str(client.base_url)
        if url in self._busy:
            return True
        # The served model name changes with weights from disk, the command line does not.
        command = str((await call(client, "GET", "/server_info")).get("launch_command"))
        if identity and identity not in command:
            raise ServerError(f"expected server '{identity}' at {url}, got one started as '{command[:200]}'.")
        return True

    async def generate(self, client: httpx.AsyncClient, request: RowRequest, request_id: str, take: Take) -> str | None:
        """One row, as one response or as server-sent events."""
        body = wire.generate_body(request, request_id, self._top, self._settings.return_routed_experts)
        async with self._ended(client, request_id):
            if request.stream:
                return await self._stream(client, body, request_id, take)
            reply = await call(client, "POST", "/generate", body)
            wire.check_request(reply, request_id)
            response, version = wire.read_generated(reply, self._entropies)
            take(response, True)
            return version

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any], request_id: str, take: Take) -> str | None:
        taken = 0

        def read(event: str) -> tuple[RowResponse, bool, str | None]:
            nonlocal taken
            part, last, version = wire.read_event(event, taken, self._entropies, request_id)
            taken += len(part.tokens)
            return part, last, version

        async def end() -> None:
            # A request that the server does not end runs to its own end and is read until then.
            with contextlib.suppress(*failures()):
                await self.abort(client, [request_id])

        streamed = wire.streamed(body, self._settings.stream_tokens)
        return await read_stream(client, "/generate", streamed, read, take, end)

    async def score(self, client: httpx.AsyncClient, request: ScoreRequest, request_id: str) -> ScoreResponse:
        """Teacher-forced log-probs."""
        async with self._ended(client, request_id):
            reply = await call(client, "POST", "/generate", wire.score_body(request, request_id, self._top))
        wire.check_request(reply, request_id)
        return wire.read_scores(reply, request, self._entropies)

    @asynccontextmanager
    async def _ended(self, client: httpx.AsyncClient, request_id: str) -> AsyncIterator[None]:
        """Ends a request by its id, because SGLang continues a request after its connection is closed."""
        try:
            yield
        except (asyncio.CancelledError, BadResponse):
            # A failure to abort must not hide the original error.
            with contextlib.suppress(Exception):
                await asyncio.shield(asyncio.wait_for(self.abort(client, [request_id]), 1.0))
            raise

    async def pause(self, client: httpx.AsyncClient, in_flight: InFlight) -> None:
        """Pauses sampling. SGLang's own pause polls requests once a second, so they are ended or awaited first."""
        while await self._requests(client):
            if in_flight == "abort":
                await call(client, "POST", "/abort_request", wire.abort_body(None))
            await asyncio.sleep(_POLL_SECONDS)
        await call(client, "POST", "/pause_generation", {"mode": "abort"})

    async def resume(self, client: httpx.AsyncClient) -> None:
        """Resumes sampling."""
        await call(client, "POST", "/continue_generation", {"torch_empty_cache": False})

    async def update(self, client: httpx.AsyncClient, update: Update) -> None:
        """Loads the weights from disk or from a transfer; either drops the prefix cache."""
        url = str(client.base_url)
        self._busy.add(url)
        try:
            if update.transfer is not None:
                receiver = _Receiver(client, self._settings.tensor_parallel)
                if client not in self._checked:
                    self._hashes[client] = receiver.hashes
                    receiver.hashed = self._expected
                await update.transfer.receive(receiver)
                return
            await result_of(update.checksum)
            await _succeed(client, "/update_weights_from_disk", wire.disk_body(update.path, update.label()))
        finally:
            self._busy.discard(url)

    async def sleep(self, client: httpx.AsyncClient) -> None:
        """/release_memory_occupation of weights, cache and CUDA graphs; the server drops its weights."""
        if not (await call(client, "GET", "/server_info")).get("enable_memory_saver"):
            raise ServerError(
                "expected a server that gives GPU memory back when it sleeps (--enable-memory-saver), got one without. "
                "Set engine.sleep=never and lower engine.gpu_memory, or give the servers GPUs of their own."
            )
        await call(client, "POST", "/pause_generation", {"mode": "abort"})
        await call(client, "POST", "/release_memory_occupation", {})

    async def wake(self, client: httpx.AsyncClient, weights: bool) -> None:
        """/resume_memory_occupation, by tag."""
        await call(client, "POST", "/resume_memory_occupation", wire.resume_body(weights))

    async def reported(self, client: httpx.AsyncClient, update: Update) -> tuple[str | None, str | None]:
        """Label; at the first update of a server also the checksum, if its hashes are those of what it was given."""
        info = await call(client, "GET", "/model_info")
        label = str(info.get("weight_version"))
        # The server hashes all its weights, which takes as long as reading them; label and probe show later mistakes.
        if client in self._checked or (not update.files and update.transfer is None):
            return label, None  # or another process published them and compares
        reply = await call(client, "POST", "/weights_checker", wire.checksum_body())
        with parsing("POST /weights_checker"):
            ranks = [dict(rank["checksums"]) for rank in reply["ranks"]]
        arrived = update.checksum.result()
        expected = self._hashes.pop(client, {})
        if update.transfer is None:
            arrived, expected = await asyncio.to_thread(self._read_files, update)
        if arrived != update.checksum.result():
            return label, f"{arrived} (in the files themselves)"
        difference = first_difference(expected, ranks)
        if not difference:
            self._checked.add(client)
        return label, None if difference is None else difference or arrived

    def _read_files(self, update: Update) -> tuple[str, dict[str, str]]:
        """Checksum of the files' tensors, and the hashes that a server reports that holds them."""
        tensors = {name: tensor for file in update.files for name, tensor in read_file(file)}
        return checksum_of(tensors), self._expected(tensors)

    def _expected(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        dtype: torch.dtype = getattr(torch, self._model.dtype)
        return expected_hashes(tensors, dtype, self._model.device != "cpu")

    async def progress(self, client: httpx.AsyncClient) -> float | None:
        """Decoding steps and prefilled tokens so far."""
        load = await self._load(client)
        moments = load.get("decode_moments") or [0.0]
        return float(moments[0]) + float(load.get("total_prefill_uncached_tokens") or 0.0)

    async def abort(self, client: httpx.AsyncClient, request_ids: Sequence[str]) -> None:
        """Ends these requests."""
        for request_id in request_ids:
            await call(client, "POST", "/abort_request", wire.abort_body(request_id))

    async def _requests(self, client: httpx.AsyncClient) -> int:
        """Number of requests that run or wait at the server."""
        load = await self._load(client)
        return int(load.get("num_running_reqs") or 0) + int(load.get("num_waiting_reqs") or 0)

    async def _load(self, client: httpx.AsyncClient) -> dict[str, Any]:
        loads = (await call(client, "GET", "/v1/loads")).get("loads")
        return dict(loads[0]) if loads else {}

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class _Receiver:
    """`creditgraph.components.engine.served.transfer.Receiver` of a server, by its endpoints."""

    client: httpx.AsyncClient
    ranks: int
    hashed: Callable[[Mapping[str, torch.Tensor]], dict[str, str]] | None = None
    hashes: dict[str, str] = field(default_factory=dict)
    _joined: ClassVar[weakref.WeakKeyDictionary[httpx.AsyncClient, str]] = weakref.WeakKeyDictionary()

    async def join(self, meeting: Meeting, first: int) -> None:
        if before := self._joined.pop(self.client, ""):
            with contextlib.suppress(ServerError):  # it may have lost the group already
                await call(self.client, "POST", "/destroy_weights_update_group", {"group_name": before})
        await _succeed(self.client, "/init_weights_update_group", wire.group_body(meeting, first))
        self._joined[self.client] = meeting.name

    async def begin(self) -> None:
        with contextlib.suppress(ServerError):  # a session that a failed transfer has left open
            await call(self.client, "POST", "/end_weight_update", {})
        await _succeed(self.client, "/begin_weight_update", {})

    async def take(self, bucket: Bucket, group: str) -> None:
        if self.hashed is not None:
            self.hashes |= await asyncio.to_thread(self.hashed, bucket.tensors)
        if group:
            await _succeed(self.client, "/update_weights_from_distributed", wire.broadcast_body(group, bucket))
            return
        body = await asyncio.to_thread(wire.tensor_body, bucket, self.ranks)
        await _succeed(self.client, "/update_weights_from_tensor", body)

    async def end(self) -> None:
        await _succeed(self.client, "/end_weight_update", {})


async def _succeed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    """Sends a request whose response must say "success"."""
    reply = await call(client, "POST", path, body)
    if not isinstance(reply, dict) or reply.get("success") is not True:
        raise ServerError(f"POST {path}: expected success, got {reply}.")
