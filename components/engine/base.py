"""The base of all engines and their policy handles: counters, and checks of requests."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from creditgraph.pipeline.core.component import Component, Count, ModelSpec
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.handles import Policy, Requests
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric

ENGINE_METRICS = (
    Metric("sampled_tokens", "tokens", "tokens generated for any node, evaluation included"),
    Metric("scored_tokens", "tokens", "tokens of teacher-forced scoring, context included"),
    Metric("rows_without_room", "rows", "requests whose prompt fills the model's context; they get no tokens"),
    Metric("seconds_load", "s", "wall time of loading new weights"),
    Metric("seconds_generate", "s", "wall time inside `generate`, that of environments included where they overlap"),
    Metric("seconds_score", "s", "wall time inside `score`"),
)


DIVERGED = "The weights have likely diverged: lower the learning rate or go back to an earlier checkpoint."


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The policy that samples with the given weights."""

    policy: Policy


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of every engine."""

    model: str = ""
    """folder or hub name of a model of this engine's own, such as a teacher, whose weights never change (the input
    `weights` is then not wired); "": the run's model, with the wired weights"""


@dataclass
class Limits:
    """Limits of the rows of a batch.

    Attributes:
        tokens: most tokens of each row, int64 [N].
        thoughts: most thoughts of each row, int64 [N].
        eos: bool [V], ids that end a response.
    """

    tokens: Tensor
    thoughts: Tensor
    eos: Tensor


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How an engine holds a model.

    Attributes:
        tensor: GPUs that each copy of the model is sharded over.
        rows: rows that a copy decodes at once at most.
        share: share of a GPU's memory that weights and cache take together; 0: what `cache_bytes` says.
        cache_bytes: most bytes of the cache of a copy; 0: unlimited.
        layer_bytes: bytes of a weight of a layer; those of embedding and output head have 2.
        in_process: whether it is `engine.local`, whose cache takes what the learner leaves.
        sleeps: whether weights and cache leave the GPU while the learner trains.
        elsewhere: whether it runs on GPUs that the learner does not have.
    """

    tensor: int = 1
    rows: int = 256
    share: float = 0.0
    cache_bytes: float = 0.0
    layer_bytes: float = 2.0
    in_process: bool = False
    sleeps: bool = False
    elsewhere: bool = False


class Engine(Component):
    """Base of engines. `setup` of a subclass sets the attributes.

    Attributes:
        tokenizer: Hugging Face fast tokenizer.
        context_length: most tokens in prompt plus response.
        vocab_size: number of logit columns.
        eos: bool [V], ids that end a response.
        version: version of the loaded weights, -1 before the first.
    """

    tokenizer: Any
    context_length: int
    vocab_size: int
    eos: Tensor
    version: int = -1
    _counted: int = -1
    _counters: dict[str, float]

    @classmethod
    def misfits(cls, node: Any, graph: Any, model: ModelSpec, data: Mapping[str, dict[str, Any]]) -> list[str]:
        """Neither weights nor a model of its own, or both."""
        wired = "weights" in node.wires
        if wired and node.config.model:
            return [
                f"{node.name}.weights: expected no wire at an engine with a model of its own ({node.config.model}), "
                f"whose weights never change. Remove the wire, or {node.name}.model."
            ]
        if not wired and not node.config.model:
            return [
                f"{node.name}.weights: not wired; {node.use} needs Weights, such as 'learner.weights@1', or a model of "
                f"its own. Set {node.name}.model to its folder or hub name."
            ]
        return []

    @classmethod
    def serving(cls, config: Any) -> Serving:
        """How an engine with these settings holds the model, for the check of GPU memory."""
        return Serving(in_process=True)

    @property
    def spec(self) -> ModelSpec:
        """The model of this engine: the run's, or its own with the run's dtype and lengths."""
        run = self.context.model
        if not self.config.model:
            return run
        own = dataclasses.replace(run, path=self.config.model, chat_template_kwargs={})
        return own.with_rows(run.longest_row)

    def count(self, **amounts: float) -> None:
        """Adds to this iteration's counters and logs the sums. Only tokens that went through the model count."""
        if self._counted != self.context.iteration:
            self._counters = {}
            self._counted = self.context.iteration
        for name, amount in amounts.items():
            self._counters[name] = self._counters.get(name, 0.0) + amount
        self.context.log(**{name: Count(amount) for name, amount in self._counters.items()})


class EnginePolicy(Policy):
    """Handle on an engine with the weights of one version; checks requests before and results after the model runs."""

    continues = True

    def __init__(self, engine: Engine, version: int) -> None:
        self.engine: Any = engine
        self.version = version
        self.tokenizer = engine.tokenizer

    def _limits(self, requests: Requests) -> Limits:
        """Token and thought limits per row; rows whose prompt fills the context are rejected and get limits of 0."""
        engine = self.engine
        sampling = requests.sampling
        _check_sampling(requests)
        rows = len(requests.tokens)
        budget = torch.full((rows,), sampling.max_tokens) if requests.max_tokens is None else requests.max_tokens
        room = engine.context_length - requests.tokens.lengths
        full = ((room <= 0) & (budget > 0)).nonzero()[:, 0].tolist()
        for row in full:
            length = int(requests.tokens.lengths[row])
            engine.context.reject(
                {"request": row, "prompt_tokens": length},
                f"prompt of {length} tokens leaves no room in a context of {engine.context_length}; "
                "its completion is empty",
            )
        if full:
            engine.count(rows_without_room=len(full))
        max_thoughts = sampling.thoughts.max_thoughts if sampling.thoughts is not None else 0
        thoughts = torch.full((rows,), max_thoughts) if requests.max_thoughts is None else requests.max_thoughts
        budget = torch.minimum(budget, room).clamp(min=0)
        return Limits(tokens=budget, thoughts=thoughts.to(torch.int64), eos=engine.eos)

    def _check_current(self) -> None:
        if self.version != self.engine.version:
            raise CreditgraphError(
                f"engine '{self.engine.context.node}': a policy handle of version {self.version} was used after "
                f"version {self.engine.version} was loaded; expected the handle of the current iteration. "
                "Wire consumers to engine.policy without '@'."
            )

    def _check_scored(self, context: Jagged, tokens: Jagged) -> None:
        """Checks rows to score: one context each, ids in the vocabulary, no longer than the context."""
        engine = self.engine
        if len(context) != len(tokens):
            raise CreditgraphError(
                f"score: expected one context per row, got {len(context)} contexts for {len(tokens)} rows."
            )
        self._check_tokens(context, "score context", used=tokens.lengths > 0)
        self._check_tokens(tokens, "score row", used=torch.zeros(len(tokens), dtype=torch.bool))
        longest = int((context.lengths + tokens.lengths).max()) if len(tokens) else 0
        if longest > engine.context_length:
            raise CreditgraphError(
                f"score: expected rows of at most {engine.context_length} tokens (the context that model "
                f"'{engine.spec.path}' is used with), got {longest}. Shorten prompt plus response or raise "
                "model.max_context."
            )

    def _check_tokens(self, rows: Jagged, what: str, used: Tensor | None = None) -> None:
        empty = (rows.lengths == 0) if used is None else (rows.lengths == 0) & used
        if bool(empty.any()):
            raise CreditgraphError(
                f"{what} {int(empty.nonzero()[0])}: expected at least one token to condition on "
                "(a BOS or a prompt), got none."
            )
        if not len(rows.values):
            return
        vocab = self.engine.vocab_size
        low = int(rows.values.min())
        high = int(rows.values.max())
        if low < 0 or high >= vocab:
            raise CreditgraphError(
                f"{what}: expected token ids from 0 to {vocab - 1}, got {low} to {high}. "
                "Prompts must come from the tokenizer of model.path."
            )

    def _check_finite(self, logprobs: Jagged) -> None:
        bad = ~torch.isfinite(logprobs.values)
        if bool(bad.any()):
            row = int(logprobs.row_ids[bad.nonzero()[0, 0]])
            raise CreditgraphError(
                f"engine '{self.engine.context.node}', row {row}: expected finite log-probs, got one that is not, "
                f"from weights version {self.version}. {DIVERGED}"
            )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.engine.context.trace.span(name.removeprefix("seconds_"), "generation", role="engine"):
            yield
        self.engine.count(**{name: time.perf_counter() - start})


def _check_sampling(requests: Requests) -> None:
    sampling = requests.sampling
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise CreditgraphError(
            "sampling: expected temperature ≥ 0, 0 < top_p ≤ 1 and top_k ≥ 0, got "
            f"temperature {sampling.temperature}, top_p {sampling.top_p} and top_k {sampling.top_k}."
        )
    if not all(sampling.stop) or (sampling.thoughts is not None and not sampling.thoughts.stop):
        raise CreditgraphError(
            "sampling: expected stop strings of at least one character, got an empty one. Leave it out."
        )
    if requests.pause is not None and bool((requests.pause < 1).any()):
        raise CreditgraphError(
            f"requests: expected a pause after at least 1 token, got {int(requests.pause.min())}; "
            "a row would never get further."
        )
