"""Starts vLLM servers (0.32, 0.33) and implements their HTTP API.

Token ids go in and out by `route.py`, which also reports the weights version. Log-probs and
entropies are those of `exact.py`, which the worker extension puts in place. Weights come as
safetensors files that every worker reads, or in buckets, by vLLM's weight transfer (`receive.py`). The extension is
called through /collective_rpc, and that, the transfer and pausing need the server's development mode, whose paths
`key.py` closes to those without the server's key.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from creditgraph.components.engine.bucket import Bucket, share
from creditgraph.components.engine.channel import PREFIX, Update
from creditgraph.components.engine.group import Meeting
from creditgraph.components.engine.messages import (
    RowRequest,
    ScoreRequest,
    ScoreResponse,
)
from creditgraph.components.engine.served.dialect import (
    InFlight,
    RefusedError,
    ServedModel,
    ServerError,
    Take,
    as_arguments,
    call,
    check_status,
    failures,
    read_stream,
    result_of,
)
from creditgraph.components.engine.served.parts import Part
from creditgraph.components.engine.served.process import KEY_VARIABLE, SOCKET, Launch
from creditgraph.components.engine.vllm.columns import pack_ids
from creditgraph.components.engine.vllm.options import EXTENSION, TRANSFER, engine_options, engine_variables
from creditgraph.components.engine.vllm.replies import read_event, read_response, read_scores
from creditgraph.components.engine.vllm.route import ROWS
from creditgraph.components.engine.vllm.settings import VllmSettings
from creditgraph.pipeline import ROOT

if TYPE_CHECKING:
    import httpx

_TOKENS = re.compile(rb"^vllm:(?:generation|prompt)_tokens_total(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)
_AS_STARTED = (
    f"Expected a server with VLLM_SERVER_DEV_MODE=1, --worker-extension-cls {EXTENSION} and "
    f"--weight-transfer-config.backend {TRANSFER}, started as docs/engines.md says."
)
_TOGETHER_SECONDS = 0.005  # requests that end within this time are ended by one call
_IN_ENGINE_CORE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


@dataclass
class _Known:
    """The state that this process keeps for a server."""

    adapter: str = ""  # that requests ask for
    label: str = ""  # of its weights
    ending: list[str] = field(default_factory=list)  # requests to be ended together


class VllmDialect:
    """`Dialect` of vLLM.

    Args:
        settings: settings of the engine.
        model: the served model.
        part: this node's part of a server over several nodes, None for a whole server.
    """

    def __init__(self, settings: VllmSettings, model: ServedModel, part: Part | None = None) -> None:
        self._settings = settings
        self._model = model
        self._part = part
        self._eos = frozenset(model.eos)
        self._servers: dict[str, _Known] = {}
        self._labels: dict[int, str] = {}  # of the weights that this process has sent, by version
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def sockets(self) -> bool:
        """vLLM can."""
        return True

    def launch(self, port: int, identity: str) -> Launch:
        """The API server with worker extension and development mode."""
        options = engine_options(self._settings, self._model) | {"served_model_name": identity}
        options |= {"host": "{host}", "port": port} if port else {"uds": f"{{scratch}}/{SOCKET}"}
        options["disable_uvicorn_access_log"] = True
        environment: dict[str, str | None] = {
            "VLLM_SERVER_DEV_MODE": "1",
            **engine_variables(self._settings, self._model),
            # A connection that the server closes just when it is reused would look like a fault.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
            KEY_VARIABLE: "{key}",
            "VLLM_RPC_BASE_PATH": "{scratch}",
            "TMPDIR": "{scratch}",  # vLLM leaves files there
            # The extension is imported from here; no file of the folder where the run was started hides a library's.
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT.parent), os.environ.get("PYTHONPATH")))),
        }
        if self._settings.lora.max_rank:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self._model.device == "cpu":
            if self._settings.tensor_parallel == 1:
                # No separate process for the worker, because the engine would exchange every step with it by spinning.
                # vLLM starts one to set OpenMP's variables, which are set here instead.
                options["distributed_executor_backend"] = _IN_ENGINE_CORE
            # By themselves, servers would bind to the same core; more threads than free cores are several times slower.
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
            # Eager mode leaves out the model alone: a split vocabulary's lookup would still be compiled, for a minute.
            environment["TORCH_COMPILE_DISABLE"] = "1"
        if part := self._part:
            host, _, port_of_all = part.meeting.rpartition(":")
            options |= {"nnodes": part.nodes, "node_rank": part.rank, "master_addr": host, "master_port": port_of_all}
            options["distributed_executor_backend"] = "mp"
            if part.rank:
                options["headless"] = True
            environment["VLLM_HOST_IP"] = part.host
        command = [
            sys.executable,
            "-P",
            "-m",
            "creditgraph.components.engine.vllm.start",
            *as_arguments(options, negate=True),
        ]
        return Launch(command=[*command, *self._settings.arguments], environment=environment)

    async def ready(self, client: httpx.AsyncClient, identity: str) -> bool:
        """Checks /health and the served model name."""
        await call(client, "GET", "/health")
        if identity:
            names = await _model_names(client)
            if identity not in names:
                raise ServerError(f"expected server '{identity}' at this address, got '{', '.join(names)}'.")
        return True

    async def generate(self, client: httpx.AsyncClient, request: RowRequest, request_id: str, take: Take) -> str | None:
        """One row, as one response or as server-sent events."""
        body = self.generate_body(request, request_id) | self._adapter(client) | self._cache(client, request.cache)
        if request.stream:
            body["stream"] = True
            body["sampling"]["stream_interval"] = self._settings.stream_tokens

            async def end() -> None:
                self._end_soon(client, request_id)

            read = partial(read_event, request_id=request_id, eos=self._eos)
            return await read_stream(client, ROWS, body, read, take, end)
        response, label = read_response(await call(client, "POST", ROWS, body), request_id, self._eos)
        take(response, True)
        return label

    async def score(self, client: httpx.AsyncClient, request: ScoreRequest, request_id: str) -> ScoreResponse:
        """Log-probs of the wanted tokens only, behind a context that the prefix cache may hold."""
        body = {
            "id": request_id,
            "tokens": pack_ids(request.context + request.tokens),
            "context": len(request.context),
            "top": request.top,
            "sampling": {"temperature": request.temperature},
        }
        reply = await call(client, "POST", ROWS, body | self._adapter(client) | self._cache(client))
        return read_scores(reply, request_id, len(request.tokens))

    def generate_body(self, request: RowRequest, request_id: str) -> dict[str, Any]:
        """JSON of a generation request."""
        sampling: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "logprobs": 1,  # the entry beside the sampled token's, which holds the entropy
            "stop_token_ids": [] if request.ignore_eos else sorted(self._eos),
            "ignore_eos": request.ignore_eos,
        }
        if request.temperature > 0:
            sampling |= {"top_p": request.top_p, "top_k": request.top_k}
        return {"id": request_id, "tokens": pack_ids(request.tokens), "sampling": sampling}

    async def pause(self, client: httpx.AsyncClient, in_flight: InFlight) -> None:
        """Calls /pause, which also empties the prefix cache unless it is kept."""
        mode = "wait" if in_flight == "finish" else "abort"
        clear = "false" if self._settings.keep_cache else "true"
        await call(client, "POST", "/pause", query={"mode": mode, "clear_cache": clear})

    async def resume(self, client: httpx.AsyncClient) -> None:
        """/resume."""
        await call(client, "POST", "/resume")

    async def sleep(self, client: httpx.AsyncClient) -> None:
        """Level 2, which drops weights; level 1, which keeps them on the CPU, where adapters build on them."""
        before = await _free_bytes(client)
        level = "1" if self._settings.lora.max_rank else "2"
        await call(client, "POST", "/sleep", query={"level": level, "mode": "abort"})
        after = await _free_bytes(client)
        if any(now <= then for then, now in zip(before, after, strict=True)):
            raise ServerError(
                f"expected a server that gives GPU memory back when it sleeps (--enable-sleep-mode), got {min(after)} "
                f"free bytes after it and {min(before)} before. Set engine.sleep=never and lower engine.gpu_memory, or "
                "give the servers GPUs of their own."
            )

    async def wake(self, client: httpx.AsyncClient, weights: bool) -> None:
        """/wake_up, by tag."""
        await call(client, "POST", "/wake_up", query={"tags": "weights" if weights else "kv_cache"})

    async def update(self, client: httpx.AsyncClient, update: Update) -> None:
        """Has the workers read the files; vLLM's own version number follows only when they have."""
        if not await self._installed(client):
            await _workers(client, "creditgraph_install", forbidden=list(self._model.forbidden))
        if update.adapter:
            await self._load_adapter(client, update)
        elif update.transfer is not None:
            await update.transfer.receive(_Receiver(client, self._settings.tensor_parallel, update.version))
        else:
            await _workers(
                client,
                "creditgraph_update",
                version=update.version,
                files=update.files,
                wait_seconds=0.0 if update.written else self._settings.pool.update_seconds,
            )
        await result_of(update.checksum)
        await call(client, "POST", "/update_weight_version", {"new_version": update.label()})
        self._labels[update.version] = self._known(client).label = update.label()
        if self._settings.keep_cache:
            return
        reset = await call(client, "POST", "/reset_prefix_cache")
        if isinstance(reset, Mapping) and reset.get("success") is False:
            raise ServerError("expected its prefix cache to be empty after an update, but requests are running.")

    async def reported(self, client: httpx.AsyncClient, update: Update) -> tuple[str | None, str | None]:
        """vLLM's label and the workers' checksum, once these agree."""
        label = str((await call(client, "GET", "/weight_info"))["weight_version"])
        self._known(client).adapter = update.adapter
        states = await _workers(client, "creditgraph_state")
        held = {(int(state["version"]), str(state["checksum"])) for state in states}
        if len(held) != 1 or next(iter(held))[0] != update.version:
            raise ServerError(f"expected workers that hold weights version {update.version}, got {sorted(held)}.")
        return label, next(iter(held))[1]

    async def progress(self, client: httpx.AsyncClient) -> float | None:
        """Tokens that went through the model."""
        response = await client.get("/metrics")
        counts = [float(value) for value in _TOKENS.findall(response.content)]
        return sum(counts) if counts else None

    async def abort(self, client: httpx.AsyncClient, request_ids: Sequence[str]) -> None:
        """/abort_requests."""
        if request_ids:
            await call(client, "POST", "/abort_requests", {"request_ids": list(request_ids)})

    def close(self) -> None:
        """Nothing is held."""

    def _known(self, client: httpx.AsyncClient) -> _Known:
        return self._servers.setdefault(str(client.base_url), _Known())

    def _adapter(self, client: httpx.AsyncClient) -> dict[str, str]:
        name = self._known(client).adapter
        return {"adapter": name} if name else {}

    def _cache(self, client: httpx.AsyncClient, version: int | None = None) -> dict[str, str]:
        """Weights whose part of the cache a request has: these if they are known here, else those of the server."""
        if not self._settings.keep_cache:
            return {}
        own = self._known(client).label
        return {"cache": own if version is None else self._labels.get(version, own)}

    def _end_soon(self, client: httpx.AsyncClient, request_id: str) -> None:
        """Ends a request together with those that come to their end in the same moment."""
        ending = self._known(client).ending
        ending.append(request_id)
        if len(ending) == 1:
            task = asyncio.get_running_loop().create_task(self._end_all(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _end_all(self, client: httpx.AsyncClient) -> None:
        known = self._known(client)
        try:
            await asyncio.sleep(_TOGETHER_SECONDS)
        finally:
            ids = known.ending
            known.ending = []
        # A request that the server does not end runs to its own end and is read until then; a server that is gone
        # cuts it off.
        with contextlib.suppress(*failures()):
            await self.abort(client, ids)

    async def _load_adapter(self, client: httpx.AsyncClient, update: Update) -> None:
        """Replaces the registered adapters by this one; its new name distinguishes them in vLLM's prefix cache."""
        await _workers(client, "creditgraph_restore")
        for name in await _model_names(client):
            if name.startswith(PREFIX):
                await _post_text(client, "/v1/unload_lora_adapter", lora_name=name)
        await _post_text(client, "/v1/load_lora_adapter", lora_name=update.adapter, lora_path=update.path)
        await _workers(client, "creditgraph_adapter", version=update.version)

    async def _installed(self, client: httpx.AsyncClient) -> bool:
        try:
            states = await _workers(client, "creditgraph_state")
        except RefusedError as error:
            raise ServerError(f"{error} {_AS_STARTED}") from error
        if not all(state["receives"] for state in states):
            raise ServerError(f"its workers cannot take weights. {_AS_STARTED}")
        return all(state["installed"] for state in states)


@dataclass
class _Receiver:
    """`creditgraph.components.engine.served.transfer.Receiver` of a server, by vLLM's weight transfer."""

    client: httpx.AsyncClient
    ranks: int
    version: int

    async def join(self, meeting: Meeting, first: int) -> None:
        info = {"meeting": asdict(meeting), "first": first}
        await call(self.client, "POST", "/init_weight_transfer_engine", {"init_info": info})

    async def begin(self) -> None:
        await _workers(self.client, "creditgraph_begin")

    async def take(self, bucket: Bucket, group: str) -> None:
        shared = None if group else await asyncio.to_thread(share, bucket.flat)
        part = {"version": self.version, "forms": bucket.forms, "shared": shared}
        await call(self.client, "POST", "/update_weights", {"update_info": part})

    async def end(self) -> None:
        await call(self.client, "POST", "/finish_weight_update", {})


async def _workers(client: httpx.AsyncClient, method: str, **arguments: Any) -> list[Any]:
    """Results of a method of the worker extension, one per worker."""
    reply = await call(client, "POST", "/collective_rpc", {"method": method, "kwargs": arguments})
    results: list[Any] = reply.get("results", [])
    return results


async def _free_bytes(client: httpx.AsyncClient) -> list[int]:
    """Free memory of each worker's GPU; vLLM's reply has every result but a dict or list as a string."""
    return [int(free) for free in await _workers(client, "creditgraph_free_bytes")]


async def _model_names(client: httpx.AsyncClient) -> list[str]:
    return [str(entry["id"]) for entry in (await call(client, "GET", "/v1/models"))["data"]]


async def _post_text(client: httpx.AsyncClient, path: str, **body: str) -> None:
    """Sends a request whose response is plain text."""
    response = await client.post(path, json=body)
    if response.status_code == 404 and "lora" not in response.text.lower():
        raise ServerError(
            f"POST {path}: expected a server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora, "
            "got one without this endpoint."
        )
    check_status(f"POST {path}", response)
