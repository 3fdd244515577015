"""What every engine and its policy handles share: counters, and checks of what they are asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.core.component import Component, Count
from pipeline.core.errors import CreditgraphError
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Policy, Requests

ENGINE_METRICS = (
    Metric("sampled_tokens", "tokens", "tokens generated, whoever asked, evaluation included"),
    Metric("scored_tokens", "tokens", "tokens of teacher-forced scoring, context included"),
    Metric("rows_without_room", "rows", "requests whose prompt fills the model's context; they get no tokens"),
    Metric("seconds_load", "s", "wall time of taking new weights"),
    Metric("seconds_generate", "s", "wall time inside `generate`"),
    Metric("seconds_score", "s", "wall time inside `score`"),
)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The policy that samples with the given weights."""

    policy: Policy


@dataclass
class Limits:
    """What ends rows: tokens each may get, int64 [N]; thoughts each may get, int64 [N]; end-of-text ids."""

    tokens: Tensor
    thoughts: Tensor
    eos: Tensor


class Engine(Component):
    """Base of engines. `setup` of a subclass sets the attributes.

    Attributes:
        tokenizer: Hugging Face fast tokenizer.
        context_length: most tokens in prompt plus response.
        vocab_size: number of logit columns.
        eos: bool [V], ids that end a response.
        version: of the weights held, -1 before the first.
    """

    tokenizer: Any
    context_length: int
    vocab_size: int
    eos: Tensor
    version: int = -1
    _counted: int = -1
    _counters: dict[str, float]

    def count(self, **amounts: float) -> None:
        """Adds to this iteration's counters and logs the sums. Tokens are those that went through the model: sampled, prefilled, scored."""
        if self._counted != self.context.iteration:
            self._counters, self._counted = {}, self.context.iteration
        for name, amount in amounts.items():
            self._counters[name] = self._counters.get(name, 0.0) + amount
        self.context.log(**{name: Count(amount) for name, amount in self._counters.items()})


class EnginePolicy(Policy):
    """Handle on an engine holding the weights of one version: the checks before and after generation and scoring."""

    continues = True

    def __init__(self, engine: Engine, version: int) -> None:
        self.engine: Any = engine
        self.version = version
        self.tokenizer = engine.tokenizer

    def _limits(self, requests: Requests) -> Limits:
        """Token and thought limits per row; rows whose prompt fills the context are rejected and get none."""
        engine, sampling, rows = self.engine, requests.sampling, len(requests.tokens)
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            raise CreditgraphError(
                f"sampling: temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}; "
                "wanted temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0."
            )
        if any(not s for s in sampling.stop) or (sampling.thoughts is not None and not sampling.thoughts.stop):
            raise CreditgraphError(
                "sampling: an empty stop string; wanted at least one character, or no stop string at all."
            )
        budget = torch.full((rows,), sampling.max_tokens) if requests.max_tokens is None else requests.max_tokens
        room = engine.context_length - requests.tokens.lengths
        full = ((room <= 0) & (budget > 0)).nonzero()[:, 0].tolist()
        for row in full:
            length = int(requests.tokens.lengths[row])
            reason = f"prompt of {length} tokens leaves no room in a context of {engine.context_length}; its completion is empty"
            engine.context.reject({"request": row, "prompt_tokens": length}, reason)
        if full:
            engine.count(rows_without_room=len(full))
        most = sampling.thoughts.max_thoughts if sampling.thoughts is not None else 0
        thoughts = torch.full((rows,), most) if requests.max_thoughts is None else requests.max_thoughts
        budget = torch.minimum(budget, room).clamp(min=0)
        if requests.pause is not None and bool((requests.pause < 1).any()):
            raise CreditgraphError(
                f"requests: pause of {int(requests.pause.min())} tokens; wanted at least 1, so that every row gets on."
            )
        return Limits(tokens=budget, thoughts=thoughts.to(torch.int64), eos=engine.eos)

    def _check_current(self) -> None:
        if self.version != self.engine.version:
            raise CreditgraphError(
                f"engine '{self.engine.context.node}': a policy handle of version {self.version} was used after "
                "version "
                f"{self.engine.version} was loaded; wanted the handle of the current iteration. "
                "Wire consumers to engine.policy without '@'."
            )

    def _check_scored(self, context: Jagged, tokens: Jagged, task: str = "score") -> None:
        """Rows to score: one context each, ids in the vocabulary, no longer than the context."""
        engine = self.engine
        if len(context) != len(tokens):
            raise CreditgraphError(
                f"{task}: {len(context)} contexts for {len(tokens)} token rows; wanted one context per row."
            )
        self._check_tokens(context, f"{task} context", used=tokens.lengths > 0)
        self._check_tokens(tokens, f"{task} row", used=torch.zeros(len(tokens), dtype=torch.bool))
        longest = int((context.lengths + tokens.lengths).max()) if len(tokens) else 0
        if longest > engine.context_length:
            raise CreditgraphError(
                f"{task}: a row of {longest} tokens; wanted at most {engine.context_length} "
                f"(context of model '{engine.context.model.path}'). Shorten prompt plus response or raise "
                "model.max_context."
            )

    def _check_tokens(self, rows: Jagged, what: str, used: Tensor | None = None) -> None:
        empty = (rows.lengths == 0) if used is None else (rows.lengths == 0) & used
        if bool(empty.any()):
            raise CreditgraphError(
                f"{what} {int(empty.nonzero()[0])}: no tokens; wanted at least one to condition on (a BOS or a prompt)."
            )
        vocab = self.engine.vocab_size
        if len(rows.values) and not 0 <= int(rows.values.min()) <= int(rows.values.max()) < vocab:
            raise CreditgraphError(
                f"{what}: token ids from {int(rows.values.min())} to {int(rows.values.max())}; wanted 0 to "
                f"{vocab - 1}. "
                "Prompts must come from the tokenizer of model.path."
            )

    def _check_finite(self, logprobs: Jagged) -> None:
        bad = ~torch.isfinite(logprobs.values)
        if bool(bad.any()):
            row = int(logprobs.row_ids[bad.nonzero()[0, 0]])
            raise CreditgraphError(
                f"engine '{self.engine.context.node}': weights version {self.version} give a log-prob that is not "
                f"finite (row {row}); "
                "wanted finite logits. The weights have likely diverged: lower the learning rate or go back to an "
                "earlier checkpoint."
            )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.engine.context.trace.span(name.removeprefix("seconds_"), "generation", role="engine"):
            yield
        self.engine.count(**{name: time.perf_counter() - start})
