"""`engine.local`: sampling and scoring in this process."""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from creditgraph.components.engine.base import ENGINE_METRICS, Engine, EnginePolicy, EngineSettings, Outputs, Serving
from creditgraph.components.engine.local.branches import Branches, check_branches, score_branches
from creditgraph.components.engine.local.cache import tokens_in_free_memory
from creditgraph.components.engine.local.decoder import Decoder, TransformersDecoder
from creditgraph.components.engine.local.generate import REASONS, generate
from creditgraph.components.engine.local.lean import LeanDecoder, unsupported
from creditgraph.components.engine.local.score import attribute, score
from creditgraph.components.engine.vocabulary import eos_mask, padding_columns
from creditgraph.components.engine.weights import WeightNames, merged
from creditgraph.components.models.load import check_context, load_causal_lm, load_tokenizer, resolve_model_path
from creditgraph.components.text.stops import TokenText, decode_rows
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError
from creditgraph.pipeline.core.handles import Completions, Requests, Scores
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Weights


class LocalEngine(Engine):
    """Samples and scores with any transformers causal language model, in this process, on CPU or GPU.

    Equal prompts are prefilled once, ended rows leave the batch, and large batches are split into waves. Qwen2, Qwen3,
    Llama and Mistral run on a lean decoder that is compared with transformers' forward in `setup`; every other model
    runs through that forward. A policy handle is valid until the engine loads the next weights.
    """

    metrics = (
        *ENGINE_METRICS,
        Metric("prefill_tokens", "tokens", "prompt tokens passed through the model, equal prefixes once"),
        Metric("seconds_attribute", "s", "wall time of gradient attribution"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(EngineSettings):
        """Settings."""

        max_rows: int = 512
        """rows decoded at once; more rows are split into waves (same results), and so are rows whose tokens (prompt
        plus response budget) exceed 80 % of a GPU's free memory, on a CPU 524,288"""
        score_tokens: int = 16384
        """padded tokens per forward pass of `score`"""
        decoder: Literal["auto", "lean", "transformers"] = "auto"
        """lean: fast forward of some models; transformers: the model's own; auto: lean if its logits are the same"""
        attributions: bool = False
        """keeps a second copy of the weights on the lean decoder, for gradients (value.gradient_attribution)"""

        def __post_init__(self) -> None:
            for name in ("max_rows", "score_tokens"):
                if getattr(self, name) < 1:
                    raise ValueError(f"expected {name} ≥ 1, got {getattr(self, name)}.")

    config: Config

    @classmethod
    def serving(cls, config: Any) -> Serving:
        """A cache of what the learner leaves."""
        return Serving(rows=config.max_rows, in_process=True)

    def setup(self, context: Context) -> None:
        """Loads tokenizer and model."""
        super().setup(context)
        self.tokenizer = load_tokenizer(self.spec)
        model = load_causal_lm(self.spec, context.device).requires_grad_(False)
        self.context_length = check_context(self.spec, model.config)
        self.names = WeightNames(model)
        self.decoder = choose_decoder(model, self.config.decoder, self.context_length)
        self.vocab_size = self.decoder.vocab_size
        self.text = TokenText(self.tokenizer, self.vocab_size)
        self.eos = eos_mask(model.generation_config, self.tokenizer, self.vocab_size)
        self.forbidden = padding_columns(self.tokenizer, self.vocab_size, context.device)
        self.version = -1
        self._weights: Weights | None = None
        self._twin: tuple[Any, int] | None = None

    def run(self, *, weights: Weights | None = None) -> Outputs:
        """Loads weights (the model's own without any, or if they have no tensors and no path); returns their policy."""
        start = time.perf_counter()
        if weights is None and self.version == 0:
            return Outputs(policy=LocalPolicy(self, 0))
        weights = weights or Weights(version=0)
        if weights.initial:
            weights = dataclasses.replace(weights, path=resolve_model_path(self.spec.path))
        weights = merged(weights, self.spec).storable()  # the learner's own tensors change
        self.decoder.load(self.names.of_model(self.names.resolve(weights)))
        self.version = weights.version
        self._weights = weights if self.config.attributions else None
        self.count(seconds_load=time.perf_counter() - start)
        return Outputs(policy=LocalPolicy(self, weights.version))

    def differentiable(self) -> Any:
        """The transformers model with the current weights; its inputs, not its parameters, carry gradients."""
        if isinstance(self.decoder, TransformersDecoder):
            return self.decoder.model
        if not self.config.attributions:
            raise ConfigError(
                f"node '{self.context.node}': gradients need attributions on, because the lean decoder has none, but "
                f"it is off. Set {self.context.node}.attributions=true (a second copy of the weights) or "
                f"{self.context.node}.decoder=transformers."
            )
        if self._twin is None:
            # A second copy of the model: the lean decoder has fused weights and no graph.
            self._twin = (load_causal_lm(self.spec, self.context.device).requires_grad_(False), -1)
        model, version = self._twin
        if version != self.version:
            assert self._weights is not None, "kept by run"
            model.load_state_dict(self.names.of_model(self.names.resolve(self._weights)))
            self._twin = (model, self.version)
        return model

    def close(self) -> None:
        """Drops the model."""
        self.__dict__.pop("decoder", None)
        self._twin = self._weights = None


class LocalPolicy(EnginePolicy):
    """Handle on a `LocalEngine` with the weights of one version."""

    engine: LocalEngine

    def generate(self, requests: Requests) -> Completions:
        """Samples one completion per row."""
        engine = self.engine
        self._check_current()
        self._check_tokens(requests.tokens, "request")
        limits = self._limits(requests)
        with self._timed("seconds_generate"):
            done, prefilled = generate(
                engine.decoder,
                requests,
                limits,
                engine.text,
                engine.forbidden,
                engine.config.max_rows,
                tokens_in_free_memory(engine.decoder.cached_bytes, engine.decoder.device),
            )
            text = decode_rows(self.tokenizer, done.tokens.to_lists())
        self._check_finite(done.logprobs)
        engine.count(sampled_tokens=len(done.tokens.values), prefill_tokens=prefilled)
        no_ends = Jagged.from_lengths(torch.zeros(0, dtype=torch.int32), torch.zeros(len(text), dtype=torch.int64))
        return Completions(
            tokens=_ordinary(done.tokens),
            logprobs=_ordinary(done.logprobs),
            entropies=_ordinary(done.entropies),
            thought_ends=_ordinary(done.thought_ends) if requests.sampling.thoughts else no_ends,
            finish_reason=[REASONS[r] for r in done.reason.tolist()],
            text=text,
        )

    def score(self, context: Jagged, tokens: Jagged, temperature: float = 1.0, top: int = 0) -> Scores:
        """Log-probs and entropies of `tokens` given `context`, both Jagged int32, teacher-forced."""
        engine = self.engine
        self._check_current()
        self._check_scored(context, tokens)
        with self._timed("seconds_score"):
            scores = score(engine.decoder, context, tokens, temperature, engine.config.score_tokens, top)
        used = tokens.lengths > 0
        return self._scored(scores, int((context.lengths + tokens.lengths)[used].sum()))

    def score_branches(
        self, trunk: Jagged, row: Tensor, at: Tensor, tokens: Jagged, temperature: float = 1.0
    ) -> Scores:
        """Scores what follows prefixes of trunks; on the lean decoder each trunk runs once for all its branches."""
        engine = self.engine
        if not isinstance(engine.decoder, LeanDecoder):
            return super().score_branches(trunk, row, at, tokens, temperature)
        self._check_current()
        branches = Branches(trunk, row, at, tokens)
        check_branches(branches, engine.context_length)
        for rows, what in ((trunk, "trunk"), (tokens, "branch")):
            self._check_tokens(rows, what, used=torch.zeros(len(rows), dtype=torch.bool))
        with self._timed("seconds_score"):
            scores, forward = score_branches(engine.decoder, branches, temperature, engine.config.score_tokens)
        return self._scored(scores, forward)

    def _scored(self, scores: Scores, tokens: int) -> Scores:
        self._check_finite(scores.logprobs)
        self.engine.count(scored_tokens=tokens)
        return Scores(
            logprobs=_ordinary(scores.logprobs),
            entropies=_ordinary(scores.entropies),
            top_tokens=None if scores.top_tokens is None else scores.top_tokens.clone(),
            top_logprobs=None if scores.top_logprobs is None else scores.top_logprobs.clone(),
        )

    def attribute(self, context: Jagged, tokens: Jagged, temperature: float = 1.0) -> Jagged:
        """Gradient × input embedding of context tokens, through the transformers model, loaded when first called."""
        engine = self.engine
        self._check_current()
        if len(context) != len(tokens):
            raise CreditgraphError(
                f"attribute: expected one context per row, got {len(context)} contexts for {len(tokens)} token rows."
            )
        used = tokens.lengths > 0
        self._check_tokens(context, "attribution context", used=used)
        with self._timed("seconds_attribute"):
            products = attribute(engine.differentiable(), context, tokens, temperature, engine.config.score_tokens)
        engine.count(scored_tokens=int((context.lengths + tokens.lengths)[used].sum()))
        return products


def choose_decoder(model: Any, choice: str, context: int) -> Decoder:
    """The lean decoder if chosen, possible and equal to the model's own logits; else the one through transformers."""
    if choice == "transformers":
        return TransformersDecoder(model, context)
    reason = unsupported(model)
    if not reason:
        lean = LeanDecoder(model, context)
        difference = largest_difference(lean, model)
        # bfloat16 keeps 8 bits, so a different order of rounding changes logits by about 1 % of the largest one.
        tolerance = 1e-4 if model.dtype == torch.float32 else 5e-2
        if difference <= tolerance:
            return lean
        reason = f"its logits differ from transformers' by {difference:.2g} of the largest"
    if choice == "lean":
        raise ConfigError(f"engine.local: decoder 'lean' cannot run this model: {reason}. Use decoder: auto.")
    return TransformersDecoder(model, context)


@torch.inference_mode()
def largest_difference(lean: LeanDecoder, model: Any) -> float:
    """Largest logit difference between the lean decoder and the model's forward, relative to the largest logit."""
    device = model.device
    length = 12
    tokens = (torch.arange(2 * length, device=device).view(2, -1) * 7919 + 13) % lean.vocab_size
    expected = model(input_ids=tokens, use_cache=False).logits[:, -2:].float()
    prompts = Jagged.from_rows([tokens[0, :-1].cpu(), tokens[1, :-1].cpu()]).to(device)
    # The last two logits: one from the prefill, one from a step.
    logits = [lean.prefill(prompts, torch.arange(2, device=device), 1), lean.step(tokens[:, -1])]
    lean.release()
    difference = (torch.stack(logits, 1).float() - expected).abs().max() / expected.abs().max()
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")


def _ordinary(rows: Jagged) -> Jagged:
    """A copy outside inference mode: a learner may keep it for its backward pass."""
    return Jagged(rows.values.clone(), rows.offsets.clone())
