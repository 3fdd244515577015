"""vLLM's offline engine in this process."""

import contextlib
import gc
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from creditgraph.components.engine.channel import FileChannel
from creditgraph.components.engine.messages import RowRequest, RowResponse, ScoreRequest, ScoreResponse, check_score
from creditgraph.components.engine.probe import Probe, ProbeError, compare_logprobs
from creditgraph.components.engine.rows import Rows
from creditgraph.components.engine.served.dialect import ServedModel
from creditgraph.components.engine.served.process import make_scratch
from creditgraph.components.engine.vllm.columns import split_scores
from creditgraph.components.engine.vllm.options import engine_options, engine_variables
from creditgraph.components.engine.vllm.replies import flat_experts
from creditgraph.components.engine.vllm.route import cache_of
from creditgraph.components.engine.vllm.scheduler import scoring_parameters
from creditgraph.components.engine.vllm.settings import VllmSettings
from creditgraph.components.engine.weight_files import checksum_of
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.payloads import Weights

_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class InProcess:
    """vLLM in this process (a `Backend`), on the model's own weights at first.

    Args:
        context: context of the engine's node.
        settings: settings of the engine.
        model: the model to load.
    """

    def __init__(self, context: Context, settings: VllmSettings, model: ServedModel) -> None:
        self._context = context
        self._eos = list(model.eos)
        self._returns_experts = settings.return_routed_experts
        # Adapters build on weights that stay on the CPU.
        self._level = 1 if settings.lora.max_rank else 2
        self._asleep: set[str] = set()
        self._own = True  # whether it holds the model's own weights
        self._keeps = settings.keep_cache
        self._label = "own"  # of the weights it holds
        self._labels = {0: self._label}  # by version
        self._counters: dict[str, float] = {}
        self._request_ids = itertools.count()
        self._adapter_ids = itertools.count(1)
        self._adapter: Any = None
        self.channel: FileChannel | None = None
        if settings.lora.max_rank:
            self.channel = FileChannel(settings.channel, settings.channel.sent_dtype(context.model))
        variables = {
            **_VARIABLES,
            **engine_variables(settings, model),
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        }
        if precision := variables.get("TRITON_F32_DEFAULT"):
            # Kernels are compiled at their first use, so after the start too.
            os.environ["TRITON_F32_DEFAULT"] = precision
        with _environment(variables):
            from vllm import LLM

            self._scratch = make_scratch()
            with _temporary_files(self._scratch), _one_kernel_thread():
                options = engine_options(settings, model)
                self.llm: Any = LLM(**options, disable_log_stats=True)
        self.core = self.llm.llm_engine
        self.llm.collective_rpc("creditgraph_install", args=(list(model.forbidden),))
        if model.sleeps:
            self._sleep()
            context.slots.add_engine(self._sleep)

    def restore(self) -> bool:
        """The model's own weights stay loaded below adapters."""
        if self._own:
            self._adapter = None
            self._wake("weights")
            self._wake("kv_cache")
        return self._own

    def load(self, weights: Weights, probe: Probe | None) -> None:
        """Loads weights in place and verifies them."""
        place = f"engine '{self._context.node}': update to weights version {weights.version}"
        self._wake("weights")
        self._own = weights.adapter is not None
        try:
            with _one_kernel_thread():
                checksum, state = self._load_adapter(weights) if weights.adapter is not None else self._load(weights)
        except (RuntimeError, ValueError, AssertionError, KeyError) as error:
            raise RunError(
                f"{place}: vLLM could not load them ({error}). Start the run again; it continues from its checkpoint."
            ) from error
        self._wake("kv_cache")
        self._labels[weights.version] = self._label = f"{weights.version}-{checksum}"
        if not self._keeps and not self.llm.reset_prefix_cache():
            raise RunError(
                f"{place}: expected an empty prefix cache, but requests are running. Wait for generation to end."
            )
        if (state["version"], state["checksum"]) != (weights.version, checksum):
            raise RunError(
                f"{place}: expected version {weights.version} with checksum {checksum}, the engine reports version "
                f"{state['version']} with {state['checksum']}. The tensors were changed on the way to it. "
                "Start the run again; it continues from its checkpoint."
            )
        if probe is None:
            return
        (response,) = self._score([probe.request])
        try:
            difference = compare_logprobs(response.logprobs, probe.expected(), probe.tolerance)
        except ProbeError as error:
            raise RunError(
                f"{place}: {error} Start the run again; it continues from its checkpoint. If that repeats, vLLM cannot "
                "take new weights of this model: use engine=local."
            ) from error
        self._context.log(update_difference=difference)

    def _load(self, weights: Weights) -> tuple[str, dict[str, Any]]:
        """Loads whole weights; the checksum of what was sent, and the state of the worker after it."""
        self._adapter = None
        tensors = dict(weights.pairs())
        (state,) = self.llm.collective_rpc(
            "creditgraph_update", kwargs={"version": weights.version, "tensors": tensors}
        )
        return checksum_of(tensors), state

    def _load_adapter(self, weights: Weights) -> tuple[str, dict[str, Any]]:
        """Replaces the adapter by a new one, whose new id distinguishes them in the prefix cache."""
        from vllm.lora.request import LoRARequest

        assert self.channel is not None, "made where adapters are taken"
        update = self.channel.publish(weights)
        self.llm.collective_rpc("creditgraph_restore")
        if self._adapter is not None:
            self.core.remove_lora(self._adapter.lora_int_id)
        self._adapter = LoRARequest(update.adapter, next(self._adapter_ids), update.path)
        self.core.add_lora(self._adapter)
        (state,) = self.llm.collective_rpc("creditgraph_adapter", args=(weights.version,))
        self.channel.retire(weights.version)
        return update.checksum.result(), state

    def sample(self, rows: Rows) -> None:
        """Sends one request per row.

        If text may end a row, its tokens are checked while they are sampled, and the request ends with the row. So
        thoughts need no separate requests, and vLLM need not decode.
        """
        waiting: dict[str, int] = {}
        with self._running(waiting) as steps:
            for request in rows.start():
                waiting[self._add(request.tokens, **self._sampling(request))] = request.row
            for step in steps:
                ended = []
                for out in step:
                    # A request that was ended may be in one more step.
                    if out.request_id in waiting and rows.feed(waiting[out.request_id], response_of(out), out.finished):
                        row = waiting.pop(out.request_id)
                        self._count_prompt(out)
                        if not out.finished:
                            ended.append(out.request_id)
                            if self._returns_experts:
                                rows.feed(row, self._experts(out.request_id), last=True)
                if ended:
                    self.core.abort_request(ended)

    def _experts(self, name: str) -> RowResponse:
        """Those of a request that its text ends; vLLM itself reports them only of requests that it ends."""
        processor = self.core.output_processor
        (own,) = processor.external_req_ids[name]
        chunks = np.concatenate(processor.request_states[own].routed_experts_chunks)
        return RowResponse(tokens=[], logprobs=[], entropies=None, reason="stop", routed_experts=flat_experts(chunks))

    def converse(self, rows: int, follow: Any, feed: Any, reset: Any) -> bool:
        """Not here: one engine samples all rows together."""
        return False

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResponse]:
        """Prompt log-probs and entropies."""
        responses = self._score(requests)
        return [check_score(request, response) for request, response in zip(requests, responses, strict=True)]

    def _score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResponse]:
        waiting: dict[str, int] = {}
        responses: dict[int, ScoreResponse] = {}
        with self._running(waiting) as steps:
            for n, request in enumerate(requests):
                tokens = request.context + request.tokens
                parameters = scoring_parameters(len(request.context), request.temperature, request.top)
                waiting[self._add(tokens, **parameters)] = n
            for out in itertools.chain.from_iterable(steps):
                n = waiting.pop(out.request_id)
                self._count_prompt(out)
                logprobs, entropies, tokens, top = split_scores(out.prompt_logprobs)
                responses[n] = ScoreResponse(
                    logprobs=logprobs, entropies=entropies, top_tokens=tokens, top_logprobs=top
                )
        return [responses[n] for n in range(len(requests))]

    def _sampling(self, request: RowRequest) -> dict[str, Any]:
        return {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "seed": request.seed if request.temperature else None,
            "stop_token_ids": [] if request.ignore_eos else self._eos,
            "ignore_eos": True,
            "logprobs": 1,
            "stream": request.stream,
            "cache": request.cache,
        }

    def _add(self, tokens: list[int], stream: bool = False, cache: int | None = None, **sampling: Any) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name = str(next(self._request_ids))
        params = SamplingParams(
            **sampling,
            detokenize=False,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        label = self._label if cache is None else self._labels.get(cache, self._label)
        prompt = {"prompt_token_ids": tokens, **cache_of(label if self._keeps else None)}
        self.core.add_request(name, prompt, params, lora_request=self._adapter)
        return name

    @contextmanager
    def _running(self, waiting: dict[str, int]) -> Iterator[Iterator[list[Any]]]:
        """Yields the outputs of each step while requests are `waiting`; after an error the others are aborted."""
        try:
            with _one_kernel_thread():
                yield self._steps(waiting)
        finally:
            if waiting:
                self.core.abort_request(list(waiting))
                waiting.clear()

    def _steps(self, waiting: dict[str, int]) -> Iterator[list[Any]]:
        while waiting:
            yield self.core.step()

    def _sleep(self) -> None:
        """Gives the memory back until the next weights come."""
        if not self._asleep:
            (before,) = self.llm.collective_rpc("creditgraph_free_bytes")
            self.llm.sleep(level=self._level)
            (after,) = self.llm.collective_rpc("creditgraph_free_bytes")
            if after <= before:
                raise RunError(
                    f"engine '{self._context.node}': expected vLLM to give GPU memory back when it sleeps, got {after} "
                    f"free bytes after it and {before} before. Set {self._context.node}.sleep=never and lower "
                    f"{self._context.node}.gpu_memory."
                )
            self._asleep = {"weights", "kv_cache"}
            self._own = self._own and self._level == 1

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self.llm.wake_up(tags=[tag])
            self._asleep.discard(tag)

    def _count_prompt(self, out: Any) -> None:
        cached = out.num_cached_tokens or 0
        for name, amount in (("prefill_tokens", len(out.prompt_token_ids) - cached), ("cached_tokens", cached)):
            self._counters[name] = self._counters.get(name, 0.0) + amount

    def take_counters(self) -> dict[str, float]:
        """Prompt tokens since the last call."""
        counters = self._counters
        self._counters = {}
        return counters

    def close(self) -> None:
        """Drops vLLM with its process group."""
        from vllm.distributed import cleanup_dist_env_and_memory

        if self.channel is not None:
            self.channel.close()
        # The engine core may have failed already; its memory and process group must be released in any case.
        with contextlib.suppress(Exception):
            self.core.engine_core.shutdown()
        self.core = None
        self.llm = None
        cleanup_dist_env_and_memory()
        shutil.rmtree(self._scratch, ignore_errors=True)
        gc.collect()


def response_of(out: Any) -> RowResponse:
    """vLLM's output of one request, or of one step of it.

    `creditgraph.components.engine.vllm.exact` gives two numbers per token: log-prob and minus the entropy.
    """
    (done,) = out.outputs
    numbers = done.logprobs.logprobs
    return RowResponse(
        tokens=list(done.token_ids),
        logprobs=numbers[::2],
        entropies=[-x for x in numbers[1::2]],
        reason=done.finish_reason or "stop",
        routed_experts=None if done.routed_experts is None else flat_experts(done.routed_experts),
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
def _temporary_files(folder: Path) -> Iterator[None]:
    """Has `tempfile` make files in `folder`; vLLM leaves one there."""
    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextmanager
def _one_kernel_thread() -> Iterator[None]:
    """One OpenMP thread for this thread of the process; vLLM replaces torch's setter, which is put back."""
    setter = torch.set_num_threads
    before = torch.get_num_threads()
    setter(1)
    try:
        yield
    finally:
        torch.set_num_threads = setter
        setter(before)
