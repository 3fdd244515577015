"""Base of engines that are not this project's own code: what vLLM and SGLang have in common, in process or behind servers."""

from __future__ import annotations

import dataclasses
import math
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from components.engine.adapters import merged
from components.engine.base import Engine, EnginePolicy, Outputs
from components.engine.served.dialect import ScoreAnswer, ScoreAsk
from components.engine.served.rows import BadAnswer, Rows
from components.engine.vocabulary import eos_mask, generation_config, padding_columns
from components.engine.weights import WeightNames
from components.models.load import load_config, load_tokenizer, resolve_model_path
from components.text.stops import TokenText
from pipeline.core.component import Context, ModelSpec
from pipeline.core.errors import CreditgraphError
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Completions, Requests, Scores, Weights

EXTERNAL_METRICS = (
    Metric(
        "update_difference",
        "nats",
        "engine in this process: largest difference of a fixed sequence's log-probs from those of the new weights",
    ),
    Metric("servers_ready", "servers", "servers that hold the present weights and answer"),
    Metric("servers_lost", "servers", "servers that stopped answering"),
    Metric("requests", "requests", "requests sent to servers, repeated ones included"),
    Metric("retries", "requests", "requests sent once more, after a failure or an unsound answer"),
    Metric("aborted", "requests", "answers a server broke off, whose rows were asked again"),
    Metric("seconds_update", "s", "wall time until every server held the new weights, or was given up"),
)


class ExternalEngine(Engine):
    """An engine that loads the model itself; here are only its tokenizer, its sizes and the names of its weights.

    Attributes:
        text: byte strings of the tokens.
        model: the transformers model without its parameters, for names, shapes and `reference_logprobs`.
        names: checks of the weights a learner publishes.
        forbidden: ids of logit columns that are no token of the tokenizer.
        temperatures: lowest and highest that it takes beside 0.
        takes_adapters: whether `load` is given LoRA adapters as they are, not merged.
    """

    text: TokenText
    model: Any
    names: WeightNames
    forbidden: list[int]
    temperatures: tuple[float, float] = (0.0, math.inf)
    takes_adapters: bool = False

    def setup(self, context: Context) -> None:
        """Loads the tokenizer and the shape of the model."""
        super().setup(context)
        from components.models.load import check_context

        self.tokenizer = load_tokenizer(context.model)
        config = load_config(context.model)
        self.context_length = check_context(context.model, config)
        self.model = skeleton(context.model, config)
        self.names = WeightNames(self.model)
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)
        self.text = TokenText(self.tokenizer, self.vocab_size)
        self.eos = eos_mask(generation_config(context.model), self.tokenizer, self.vocab_size)
        mask = padding_columns(self.tokenizer, self.vocab_size, "cpu")
        self.forbidden = [] if mask is None else mask.nonzero()[:, 0].tolist()

    @property
    def eos_ids(self) -> list[int]:
        """Ids that end a response, ascending."""
        return [int(i) for i in self.eos.nonzero()[:, 0]]

    def run(self, *, weights: Weights) -> Outputs:
        """Loads `weights` and returns a policy with their version; weights with neither tensors nor path are the model's own."""
        start = time.perf_counter()
        if weights.tensors is None and weights.path is None:
            weights = dataclasses.replace(weights, path=resolve_model_path(self.context.model.path))
        if not self.takes_adapters:
            weights = merged(weights, self.context.model)
        policy = self.load(weights)
        self.version = weights.version
        self.count(seconds_load=time.perf_counter() - start)
        return Outputs(policy=policy)

    @abstractmethod
    def load(self, weights: Weights) -> ExternalPolicy:
        """Has the engine hold `weights` (tensors or a path), verified; the handle on them."""


class ExternalPolicy(EnginePolicy):
    """Handle on an external engine. Subclasses drive `Rows` and answer `ScoreAsk`s; all checks are here."""

    engine: ExternalEngine

    @abstractmethod
    def sample(self, rows: Rows) -> None:
        """Starts `rows` and answers their asks until none is open; each row goes on as soon as it is answered."""

    @abstractmethod
    def score_rows(self, asks: Sequence[ScoreAsk]) -> list[ScoreAnswer]:
        """Answers in the order of `asks`; each has tokens to score and a context. Check them with `check_score`."""

    def generate(self, requests: Requests) -> Completions:
        """Samples one completion per row."""
        engine = self.engine
        self._check_current()
        self._check_tokens(requests.tokens, "request")
        self._check_temperature(requests.sampling.temperature)
        rows = Rows(requests, self._limits(requests), engine.text, self.tokenizer, engine.vocab_size, self.version)
        with self._timed("seconds_generate"):
            self.sample(rows)
            done = rows.completions()
        engine.count(sampled_tokens=len(done.tokens.values))
        return done

    def score(self, context: Jagged, tokens: Jagged, temperature: float = 1.0) -> Scores:
        """Log-probs and entropies of `tokens` given `context`, both Jagged int32, teacher-forced."""
        self._check_current()
        self._check_scored(context, tokens)
        self._check_temperature(temperature)
        groups: dict[tuple[int, ...], int] = {}
        asks = [
            ScoreAsk(
                row=row,
                group=groups.setdefault(tuple(before), len(groups)),
                context=before,
                tokens=after,
                temperature=temperature or 1.0,
            )
            for row, (before, after) in enumerate(zip(context.to_lists(), tokens.to_lists(), strict=True))
            if after
        ]
        with self._timed("seconds_score"):
            answers = self.score_rows(asks)
        logprobs = torch.zeros(len(tokens.values))
        entropies = torch.zeros(len(tokens.values))
        for ask, answer in zip(asks, answers, strict=True):
            place = slice(int(tokens.offsets[ask.row]), int(tokens.offsets[ask.row + 1]))
            logprobs[place] = torch.tensor(answer.logprobs)
            entropies[place] = math.nan if answer.entropies is None else torch.tensor(answer.entropies)
        self.engine.count(scored_tokens=sum(len(a.context) + len(a.tokens) for a in asks))
        return Scores(logprobs=tokens.with_values(logprobs), entropies=tokens.with_values(entropies))

    def _check_temperature(self, temperature: float) -> None:
        low, high = self.engine.temperatures
        if temperature > high or 0 < temperature < low:
            raise CreditgraphError(
                f"engine '{self.engine.context.node}': temperature {temperature:g}; wanted 0 (greedy) or {low:g} to "
                f"{high:g}, which is "
                "what this engine samples at. Change the temperature or use engine=local."
            )


def check_score(ask: ScoreAsk, answer: ScoreAnswer, version: int | None = None) -> ScoreAnswer:
    """The answer, or BadAnswer for one that is incomplete, not finite, or given by other weights than `version`."""
    count, place = len(ask.tokens), f"score row {ask.row}"
    if version is not None and answer.version is not None and answer.version != version:
        raise BadAnswer(f"{place}: scored by weights version {answer.version}; wanted version {version}.")
    if len(answer.logprobs) != count or (answer.entropies is not None and len(answer.entropies) != count):
        raise BadAnswer(f"{place}: {len(answer.logprobs)} log-probs for {count} tokens; wanted one each.")
    if not all(map(math.isfinite, answer.logprobs)):
        raise BadAnswer(
            f"{place}: a log-prob that is not finite; wanted finite logits. The weights have likely diverged: lower "
            "the learning rate "
            "or go back to an earlier checkpoint."
        )
    return answer


def skeleton(spec: ModelSpec, config: Any) -> Any:
    """The transformers model in evaluation mode with parameters of no memory (device "meta") and real buffers."""
    from transformers import AutoModelForCausalLM

    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, spec.dtype), trust_remote_code=spec.trust_remote_code
        )
    model.tie_weights()
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, None if param is None else nn.Parameter(param.to("meta"), requires_grad=False))

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@torch.no_grad()
def reference_logprobs(model: Any, tensors: dict[str, Tensor], tokens: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Log-probs float32 [T - 1] of tokens 1… given those before, by transformers' forward with the given tensors.

    Args:
        model: see `skeleton`.
        tensors: complete name → tensor mapping.
        tokens: at least two ids.
        dtype: of the computation.
    """
    device = next(iter(tensors.values())).device
    cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    buffers = {name: b.to(device) for name, b in model.named_buffers()}
    ids = torch.tensor([list(tokens)], device=device)
    out = torch.func.functional_call(
        model, buffers | cast, kwargs={"input_ids": ids, "use_cache": False}, tie_weights=False
    )
    logprobs: Tensor = out.logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu()
