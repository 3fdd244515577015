"""Requests to an engine that processes rows one by one, as vLLM and SGLang do, and its responses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from creditgraph.components.engine.base import DIVERGED
from creditgraph.pipeline.core.errors import CreditgraphError

# Values computed in low precision may exceed their limits by rounding.
ROUNDING = 1e-2
# A token of probability e^-104 has none in float32 and is never drawn; the rest is room for columns without a token,
# which are not drawn either but count in the softmax.
LOWEST_SAMPLED = -1000.0
LOWEST_SCORE = -1e7  # of given tokens: logits of some thousands over the lowest temperature
LARGEST_ENTROPY = 16.7  # nats of a uniform draw among 2^24 tokens, more than any vocabulary has
FinishReason = Literal["stop", "length", "eos", "abort"]


class BadResponse(CreditgraphError):
    """A response that the model cannot have given; another server may return a good one to the same request."""


def narrow(experts: np.ndarray) -> np.ndarray:
    """Numbers of experts, each in one byte if they fit, else in two."""
    return experts.astype(np.uint8 if experts.max(initial=0) < 256 else np.int16)


def group_of(tokens: Sequence[int]) -> int:
    """The group of rows that begin with these tokens: their hash."""
    return hash(tuple(tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """One row to sample: all of its tokens, up to a limit.

    Attributes:
        row: row of the `Requests`.
        group: `group_of` their prompt; rows that share it should go where the prompt is cached.
        tokens: everything before the first token to sample.
        max_tokens: most tokens to sample, at least 1.
        seed: below 2**63; an engine that gets the same request twice samples the same tokens.
        temperature: 0 is greedy.
        top_p, top_k: 1.0 and 0 are off.
        stream: whether the row's text may end it, so that its tokens should be returned while they are sampled.
        ignore_eos: whether the engine samples on after an end-of-text token.
        cache: version of the weights whose keys and values an engine that keeps them may take; None: the present one.
    """

    row: int
    group: int
    tokens: list[int]
    max_tokens: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    stream: bool
    ignore_eos: bool = False
    cache: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResponse:
    """The response to a `RowRequest`, or the next part of it.

    Attributes:
        tokens: sampled ids, the end-of-text token included.
        logprobs: one per token, nats, at the sampling temperature (1 for greedy), before truncation.
        entropies: one per token, nats, of the same distribution, or None where the engine gives none.
        reason: why the engine stopped, meaningful in the last part only; after "abort" the row is requested again.
        routed_experts: uint8 or int16 [tokens, layers × experts per token], those of the request's tokens and the
            sampled ones but the last; in the last part only, of engines that give them.
    """

    tokens: list[int]
    logprobs: list[float]
    entropies: list[float] | None
    reason: FinishReason
    routed_experts: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A row whose `tokens` are to be scored given `context`, at `temperature`.

    `group` is `group_of` the prompt that the context begins with, or of a longer part of it. The `top` most likely
    tokens in the place of each are scored too; their ids are below `vocab_size`.
    """

    row: int
    group: int
    context: list[int]
    tokens: list[int]
    temperature: float
    top: int = 0
    vocab_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResponse:
    """Log-probs [nats], one per token, and entropies or None where the engine gives none.

    Attributes:
        top_tokens, top_logprobs: the most likely tokens in the place of each token, the first first, place after place.
        version: label of the weights that scored (`Update.label`), or None if the engine does not report it.
    """

    logprobs: list[float]
    entropies: list[float] | None
    top_tokens: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
    version: str | None = None


def check_score(request: ScoreRequest, response: ScoreResponse) -> ScoreResponse:
    """Returns the response; raises BadResponse for one that is incomplete or not finite."""
    place = f"score row {request.row}"
    check_lengths(place, len(request.tokens), response.logprobs, response.entropies)
    check_logprobs(place, response.logprobs, LOWEST_SCORE)
    check_entropies(place, response.entropies, LARGEST_ENTROPY)
    wanted = len(request.tokens) * request.top
    if not len(response.top_tokens) == len(response.top_logprobs) == wanted:
        got = f"{len(response.top_tokens)} with {len(response.top_logprobs)} log-probs"
        raise BadResponse(f"{place}: expected {wanted} most likely tokens, {request.top} in each place, got {got}.")
    if not all(0 <= token < request.vocab_size for token in response.top_tokens):
        raise BadResponse(f"{place}: expected most likely tokens of the vocabulary, ids below {request.vocab_size}.")
    if any(math.isnan(value) or value > ROUNDING for value in response.top_logprobs):
        raise BadResponse(f"{place}: expected log-probs of at most 0 of the most likely tokens, got others. {DIVERGED}")
    return response


def check_lengths(place: str, count: int, logprobs: list[float], entropies: list[float] | None) -> None:
    """Raises BadResponse unless each of `count` tokens has a log-prob, and an entropy where there are any."""
    if len(logprobs) != count:
        raise BadResponse(f"{place}: expected one log-prob per token, got {len(logprobs)} for {count} tokens.")
    if entropies is not None and len(entropies) != count:
        raise BadResponse(f"{place}: expected one entropy per token, got {len(entropies)} for {count} tokens.")


def check_logprobs(place: str, logprobs: list[float], lowest: float) -> None:
    """Raises BadResponse for a NaN or infinite log-prob, or one above 0 or below `lowest`."""
    if not all(map(math.isfinite, logprobs)):
        raise BadResponse(f"{place}: expected finite log-probs, got one that is not. {DIVERGED}")
    largest = max(logprobs, default=0.0)
    if largest > ROUNDING:
        raise BadResponse(f"{place}: expected log-probs of at most 0, got {largest:.4g}.")
    smallest = min(logprobs, default=0.0)
    if smallest < lowest:
        raise BadResponse(f"{place}: expected log-probs of at least {lowest:g}, got {smallest:.4g}.")


def check_entropies(place: str, entropies: list[float] | None, largest: float) -> None:
    """Raises BadResponse for an entropy that is no number from 0 to `largest`."""
    for value in entropies or ():
        if not -ROUNDING <= value <= largest + ROUNDING:
            raise BadResponse(f"{place}: expected entropies from 0 to {largest:.4g} nats, got {value:.4g}.")
