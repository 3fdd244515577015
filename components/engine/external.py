"""Base of the engines vLLM and SGLang, which load the model themselves, in servers or in this process."""

import dataclasses
import math
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from creditgraph.components.engine.base import Engine, EnginePolicy, Outputs, Serving
from creditgraph.components.engine.messages import RowRequest, RowResponse, ScoreRequest, ScoreResponse, group_of
from creditgraph.components.engine.probe import Probe, probe_of, probe_request, reference_logprobs, skeleton
from creditgraph.components.engine.rows import Rows
from creditgraph.components.engine.served.addresses import free_port
from creditgraph.components.engine.served.dialect import Dialect, ServedModel
from creditgraph.components.engine.served.parts import Part
from creditgraph.components.engine.served.process import ServerProcess
from creditgraph.components.engine.served.servers import Servers
from creditgraph.components.engine.served.settings import ServerSettings
from creditgraph.components.engine.served.tasks import Feed, Reset
from creditgraph.components.engine.vocabulary import eos_mask, generation_config, padding_columns
from creditgraph.components.engine.weights import WeightNames, merged
from creditgraph.components.models.load import (
    check_context,
    check_weight_files,
    load_config,
    load_tokenizer,
    resolve_model_path,
)
from creditgraph.components.text.stops import TokenText
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError, RunError
from creditgraph.pipeline.core.handles import Answer, Completions, Requests, Scores
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Weights

EXTERNAL_METRICS = (
    Metric(
        "update_difference",
        "nats",
        "largest difference of a fixed sequence's log-probs from those of the learner, in updates that are checked",
    ),
    Metric("servers_ready", "servers", "servers that hold the current weights and respond"),
    Metric("servers_lost", "servers", "servers that stopped responding"),
    Metric("requests", "requests", "requests sent to servers, repeated ones included"),
    Metric("retries", "requests", "requests sent once more, after a failure or an invalid response"),
    Metric("aborted", "requests", "responses a server broke off, whose rows were requested again"),
    Metric("seconds_update", "s", "wall time until every server held the new weights, or was given up"),
)


class Backend(Protocol):
    """The model of an external engine, in servers or in this process."""

    def load(self, weights: Weights, probe: Probe | None) -> None:
        """Loads weights that were checked (tensors, each once; or an adapter) and verifies them; raises RunError."""

    def restore(self) -> bool:
        """Switches back to the model's own weights if that needs no loading; returns whether it did."""

    def sample(self, rows: Rows) -> None:
        """Starts `rows` and feeds responses to them until all have ended."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResponse]:
        """Responses in the order of `requests`, checked; each request has context and tokens."""

    def converse(self, rows: int, follow: Callable[[int], RowRequest | None], feed: Feed, reset: Reset) -> bool:
        """As `Pool.converse`, each row by itself; False, and nothing done, where rows are sampled together."""

    def take_counters(self) -> dict[str, float]:
        """Amounts to count since the last call."""

    def close(self) -> None:
        """Ends it."""


class ExternalEngine(Engine):
    """An engine whose model runs in a `Backend`; this process has its tokenizer, sizes and names of weights.

    Attributes:
        text: byte strings of the tokens.
        model: the transformers model without its parameters, for names, shapes and the probe.
        names: checks of the weights a learner publishes.
        temperatures: lowest and highest supported temperature, in addition to 0.
        adapter_rank: largest supported rank of LoRA adapters; 0 merges all adapters.
        part: of a server over several nodes, which this process starts; None for whole ones.
        backend: runs the model.
    """

    config: ServerSettings
    text: TokenText
    model: Any
    names: WeightNames
    temperatures: tuple[float, float] = (0.0, math.inf)
    adapter_rank: int = 0
    part: Part | None = None
    backend: Backend | None = None
    _updates: int = 0

    def setup(self, context: Context) -> None:
        """Loads the tokenizer and the shape of the model, then starts the backend on the model's own weights."""
        model = self._served_model(context)
        if self.config.served:
            self.backend = Servers(context, self.dialect(model), self.config, self.part.nodes if self.part else 1)
        else:
            self.backend = self.in_process(model)

    def join(self, context: Context, log: Path) -> ServerProcess:
        """Starts this process's `part` of a server that another node answers for; its output is appended to `log`."""
        launch = self.dialect(self._served_model(context)).launch(free_port(), "part")
        return ServerProcess(launch, log, key=secrets.token_hex(32))

    def _served_model(self, context: Context) -> ServedModel:
        super().setup(context)
        if self.config.sleep == "always" and not context.device.startswith("cuda"):
            raise ConfigError(
                f"{context.node}.sleep: expected GPUs, whose memory a server can give back, got device "
                f"'{context.device}'. Set {context.node}.sleep=auto."
            )
        self.tokenizer = load_tokenizer(self.spec)
        config = load_config(self.spec)
        self.context_length = check_context(self.spec, config)
        if self.config.return_routed_experts and not getattr(config, "num_experts", 0):
            raise ConfigError(
                f"{context.node}.return_routed_experts: expected a model with experts, got '{self.spec.path}' of type "
                f"{config.model_type}. Set {context.node}.return_routed_experts=false."
            )
        self.model = skeleton(self.spec, config)
        self.names = WeightNames(self.model)
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)
        self.text = TokenText(self.tokenizer, self.vocab_size)
        self.eos = eos_mask(generation_config(self.spec), self.tokenizer, self.vocab_size)
        padding = padding_columns(self.tokenizer, self.vocab_size, "cpu")
        return ServedModel(
            path=check_weight_files(self.spec),
            dtype=self.spec.dtype,
            context_length=self.context_length,
            vocab_size=self.vocab_size,
            forbidden=[] if padding is None else padding.nonzero()[:, 0].tolist(),
            eos=self.eos.nonzero()[:, 0].tolist(),
            device=torch.device(context.device).type,
            sleeps=context.slots.shared and self.shares_devices(self.config, context.device, context.ranks.world),
            trust_remote_code=self.spec.trust_remote_code,
        )

    @classmethod
    def shares_devices(cls, config: Any, device: str, world: int) -> bool:
        """Servers that this run starts, where the GPUs of the host do not suffice for them and the learner."""
        if config.sleep == "never" or config.elsewhere or not device.startswith("cuda"):
            return False
        needed: int = config.servers * config.tensor_parallel
        several = world > 1 or not config.served or torch.cuda.device_count() <= needed
        return config.sleep == "always" or several

    @classmethod
    def serving(cls, config: Any) -> Serving:
        """Weights and cache take a share of each GPU, or the cache the size that is set."""
        cache = getattr(config, "kv_cache_gb", 0.0) * 1e9
        return Serving(
            tensor=config.tensor_parallel,
            rows=config.max_rows,
            share=0.0 if cache else getattr(config, "gpu_memory", 0.5),
            cache_bytes=cache,
            sleeps=config.sleep != "never",
            elsewhere=config.elsewhere,
        )

    @classmethod
    def files(cls, config: Any, world: int) -> int:
        """A connection per request that its servers work on at a time, and one for checks."""
        connections: int = (config.servers or len(config.addresses)) * (config.pool.max_in_flight + 1)
        return connections

    @abstractmethod
    def dialect(self, model: ServedModel) -> Dialect:
        """How to start servers and communicate with them."""

    def in_process(self, model: ServedModel) -> Backend:
        """The model in this process, for engines that support it."""
        raise ConfigError(
            f"engine '{self.context.node}': expected servers, addresses or rendezvous, got none of them. "
            f"Set {self.context.node}.servers=1."
        )

    def run(self, *, weights: Weights | None = None) -> Outputs:
        """Loads `weights` and returns their policy; none, or those without tensors and path, are the model's own."""
        start = time.perf_counter()
        weights = weights or Weights(version=0)
        own = resolve_model_path(self.spec.path)
        if weights.initial:
            weights = dataclasses.replace(weights, path=own)
        if weights.path != own or not self.active.restore():
            published, probe = self._check(weights)
            self.version = -1  # no handle is valid until the new weights are verified
            self.active.load(published, probe)
        self.version = weights.version
        self.count(seconds_load=time.perf_counter() - start, **self.active.take_counters())
        return Outputs(policy=ExternalPolicy(self, weights.version))

    @property
    def active(self) -> Backend:
        """The backend of an engine that was set up and not closed."""
        if self.backend is None:
            raise CreditgraphError(f"engine '{self.context.node}': expected an engine that is running; it was closed.")
        return self.backend

    def _check(self, weights: Weights) -> tuple[Weights, Probe | None]:
        """Checks weights for the backend, and makes the probe that shows whether it uses them; raises DataError."""
        spec = self.spec
        if self.adapter_rank == 0:
            weights = merged(weights, spec)
        if weights.adapter is not None and weights.adapter.rank > self.adapter_rank:
            raise RunError(
                f"engine '{self.context.node}': expected adapters of rank {self.adapter_rank} at most, for which it "
                f"was started, got rank {weights.adapter.rank} in weights version {weights.version}. "
                f"Set {self.context.node}.lora.rank={weights.adapter.rank}, or learner.lora.publish=merged."
            )
        if weights.adapter is not None:
            return weights, self._probe(weights)
        if weights.stream is not None:
            return dataclasses.replace(weights, stream=partial(self.names.checked, weights)), self._probe(weights)
        weights = dataclasses.replace(weights, tensors=self.names.resolve(weights), path=None)
        probe = self._probe(weights)
        return dataclasses.replace(weights, tensors=self.names.distinct(weights.tensors or {})), probe

    def _probe(self, weights: Weights) -> Probe | None:
        """The probe of an update that is to be checked; forwards of transformers only for weights of no learner."""
        self._updates += 1
        if not self.config.check_every or (self._updates - 1) % self.config.check_every:
            return None
        spec = self.spec
        dtype: torch.dtype = getattr(torch, spec.dtype)
        sent = self.config.channel.sent_dtype(spec) if self.config.served else dtype
        tolerance = self.config.tolerance_of(dtype, sent)
        if weights.scored is not None:
            return probe_of(weights.scored, tolerance)
        if weights.adapter is not None:
            rounded = {name: t.to(sent) for name, t in (weights.tensors or {}).items()}
            weights = merged(dataclasses.replace(weights, tensors=rounded), spec)
            sent = dtype
        request = probe_request(self.vocab_size, self.context_length)
        tensors = self.names.resolve(weights)

        def expected() -> list[float]:
            return reference_logprobs(self.model, self.names.of_model(tensors), request, dtype, sent)

        return Probe(request=request, expected=expected, tolerance=tolerance)

    def close(self) -> None:
        """Ends the backend."""
        if self.backend is not None:
            self.backend.close()
            self.backend = None


class ExternalPolicy(EnginePolicy):
    """Handle on an external engine with the weights of one version."""

    engine: ExternalEngine

    def __init__(self, engine: ExternalEngine, version: int) -> None:
        super().__init__(engine, version)
        self._prompts: dict[int, set[int]] = {}  # length → groups of the prompts that were sampled from

    def generate(self, requests: Requests) -> Completions:
        """Samples one completion per row."""
        engine = self.engine
        self._check_current()
        rows = self._rows(requests)
        for prompt in requests.tokens.to_lists():
            self._prompts.setdefault(len(prompt), set()).add(group_of(prompt))
        with self._timed("seconds_generate"):
            engine.active.sample(rows)
            completions = rows.completions()
        self._check_current()
        engine.count(sampled_tokens=len(completions.tokens.values), **engine.active.take_counters())
        return completions

    def converse(self, rows: int, answer: Answer) -> None:
        """As `Policy.converse`; in servers each row goes on by itself, where its first prompt is cached."""
        engine = self.engine
        self._check_current()
        running: dict[int, Rows] = {}
        groups: dict[int, int] = {}
        sampled: list[int] = []

        def follow(row: int) -> RowRequest | None:
            done = running[row].completions() if row in running else None
            while True:
                sampled.append(0 if done is None else len(done.tokens.values))
                going, requests = answer([row], done)
                if not going:
                    return None
                running[row] = self._rows(requests)
                if started := running[row].start():
                    if row not in groups:
                        groups[row] = started[0].group
                        self._prompts.setdefault(len(started[0].tokens), set()).add(groups[row])
                    return dataclasses.replace(started[0], row=row, group=groups[row])
                done = running[row].completions()  # empty: there was no room

        def feed(row: int, part: RowResponse, last: bool) -> bool:
            return running[row].feed(0, part, last)

        with self._timed("seconds_generate"):
            alone = engine.active.converse(rows, follow, feed, lambda row: running[row].reset(0))
        if not alone:
            return super().converse(rows, answer)
        self._check_current()
        engine.count(sampled_tokens=sum(sampled), **engine.active.take_counters())
        return None

    def _rows(self, requests: Requests) -> Rows:
        self._check_tokens(requests.tokens, "request")
        self._check_temperature(requests.sampling.temperature)
        engine = self.engine
        experts = engine.config.return_routed_experts
        return Rows(requests, self._limits(requests), engine.text, self.tokenizer, engine.vocab_size, experts)

    def score(self, context: Jagged, tokens: Jagged, temperature: float = 1.0, top: int = 0) -> Scores:
        """Log-probs and entropies of `tokens` given `context`, both Jagged int32, teacher-forced."""
        return self._score(context, tokens, temperature, [self._group(row) for row in context.to_lists()], top)

    def score_branches(
        self, trunk: Jagged, row: Tensor, at: Tensor, tokens: Jagged, temperature: float = 1.0
    ) -> Scores:
        """As `Policy.score_branches`: each branch is a request of its own, behind the cached part of its trunk.

        The branches of a trunk go to one server, where it was sampled if that is known, the longest first: it brings
        into the cache what the others begin with.
        """
        groups = [self._group(tokens) for tokens in trunk.to_lists()]
        order = torch.tensor(sorted(range(len(row)), key=lambda b: (int(row[b]), -int(at[b]))), dtype=torch.int64)
        row, at = row[order], at[order]
        context = trunk.slice_rows(torch.zeros_like(at), at, row)
        scores = self._score(context, tokens.select(order), temperature, [groups[r] for r in row.tolist()])
        back = order.argsort()
        return Scores(logprobs=scores.logprobs.select(back), entropies=scores.entropies.select(back))

    def _group(self, tokens: list[int]) -> int:
        """The group of the prompt that a row begins with; of the whole row, if no such prompt was sampled from."""
        for length, groups in self._prompts.items():
            if length <= len(tokens) and (group := group_of(tokens[:length])) in groups:
                return group
        return group_of(tokens)

    def _score(
        self, context: Jagged, tokens: Jagged, temperature: float, groups: Sequence[int], top: int = 0
    ) -> Scores:
        engine = self.engine
        top = min(top, engine.vocab_size)
        self._check_current()
        self._check_scored(context, tokens)
        self._check_temperature(temperature)
        requests = [
            ScoreRequest(
                row=row,
                group=groups[row],
                context=before,
                tokens=after,
                temperature=temperature or 1.0,
                top=top,
                vocab_size=engine.vocab_size,
            )
            for row, (before, after) in enumerate(zip(context.to_lists(), tokens.to_lists(), strict=True))
            if after
        ]
        with self._timed("seconds_score"):
            responses = engine.active.score(requests)
        self._check_current()
        logprobs = torch.zeros(len(tokens.values))
        entropies = torch.zeros(len(tokens.values))
        best = torch.zeros(len(tokens.values), top, dtype=torch.int64)
        best_logprobs = torch.zeros(len(tokens.values), top)
        for request, response in zip(requests, responses, strict=True):
            row = slice(int(tokens.offsets[request.row]), int(tokens.offsets[request.row + 1]))
            logprobs[row] = torch.tensor(response.logprobs)
            entropies[row] = math.nan if response.entropies is None else torch.tensor(response.entropies)
            if top:
                best[row] = torch.tensor(response.top_tokens).view(-1, top)
                best_logprobs[row] = torch.tensor(response.top_logprobs).view(-1, top)
        scored = sum(len(request.context) + len(request.tokens) for request in requests)
        engine.count(scored_tokens=scored, **engine.active.take_counters())
        return Scores(
            logprobs=tokens.with_values(logprobs),
            entropies=tokens.with_values(entropies),
            top_tokens=best if top else None,
            top_logprobs=best_logprobs if top else None,
        )

    def _check_temperature(self, temperature: float) -> None:
        low, high = self.engine.temperatures
        if temperature > high or 0 < temperature < low:
            raise CreditgraphError(
                f"engine '{self.engine.context.node}': expected temperature 0 (greedy) or {low:g} to {high:g}, at "
                f"which this engine samples, got {temperature:g}. Change the temperature or use engine=local."
            )
