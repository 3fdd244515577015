"""`engine.sglang`: sampling and scoring with SGLang, in server processes or in this one."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import itertools
import math
import os
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from components.engine.base import ENGINE_METRICS
from components.engine.served.dialect import ScoreAnswer, ScoreAsk
from components.engine.served.external import (
    EXTERNAL_METRICS,
    ExternalEngine,
    ExternalPolicy,
    check_score,
    reference_logprobs,
)
from components.engine.served.rows import Ask, Rows
from components.engine.served.served import PROBE_TOKENS, Servers, ServerSettings
from components.engine.sglang import wire
from components.engine.sglang.server import (
    ProcessSettings,
    ServedModel,
    SGLangDialect,
    Transfer,
    engine_options,
    engine_variables,
)
from components.models.load import resolve_model_path
from pipeline.core.component import Context
from pipeline.core.errors import ConfigError, RunError
from pipeline.core.payloads import Weights

INSTALL = (
    "SGLang pins another torch, so give it an environment of its own (python -m venv .venv-sglang; "
    ".venv-sglang/bin/pip install sglang) "
    "and set engine.process.python=.venv-sglang/bin/python, or use engine=vllm or engine=local."
)
# Largest log-prob difference of engine and reference at equal weights. bfloat16 keeps 8 bits, and the two round in
# another order.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}


class SGLangEngine(ExternalEngine):
    """Samples and scores with SGLang: a pool of servers, or its engine in this process.

    A group shares its prompt through the prefix cache. Log-probs are those at the sampling temperature and before
    truncation, as engine.local gives them. Entropies, and scores at other temperatures than 1, need the whole
    vocabulary's log-probs from SGLang, so there are none (NaN) for vocabularies above `entropy_vocab`. Seeds count,
    because SGLang runs in its deterministic mode. Its engine in this process has run on a CPU only, where SGLang needs
    stand-ins for CUDA packages.
    """

    metrics = (*ENGINE_METRICS, *EXTERNAL_METRICS)

    @dataclass(frozen=True, kw_only=True)
    class Config(ServerSettings):
        """Settings."""

        servers: int = 1
        """server processes to start on this host; 0 with neither addresses nor rendezvous runs SGLang in this
        process"""
        process: ProcessSettings = field(default_factory=ProcessSettings)
        """how SGLang is started"""
        max_rows: int = 256
        """rows decoded at once, per server; more wait for room"""
        transfer: Transfer = "disk"
        """disk: servers read the channel's files; tensor: in the request itself; group: broadcast (gloo, or NCCL
        between GPUs)"""
        entropy_vocab: int = 1024
        """largest vocabulary for which entropies are asked for"""
        stream_tokens: int = 8
        """tokens in each message of a server about a row whose text may end it; fewer cost more work, more are sampled
        in vain"""
        probe: bool = True
        """compares log-probs of a fixed sequence with a transformers forward of the same tensors after each update"""

        def __post_init__(self) -> None:
            super().__post_init__()
            for name, least in (("max_rows", 1), ("entropy_vocab", 0), ("stream_tokens", 1)):
                if getattr(self, name) < least:
                    raise ValueError(f"{name}: {getattr(self, name)}; wanted at least {least}.")

    config: Config
    # Below, SGLang is greedy.
    temperatures = (1e-5, math.inf)
    servers: Servers | None = None
    dialect: SGLangDialect | None = None
    core: Any = None

    def setup(self, context: Context) -> None:
        """Starts or finds the servers, or the engine in this process."""
        config = self.config
        self._check_installed()
        super().setup(context)
        self.entropies = self.vocab_size <= config.entropy_vocab
        served = ServedModel(
            path=resolve_model_path(context.model.path),
            dtype=context.model.dtype,
            context_length=self.context_length,
            vocab_size=self.vocab_size,
            device=torch.device(context.device).type,
            max_rows=config.max_rows,
            trust_remote_code=context.model.trust_remote_code,
            gpus=config.tensor_parallel,
        )
        tolerance = _TOLERANCE[context.model.dtype] if config.probe else 0.0
        if config.served:
            seconds, parts = config.pool.update_seconds, config.stream_tokens
            self.dialect = SGLangDialect(config.process, served, config.transfer, self.entropies, seconds, parts)
            self.servers = Servers(self, self.dialect, config, tolerance)
        else:
            os.environ.update(
                {name: value for name, value in engine_variables(config.process, served).items() if value is not None}
            )
            from sglang import Engine as Core

            self.core = Core(**engine_options(config.process, served))
            self.request_ids = itertools.count()

    def _check_installed(self) -> None:
        config = self.config
        if config.addresses or config.rendezvous:
            return
        python = config.process.python
        if not config.served and python:
            raise ConfigError(
                f"engine.sglang: servers is 0, so SGLang would run in this process, but process.python is '{python}'; "
                "wanted servers of at "
                "least 1 with another interpreter. Set engine.servers=1."
            )
        if python and not Path(python).is_file():
            raise ConfigError(
                f"engine.sglang: process.python '{python}' is no file; wanted an interpreter that has SGLang. {INSTALL}"
            )
        if not python and importlib.util.find_spec("sglang") is None:
            raise ConfigError(f"engine.sglang: the package sglang is not installed in this environment. {INSTALL}")

    def load(self, weights: Weights) -> ExternalPolicy:
        """Has SGLang hold the weights; the handle on them."""
        if self.servers is not None:
            return self.servers.load(weights)
        place = f"engine '{self.context.node}': update to weights version {weights.version}"
        tensors = self.names.resolve(weights)
        self.version = -1  # no handle is valid until the new weights are verified
        distinct = [(name, tensor) for name, tensor in tensors.items() if name not in self.names.tied]
        told = [self.core.begin_weight_update()]
        told.append(self.core.update_weights_from_tensor(distinct))
        told.append(self.core.end_weight_update())
        failed = next((message for success, message in told if not success), "")
        if failed:
            raise RunError(
                f"{place}: SGLang could not load them ({failed}). Start the run again; it goes on from its checkpoint."
            )
        policy = SGLangPolicy(self, weights.version)
        if self.config.probe:
            self._probe(place, policy, tensors)
        return policy

    def _probe(self, place: str, policy: SGLangPolicy, tensors: dict[str, torch.Tensor]) -> None:
        ids = [(7919 * n + 13) % self.vocab_size for n in range(min(PROBE_TOKENS, self.context_length))]
        wanted = reference_logprobs(self.model, tensors, ids, getattr(torch, self.context.model.dtype))
        ask = ScoreAsk(row=0, group=0, context=ids[:1], tokens=ids[1:], temperature=1.0)
        (answer,) = policy.raw_scores([ask])
        worst = float((torch.tensor(answer.logprobs) - wanted).abs().nan_to_num(0.0).max())
        self.context.log(update_difference=worst)
        tolerance = _TOLERANCE[self.context.model.dtype]
        if worst > tolerance:
            raise RunError(
                f"{place}: the engine's log-probs of a fixed sequence differ by up to {worst:.3g} nats from those of "
                "the tensors it was "
                f"given; wanted at most {tolerance:g}. The engine does not hold these weights. Start the run again; it "
                "goes on from its "
                "checkpoint. If that repeats, use engine=local."
            )

    def close(self) -> None:
        """Ends the servers, or the engine of this process."""
        if self.servers is not None:
            self.servers.close()
            self.servers = None
        if self.dialect is not None:
            self.dialect.close()
            self.dialect = None
        if self.core is not None:
            self.core.shutdown()
            self.core = None


class SGLangPolicy(ExternalPolicy):
    """Handle on SGLang in this process, holding the weights of one version."""

    engine: SGLangEngine

    def sample(self, rows: Rows) -> None:
        """Each row is asked for, and goes on, by itself; SGLang's scheduler batches them."""

        async def row(ask: Ask | None) -> None:
            while ask is not None:
                body = wire.generate_body(ask, self._name(), self._top)
                answer = wire.read_generated(await self.engine.core.async_generate(**body), self.engine.entropies)
                # The version that this process counts, not SGLang's own.
                ask = rows.advance(ask.row, dataclasses.replace(answer, version=None))

        self._gather([row(ask) for ask in rows.start()])

    def score_rows(self, asks: Sequence[ScoreAsk]) -> list[ScoreAnswer]:
        """Log-probs of the input."""
        return [check_score(ask, answer) for ask, answer in zip(asks, self.raw_scores(asks), strict=True)]

    def raw_scores(self, asks: Sequence[ScoreAsk]) -> list[ScoreAnswer]:
        """Scores as SGLang gives them, unchecked."""

        async def one(ask: ScoreAsk) -> ScoreAnswer:
            body = wire.score_body(ask, self._name(), self._top)
            answer = wire.read_scores(await self.engine.core.async_generate(**body), ask, self.engine.entropies)
            return dataclasses.replace(answer, version=None)

        return self._gather([one(ask) for ask in asks])

    @property
    def _top(self) -> int:
        return self.engine.vocab_size if self.engine.entropies else 0

    def _name(self) -> str:
        return f"creditgraph-{next(self.engine.request_ids)}"

    def _gather(self, work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        async def together() -> list[Any]:
            return await asyncio.gather(*work)

        found: list[Any] = self.engine.core.loop.run_until_complete(together())
        return found
