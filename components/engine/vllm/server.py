"""vLLM's HTTP servers (0.32): how they are started and spoken to.

Token ids go in and out by /inference/v1/generate, which also tells which weights sampled them. Log-probs and entropies
are those of `components.engine.vllm.worker.ExactSampler`, which the worker extension puts in place. Weights come as
safetensors files that every worker reads; the extension is called through /collective_rpc, and both that and pausing
need the server's development mode, which is why servers listen on 127.0.0.1 unless `pool.host` says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import httpx

from components.engine.adapters import PREFIX
from components.engine.served.channel import ChannelSettings
from components.engine.served.dialect import (
    Answer,
    Ask,
    InFlight,
    Launch,
    RefusedError,
    ScoreAnswer,
    ScoreAsk,
    ServerError,
    Take,
    Update,
    call,
    check_status,
)
from pipeline import ROOT
from pipeline.core.errors import ConfigError

if TYPE_CHECKING:
    from components.engine.vllm.nccl import Broadcaster

EXTENSION = "components.engine.vllm.files.FileExtension"
_TOKENS = re.compile(rb"^vllm:(?:generation|prompt)_tokens_total(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)
_TOGETHER_SECONDS = 0.005
_GENERATE = "/inference/v1/generate"
Reason = Literal["stop", "length", "eos", "abort"]
_REASONS: dict[str, Reason] = {"length": "length", "abort": "abort"}


class VllmDialect:
    """Speaks to vLLM servers.

    Args:
        model: folder or hub name.
        dtype: of parameters and activations.
        length: most tokens of prompt plus response.
        device: "cpu" or "cuda".
        forbidden: ids that are never drawn.
        eos: ids that end a response.
        arguments: further command-line arguments of the server.
        threads: of CPU kernels.
        cache_gb: gigabytes of KV cache on a CPU.
        channel: how weights travel; "nccl" broadcasts them from this process's GPU.
        update_seconds: until a server must have answered a broadcast's requests.
        stream_tokens: tokens in each part of a streamed answer but the first.
        adapter_rank: largest rank of LoRA adapters; 0 starts servers without LoRA.
    """

    name = "vllm"
    streams = True

    def __init__(
        self,
        *,
        model: str,
        dtype: str,
        length: int,
        device: str,
        forbidden: Sequence[int],
        eos: Sequence[int],
        arguments: Sequence[str] = (),
        threads: int = 1,
        cache_gb: float = 1.0,
        channel: ChannelSettings | None = None,
        update_seconds: float = 300.0,
        stream_tokens: int = 8,
        adapter_rank: int = 0,
    ) -> None:
        self._model, self._dtype, self._length, self._device = model, dtype, length, device
        self._forbidden, self._eos, self._arguments = list(forbidden), frozenset(eos), list(arguments)
        self._threads, self._cache_gb = threads, cache_gb
        self._channel, self._update_seconds = channel or ChannelSettings(), update_seconds
        self._stream_tokens = stream_tokens
        self._broadcaster: Broadcaster | None = None
        self._adapter_rank = adapter_rank
        self._ending: dict[str, list[str]] = {}  # server → requests that shall end
        self._tasks: set[asyncio.Task[None]] = set()
        self._adapters: dict[str, str] = {}  # server → name of the adapter that requests ask for
        if self._channel.kind == "nccl" and device != "cuda":
            raise ConfigError(
                "engine.channel.kind: 'nccl' needs GPUs, and the model runs on a CPU; wanted kind=file there."
            )

    def launch(self, port: int, identity: str) -> Launch:
        """The API server with worker extension and development mode."""
        command = [
            sys.executable,
            "-P",  # a `components` folder of the user's, where the command was started, is not ours
            "-m",
            "components.engine.vllm.start",
            "--model",
            self._model,
            "--served-model-name",
            identity,
        ]
        command += [
            "--host",
            "{host}",
            "--port",
            str(port),
            "--dtype",
            self._dtype,
            "--max-model-len",
            str(self._length + 1),
        ]
        command += [
            "--enable-scale-out",
            "--worker-extension-cls",
            EXTENSION,
            "--generation-config",
            "vllm",
            "--seed",
            "0",
        ]
        command += ["--disable-uvicorn-access-log", "--enable-prefix-caching"]
        environment: dict[str, str | None] = {
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONSAFEPATH": "1",  # a user's own folder `components` must not hide ours
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # A connection that the server closes just when it is used again would look like a fault.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
            "VLLM_RPC_BASE_PATH": "{scratch}",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        if self._adapter_rank:
            command += [
                "--enable-lora",
                "--max-lora-rank",
                str(self._adapter_rank),
                "--max-loras",
                "1",
                "--max-cpu-loras",
                "1",
            ]
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self._channel.kind == "nccl":
            command += ["--weight-transfer-config", '{"backend": "nccl"}']
        if self._device == "cpu":
            # Blocks of other sizes have no kernel. Random streams of rows whose prompts are cut in two cannot be
            # rewound on a CPU. Servers would bind themselves to the same core.
            command += ["--block-size", "32", "--enforce-eager", "--no-enable-chunked-prefill"]
            environment |= {
                "VLLM_CPU_KVCACHE_SPACE": f"{max(1, round(self._cache_gb))}",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(self._threads),
            }
        return Launch(command=command + self._arguments, environment=environment)

    async def ready(self, client: httpx.AsyncClient, identity: str) -> bool:
        """/health, and the served model name."""
        await call(client, "GET", "/health")
        if identity:
            models = await call(client, "GET", "/v1/models")
            names = [entry["id"] for entry in models["data"]]
            if identity not in names:
                raise ServerError(f"another server ({', '.join(names)}) listens there; wanted {identity}.")
        return True

    async def generate(self, client: httpx.AsyncClient, ask: Ask, request_id: str) -> Answer:
        """One completion."""
        reply = await call(client, "POST", _GENERATE, self.generate_body(ask, request_id) | self._named(client))
        return self.read_answer(reply)

    async def stream(self, client: httpx.AsyncClient, ask: Ask, request_id: str, take: Take) -> int | None:
        """One completion as server-sent events. Only the last one tells the version, so a request that is ended early is read on."""
        body = self.generate_body(ask, request_id) | {"stream": True} | self._named(client)
        body["sampling_params"]["stream_interval"] = self._stream_tokens
        wanted = True
        async with client.stream("POST", _GENERATE, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                check_status(f"POST {_GENERATE}", response)
            version, ended = None, False
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                choice = _choice(line.removeprefix("data: "))
                ended = choice["finish_reason"] is not None
                if ended:
                    version = _version(choice)
                if wanted and take(self._answer_of(choice), ended):
                    wanted = False
                    if not ended:
                        self._end_soon(client, request_id)
        if not ended:
            raise ServerError(f"POST {_GENERATE}: an answer that was cut off.")
        return version

    async def score(self, client: httpx.AsyncClient, ask: ScoreAsk, request_id: str) -> ScoreAnswer:
        """Prompt log-probs; one token is sampled, because vLLM samples at least one."""
        reply = await call(client, "POST", _GENERATE, self.score_body(ask, request_id) | self._named(client))
        return self.read_scores(reply, ask)

    def generate_body(self, ask: Ask, request_id: str) -> dict[str, Any]:
        """JSON of a generation request."""
        sampling: dict[str, Any] = {
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "logprobs": 2,  # the sampled token's, and the entry that holds the entropy
            "stop_token_ids": sorted(self._eos),
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
            "detokenize": bool(ask.stop),
        }
        if ask.stop:
            sampling["stop"] = list(ask.stop)
        if ask.temperature > 0:
            sampling |= {"top_p": ask.top_p, "top_k": ask.top_k}
        return {"request_id": request_id, "token_ids": ask.tokens, "sampling_params": sampling}

    def score_body(self, ask: ScoreAsk, request_id: str) -> dict[str, Any]:
        """JSON of a scoring request."""
        sampling = {"max_tokens": 1, "temperature": ask.temperature, "prompt_logprobs": 1, "detokenize": False}
        return {"request_id": request_id, "token_ids": ask.context + ask.tokens, "sampling_params": sampling}

    def read_answer(self, reply: Any) -> Answer:
        """The answer in a reply to `generate_body`; raises ServerError for one of another form."""
        try:
            (choice,) = reply["choices"]
            return dataclasses.replace(self._answer_of(choice), version=_version(choice))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, ServerError):
                raise
            raise ServerError(f"an answer without the wanted fields ({type(error).__name__}: {error})") from error

    def _answer_of(self, choice: Mapping[str, Any]) -> Answer:
        tokens = [int(token) for token in choice["token_ids"]]
        entries = (choice["logprobs"] or {"content": []})["content"] or []
        logprobs = [float(entry["logprob"]) for entry in entries]
        entropies = [_entropy(entry) for entry in entries]
        ended: Reason = "eos" if tokens and tokens[-1] in self._eos else "stop"
        return Answer(
            tokens=tokens, logprobs=logprobs, entropies=entropies, reason=_REASONS.get(choice["finish_reason"], ended)
        )

    def read_scores(self, reply: Any, ask: ScoreAsk) -> ScoreAnswer:
        """The answer in a reply to `score_body`; raises ServerError for one of another form."""
        try:
            table = reply["prompt_logprobs"][len(ask.context) :]
            logprobs, entropies = [], []
            for token, entry in zip(ask.tokens, table, strict=True):
                logprobs.append(float(entry[str(token)]["logprob"]))
                (other,) = (value for key, value in entry.items() if key != str(token))
                entropies.append(-float(other["logprob"]))
            return ScoreAnswer(logprobs=logprobs, entropies=entropies, version=_version(reply["choices"][0]))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, ServerError):
                raise
            raise ServerError(f"scores without the wanted fields ({type(error).__name__}: {error})") from error

    async def pause(self, client: httpx.AsyncClient, in_flight: InFlight) -> None:
        """/pause, which also empties the prefix cache."""
        await call(
            client,
            "POST",
            "/pause",
            query={"mode": "wait" if in_flight == "finish" else "abort", "clear_cache": "true"},
        )

    async def resume(self, client: httpx.AsyncClient) -> None:
        """/resume."""
        await call(client, "POST", "/resume")

    async def update(self, client: httpx.AsyncClient, update: Update) -> None:
        """Has the workers read the files; vLLM's own version number follows only when they have."""
        if not await self._installed(client):
            await self._workers(client, "creditgraph_install", {"forbidden": self._forbidden})
        if update.adapter:
            await self._load_adapter(client, update)
        elif self._channel.kind == "nccl":
            await self._broadcast(client, update)
        else:
            await self._workers(client, "creditgraph_load_files", {"update": self._packed(update)})
        await call(client, "POST", "/update_weight_version", {"new_version": str(update.version)})
        reset = await call(client, "POST", "/reset_prefix_cache")
        if isinstance(reset, Mapping) and reset.get("success") is False:
            raise ServerError("its prefix cache could not be emptied; wanted no request running.")

    async def loaded(self, client: httpx.AsyncClient, update: Update) -> tuple[int | None, str | None]:
        """vLLM's version number and the workers' checksum, once both agree among themselves; after a broadcast there is
        no checksum."""
        told = str((await call(client, "GET", "/weight_info"))["weight_version"])
        self._adapters[str(client.base_url)] = update.adapter
        if self._channel.kind == "nccl":
            return _number(told), None
        states = await self._workers(client, "creditgraph_state", {})
        found = {(int(state["version"]), str(state["checksum"])) for state in states}
        if len(found) != 1 or next(iter(found))[0] != _number(told):
            raise ServerError(f"weights version '{told}', but its workers hold {sorted(found)}.")
        return next(iter(found))

    async def progress(self, client: httpx.AsyncClient) -> float | None:
        """Tokens that went through the model."""
        response = await client.get("/metrics")
        found = [float(value) for value in _TOKENS.findall(response.content)]
        return sum(found) if found else None

    async def abort(self, client: httpx.AsyncClient, request_ids: Sequence[str]) -> None:
        """/abort_requests."""
        if request_ids:
            # The server puts this before the names that it is given.
            await call(
                client, "POST", "/abort_requests", {"request_ids": [f"generate-tokens-{name}" for name in request_ids]}
            )

    def _end_soon(self, client: httpx.AsyncClient, request_id: str) -> None:
        """Ends a request together with those that come to their end in the same moment."""
        ending = self._ending.setdefault(str(client.base_url), [])
        ending.append(request_id)
        if len(ending) == 1:
            task = asyncio.get_running_loop().create_task(self._end_all(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _end_all(self, client: httpx.AsyncClient) -> None:
        try:
            await asyncio.sleep(_TOGETHER_SECONDS)
        finally:
            ids = self._ending.pop(str(client.base_url))
        # What the server does not hear goes on to its own end, and is read until then; a server that is gone cuts it
        # off.
        with contextlib.suppress(ServerError, httpx.HTTPError, OSError):
            await self.abort(client, ids)

    async def _load_adapter(self, client: httpx.AsyncClient, update: Update) -> None:
        """Registers the adapter under its own name, which vLLM's prefix cache knows it by, in place of those there."""
        await self._workers(client, "creditgraph_restore", {})
        for entry in (await call(client, "GET", "/v1/models"))["data"]:
            if entry["id"].startswith(PREFIX):
                await _post_text(client, "/v1/unload_lora_adapter", {"lora_name": entry["id"]})
        await _post_text(client, "/v1/load_lora_adapter", {"lora_name": update.adapter, "lora_path": update.path})
        await self._workers(client, "creditgraph_adapter", {"version": update.version})

    def _named(self, client: httpx.AsyncClient) -> dict[str, str]:
        name = self._adapters.get(str(client.base_url), "")
        return {"model": name} if name else {}

    async def _broadcast(self, client: httpx.AsyncClient, update: Update) -> None:
        from components.engine.vllm.nccl import Broadcaster

        if self._broadcaster is None:
            self._broadcaster = Broadcaster(self._channel.bucket_mb << 20, self._update_seconds)
        await update.complete()
        workers = int((await call(client, "GET", "/get_world_size"))["world_size"])
        await asyncio.to_thread(self._broadcaster.send, str(client.base_url).rstrip("/"), update.files, workers)

    async def _installed(self, client: httpx.AsyncClient) -> bool:
        try:
            return all(state["installed"] for state in await self._workers(client, "creditgraph_state", {}))
        except RefusedError as error:
            raise ServerError(
                f"{error} Wanted a server with VLLM_SERVER_DEV_MODE=1, --enable-scale-out and --worker-extension-cls "
                f"{EXTENSION}."
            ) from error

    def _packed(self, update: Update) -> str:
        seconds = 0.0 if update.written is None else self._update_seconds
        return json.dumps(
            {"version": update.version, "files": update.files, "sample": update.sample, "wait_seconds": seconds}
        )

    @staticmethod
    async def _workers(client: httpx.AsyncClient, method: str, arguments: Mapping[str, Any]) -> list[Any]:
        reply = await call(client, "POST", "/collective_rpc", {"method": method, "kwargs": dict(arguments)})
        results: list[Any] = reply.get("results", [])
        return results


async def _post_text(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> None:
    """A request whose answer is a sentence."""
    response = await client.post(path, json=dict(body))
    if response.status_code == 404 and "lora" not in response.text.lower():
        raise ServerError(
            f"POST {path}: no such endpoint; wanted a server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora."
        )
    check_status(f"POST {path}", response)


def _entropy(entry: Mapping[str, Any]) -> float:
    (other,) = (top for top in entry["top_logprobs"] if top["token_id"] != entry["token_id"])
    return -float(other["logprob"])


def _choice(text: str) -> dict[str, Any]:
    """The choice in an event of a streamed answer; raises ServerError for any other event."""
    try:
        (choice,) = json.loads(text)["choices"]
        return {"finish_reason": None, **choice}
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(f"an event that is no part of an answer: {text[:200]}") from error


def _version(choice: Mapping[str, Any]) -> int | None:
    """Of the weights behind an answer; None for one that ended before its first token."""
    spans = {str(span["version"]) for span in choice.get("weight_versions") or []}
    if not spans and choice["finish_reason"] == "abort":
        return None
    if len(spans) != 1:
        raise ServerError(f"an answer by weights versions {sorted(spans)}; wanted one.")
    return _number(spans.pop())


def _number(version: str) -> int:
    """−1 for a version that is not ours ("default" before the first update)."""
    return int(version) if version.isdigit() else -1
