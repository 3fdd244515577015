"""How an SGLang server (0.5.23) is started and spoken to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import torch

from components.engine.served.channel import read_file
from components.engine.served.dialect import (
    Answer,
    Ask,
    BadAnswer,
    InFlight,
    Launch,
    ScoreAnswer,
    ScoreAsk,
    ServerError,
    Take,
    Update,
    call,
    check_status,
)
from components.engine.served.server import free_port
from components.engine.sglang import wire
from components.engine.sglang.checks import held_checksum, names_to_skip
from components.engine.sglang.group import UpdateGroup, new_group_name, own_address

Transfer = Literal["disk", "tensor", "group"]

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
}
_CPU_CACHE_TOKENS = 65536
# SGLang keeps two places of the context for itself; a row may fill all of ours.
_CONTEXT_MARGIN = 8
_POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Settings of SGLang's processes."""

    python: str = ""
    """interpreter of the environment that has SGLang, which needs one of its own; "" is this one"""
    environment: dict[str, str] = field(default_factory=dict)
    """variables for server processes, added to this process's own"""
    arguments: tuple[str, ...] = ()
    """further arguments of sglang.launch_server; they come last, so they win"""
    cache_tokens: int = 0
    """tokens whose keys and values a server holds; 0: what fits its share of memory (65,536 on a CPU)"""
    threads: int = 1
    """threads on a CPU; more than free cores slow it down"""

    def __post_init__(self) -> None:
        for name, least in (("threads", 1), ("cache_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)}; wanted at least {least}.")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What a server serves.

    Attributes:
        path: folder or hub name.
        dtype: of the weights, as torch names it.
        context_length: most tokens in prompt plus response.
        vocab_size: number of logit columns.
        device: "cpu" or "cuda".
        max_rows: requests decoded at once.
        trust_remote_code: passed on.
        gpus: over which a server cuts the model.
    """

    path: str
    dtype: str
    context_length: int
    vocab_size: int
    device: str
    max_rows: int = 256
    trust_remote_code: bool = False
    gpus: int = 1


def engine_options(settings: ProcessSettings, model: ServedModel) -> dict[str, Any]:
    """SGLang's server arguments, as its `Engine` takes them."""
    cpu = model.device == "cpu"
    cache = settings.cache_tokens or (_CPU_CACHE_TOKENS if cpu else 0)
    options: dict[str, Any] = {
        "model_path": model.path,
        "dtype": model.dtype,
        "context_length": model.context_length + _CONTEXT_MARGIN,
        "max_running_requests": model.max_rows,
        "tp_size": model.gpus,
        "grammar_backend": "none",
        "log_level": "warning",
        "enable_deterministic_inference": True,
        "sleep_on_idle": True,
        # Streams that repeat nothing.
        "incremental_streaming_output": True,
    }
    options |= {"trust_remote_code": True} if model.trust_remote_code else {}
    options |= {"max_total_tokens": cache} if cache else {}
    return options | (_CPU_OPTIONS if cpu else {})


def engine_variables(settings: ProcessSettings, model: ServedModel) -> dict[str, str | None]:
    """Environment of SGLang's processes."""
    cpu = model.device == "cpu"
    return {
        # Health checks that generate a token would wait behind all requests.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # A connection that the server closes just when it is used again would look like a fault.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",
        "OMP_NUM_THREADS": str(settings.threads) if cpu else os.environ.get("OMP_NUM_THREADS"),
        **(_CPU_VARIABLES if cpu else {}),
    }


class SGLangDialect:
    """`Dialect` of SGLang.

    Log-probs are SGLang's own: at the sampling temperature, before truncation. Seeds count because servers run with
    --enable-deterministic-inference.

    Args:
        settings: of the processes.
        model: what they serve.
        transfer: how weights get into servers: "disk" has them read the channel's files, "tensor" puts the tensors into
            the request, "group" broadcasts them (gloo between CPUs, NCCL between GPUs).
        entropies: whether answers shall hold entropies, for which SGLang must send all log-probs of each token's
            vocabulary.
        seconds: until a group of a server and this process must have met, and for each broadcast.
        stream_tokens: tokens in each part of a streamed answer but the first.
    """

    name = "sglang"
    streams = True

    def __init__(
        self,
        settings: ProcessSettings,
        model: ServedModel,
        transfer: Transfer = "disk",
        entropies: bool = True,
        seconds: float = 60.0,
        stream_tokens: int = 8,
    ) -> None:
        self._settings, self._model, self._transfer, self._seconds = settings, model, transfer, seconds
        self._stream_tokens = stream_tokens
        self._top = model.vocab_size if entropies else 0
        self._groups: dict[str, UpdateGroup] = {}
        self._busy: set[str] = set()

    @property
    def entropies(self) -> bool:
        """Whether answers hold entropies."""
        return self._top > 0

    def launch(self, port: int, identity: str) -> Launch:
        """Command and environment of a server."""
        settings = self._settings
        command = [
            settings.python or sys.executable,
            "-m",
            "sglang.launch_server",
            "--host",
            "{host}",
            "--port",
            str(port),
        ]
        command += ["--served-model-name", identity, "--skip-server-warmup", "--log-level-http", "warning"]
        for name, value in engine_options(settings, self._model).items():
            command += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)]
        return Launch(
            command=[*command, *settings.arguments],
            environment=engine_variables(settings, self._model) | settings.environment,
        )

    async def ready(self, client: httpx.AsyncClient, identity: str) -> bool:
        """Whether its HTTP and scheduler processes answer. A scheduler that loads weights is busy, not gone."""
        await call(client, "GET", "/health")
        url = str(client.base_url)
        if url in self._busy:
            return True
        # The served model name changes with weights from disk, the command line does not.
        told = str((await call(client, "GET", "/server_info")).get("launch_command"))
        if identity and identity not in told:
            raise ServerError(
                f"another server holds {url}: it was started as '{told[:200]}'; wanted the one named '{identity}'."
            )
        return True

    async def generate(self, client: httpx.AsyncClient, ask: Ask, request_id: str) -> Answer:
        """One completion."""
        async with self._ended(client, request_id):
            body = await call(client, "POST", "/generate", wire.generate_body(ask, request_id, self._top))
        return wire.read_generated(body, self.entropies)

    async def stream(self, client: httpx.AsyncClient, ask: Ask, request_id: str, take: Take) -> int | None:
        """One completion as server-sent events; a request that is ended early is read on, so that its end is seen."""
        body = wire.stream_body(ask, request_id, self._top, self._stream_tokens)
        taken, wanted, last, version = 0, True, False, None
        async with self._ended(client, request_id), client.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                check_status("POST /generate", response)
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                part, last = wire.read_part(line.removeprefix("data: "), taken, self.entropies)
                taken, version = taken + len(part.tokens), part.version
                if wanted and take(part, last):
                    wanted = False
                    if not last:
                        # What the server does not hear goes on to its own end, and is read until then.
                        with contextlib.suppress(ServerError, httpx.HTTPError, OSError):
                            await self.abort(client, [request_id])
        if not last:
            raise ServerError("POST /generate: an answer that was cut off.")
        return version

    async def score(self, client: httpx.AsyncClient, ask: ScoreAsk, request_id: str) -> ScoreAnswer:
        """Teacher-forced log-probs."""
        async with self._ended(client, request_id):
            body = await call(client, "POST", "/generate", wire.score_body(ask, request_id, self._top))
        return wire.read_scores(body, ask, self.entropies)

    @asynccontextmanager
    async def _ended(self, client: httpx.AsyncClient, request_id: str) -> AsyncIterator[None]:
        """SGLang works on when a connection closes, so a request that is given up is ended by name."""
        try:
            yield
        except (asyncio.CancelledError, BadAnswer):
            with contextlib.suppress(Exception):
                await asyncio.shield(asyncio.wait_for(self.abort(client, [request_id]), 1.0))
            raise

    async def pause(self, client: httpx.AsyncClient, in_flight: InFlight) -> None:
        """Stops sampling. SGLang's own pause looks for running requests once a second, so they are ended or awaited first."""
        while await self._requests(client):
            if in_flight == "abort":
                await call(client, "POST", "/abort_request", wire.abort_body(None))
            await asyncio.sleep(_POLL_SECONDS)
        await call(client, "POST", "/pause_generation", wire.pause_body("abort"))

    async def resume(self, client: httpx.AsyncClient) -> None:
        """Samples again."""
        await call(client, "POST", "/continue_generation", wire.resume_body())

    async def update(self, client: httpx.AsyncClient, update: Update) -> None:
        """Loads the weights by the transfer of the settings; each of them drops the prefix cache."""
        await update.complete()
        url = str(client.base_url)
        self._busy.add(url)
        try:
            if self._transfer == "disk":
                await self._told(client, "/update_weights_from_disk", wire.disk_body(update.path, update.version))
                return
            if self._transfer == "group" and url not in self._groups:
                self._groups[url] = await self._join(client)
            await self._told(client, "/begin_weight_update", {})
            try:
                for n, file in enumerate(update.files, 1):
                    await self._send(client, file, update.version if n == len(update.files) else None)
            finally:
                await self._told(client, "/end_weight_update", {})
        except BaseException:
            group = self._groups.pop(url, None)
            if group is not None:
                group.close()
            raise
        finally:
            self._busy.discard(url)

    async def _send(self, client: httpx.AsyncClient, file: str, version: int | None) -> None:
        tensors = await asyncio.to_thread(lambda: dict(read_file(file)))
        if self._transfer == "tensor":
            body = await asyncio.to_thread(wire.tensor_body, tensors, version, self._model.gpus)
            await self._told(client, "/update_weights_from_tensor", body)
            return
        group = self._groups[str(client.base_url)]
        posted = asyncio.create_task(
            self._told(client, "/update_weights_from_distributed", wire.broadcast_body(group.name, tensors, version))
        )
        sent = asyncio.create_task(asyncio.to_thread(lambda: group.broadcast(wire.flat_bytes(tensors))))
        await _both(posted, sent)

    async def _join(self, client: httpx.AsyncClient) -> UpdateGroup:
        backend = "gloo" if self._model.device == "cpu" else "nccl"
        host, port = client.base_url.host, client.base_url.port or 80
        address = own_address(host, port)
        meeting, ranks, name = free_port(address), self._model.gpus, new_group_name()
        made = asyncio.create_task(
            asyncio.to_thread(UpdateGroup, name, address, meeting, backend, ranks, self._seconds)
        )
        joined = asyncio.create_task(
            self._told(client, "/init_weights_update_group", wire.group_body(name, address, meeting, backend, ranks))
        )
        return await _both(joined, made)  # type: ignore[no-any-return]

    async def _told(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        """A request that answers with "success"."""
        answer = await call(client, "POST", path, body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise ServerError(f"POST {path}: {answer}; wanted success.")

    async def loaded(self, client: httpx.AsyncClient, update: Update) -> tuple[int | None, str | None]:
        """Version, and the update's checksum if the server's own hashes are those of the update's files."""
        info = await call(client, "GET", "/model_info")
        version = wire.version_number(info.get("weight_version"))
        tensors = await asyncio.to_thread(lambda: {n: t for file in update.files for n, t in read_file(file)})
        body = wire.checksum_body(names_to_skip(list(tensors), update.sample))
        found = await call(client, "POST", "/weights_checker", body)
        try:
            ranks = [dict(rank["checksums"]) for rank in found["ranks"]]
        except (KeyError, TypeError) as error:
            raise ServerError(f"POST /weights_checker: no checksums in {str(found)[:200]}.") from error
        dtype = getattr(torch, self._model.dtype)
        return version, await asyncio.to_thread(
            held_checksum, update, tensors, ranks, dtype, self._model.device != "cpu"
        )

    async def progress(self, client: httpx.AsyncClient) -> float | None:
        """Decoding steps and prefilled tokens so far."""
        load = await self._load(client)
        moments = load.get("decode_moments") or [0.0]
        return float(moments[0]) + float(load.get("total_prefill_uncached_tokens") or 0.0)

    async def abort(self, client: httpx.AsyncClient, request_ids: Sequence[str]) -> None:
        """Ends these requests."""
        for request_id in request_ids:
            await call(client, "POST", "/abort_request", wire.abort_body(request_id))

    async def release_memory(self, client: httpx.AsyncClient, tags: Sequence[str] = ("kv_cache", "weights")) -> None:
        """Gives GPU memory back until `resume_memory` (servers started with --enable-memory-saver); weights have to be loaded again."""
        await call(client, "POST", "/release_memory_occupation", wire.memory_body(tags))

    async def resume_memory(self, client: httpx.AsyncClient, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Takes GPU memory again."""
        await call(client, "POST", "/resume_memory_occupation", wire.memory_body(tags))

    async def _requests(self, client: httpx.AsyncClient) -> int:
        """Requests that run or wait at the server."""
        load = await self._load(client)
        return int(load.get("num_running_reqs") or 0) + int(load.get("num_waiting_reqs") or 0)

    async def _load(self, client: httpx.AsyncClient) -> dict[str, Any]:
        loads = (await call(client, "GET", "/v1/loads")).get("loads")
        return dict(loads[0]) if loads else {}

    def close(self) -> None:
        """Leaves all groups."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()


async def _both(first: asyncio.Task[Any], second: asyncio.Task[Any]) -> Any:
    """Result of the second once both are done; the first failure is raised without waiting for the other."""
    try:
        done, _ = await asyncio.wait((first, second), return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return second.result()
    finally:
        first.cancel()
        second.cancel()
