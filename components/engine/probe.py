"""The check that an engine computes with its weights: a fixed sequence is scored by it and by the learner.

Weights that no learner holds, such as those of a folder, are scored by transformers on the CPU instead.

One rule for every engine, in this process or in a server, is in `compare_logprobs`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.engine.messages import ScoreRequest
from creditgraph.components.models.fixed_sequence import fixed_tokens
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import CreditgraphError, extra
from creditgraph.pipeline.core.payloads import ScoredSequence


class ProbeError(CreditgraphError):
    """An engine whose log-probs are not those of its weights."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A request with a known response.

    Attributes:
        request: to the engine.
        expected: the log-probs of its tokens.
        tolerance: nats by which the engine may differ.
    """

    request: ScoreRequest
    expected: Callable[[], list[float]]
    tolerance: float


def compare_logprobs(actual: Sequence[float], expected: Sequence[float], tolerance: float) -> float:
    """The largest difference of two rows of log-probs [nats]; raises ProbeError above `tolerance`.

    A position where both are NaN counts as equal: diverged weights are reported by the first generation, which names
    their cause. Any other NaN or infinity, on either side, is an infinite difference.

    >>> compare_logprobs([-1.0, math.nan], [-1.5, math.nan], tolerance=0.5)
    0.5
    """
    if len(actual) != len(expected):
        raise ProbeError(f"expected {len(expected)} log-probs of a fixed sequence, got {len(actual)}.")
    largest = 0.0
    for a, b in zip(actual, expected, strict=True):
        if math.isnan(a) and math.isnan(b):
            continue
        largest = max(largest, abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf)
    if largest > tolerance:
        raise ProbeError(
            f"its log-probs of a fixed sequence differ by up to {largest:.3g} nats from those of the weights it was "
            f"given, expected at most {tolerance:g}: it does not compute with these weights."
        )
    return largest


def probe_of(scored: ScoredSequence, tolerance: float) -> Probe:
    """The probe by what the learner that holds the weights has computed."""
    return Probe(request=_request(scored.tokens), expected=lambda: list(scored.logprobs), tolerance=tolerance)


def probe_request(vocab_size: int, context_length: int) -> ScoreRequest:
    """The request of the fixed sequence, for weights that no learner holds."""
    return _request(fixed_tokens(vocab_size, context_length))


def _request(ids: Sequence[int]) -> ScoreRequest:
    return ScoreRequest(row=0, group=0, context=list(ids[:1]), tokens=list(ids[1:]), temperature=1.0)


def skeleton(spec: ModelSpec, config: Any) -> Any:
    """The transformers model in evaluation mode, its parameters without memory (device "meta"), its buffers real."""
    with extra("vllm", "the check of an engine's weights"):
        from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, spec.dtype), trust_remote_code=spec.trust_remote_code
        )
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def reference_logprobs(
    model: Any, tensors: Mapping[str, Tensor], request: ScoreRequest, dtype: torch.dtype, arrived: torch.dtype
) -> list[float]:
    """Log-probs of the request's tokens by transformers' forward with the given tensors.

    Args:
        model: see `skeleton`.
        tensors: complete name → tensor mapping.
        request: at least one token of context.
        dtype: dtype of the computation.
        arrived: dtype in which the engine received the tensors, to which they are rounded first.
    """
    device = next(iter(tensors.values())).device
    weights = {name: t.to(arrived).to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    buffers = {name: b.to(device) for name, b in model.named_buffers()}
    ids = torch.tensor([request.context + request.tokens], device=device)
    out = torch.func.functional_call(
        model, buffers | weights, kwargs={"input_ids": ids, "use_cache": False}, tie_weights=False
    )
    first = len(request.context) - 1
    logprobs = out.logits[0, first:-1].float().log_softmax(-1)
    tokens = ids[0, first + 1 :, None]
    values: list[float] = logprobs.gather(1, tokens)[:, 0].tolist()
    return values
