"""Reads a vLLM server's replies to `creditgraph.components.engine.vllm.route`; every field that is used is checked."""

import json
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from creditgraph.components.engine.messages import FinishReason, RowResponse, ScoreResponse, narrow
from creditgraph.components.engine.served.dialect import ServerError, check_id, parsing
from creditgraph.components.engine.vllm.columns import crc_of, read_array, read_ids, read_numbers
from creditgraph.components.engine.vllm.route import ROWS

_REASONS: dict[str, FinishReason] = {"length": "length", "abort": "abort"}


def read_response(reply: Any, request_id: str, eos: Set[int]) -> tuple[RowResponse, str | None]:
    """Response and label; raises ServerError for a reply of another form or to another request."""
    with parsing(f"POST {ROWS}"):
        _check(reply, request_id)
        return _response(reply, eos), _label(reply)


def read_event(event: str, request_id: str, eos: Set[int]) -> tuple[RowResponse, bool, str | None]:
    """Reads an event of a streamed reply: the next part, whether it is the last, and then the label."""
    with parsing(f"POST {ROWS}, '{event[:200]}'"):
        reply = json.loads(event)
        _check(reply, request_id)
        last = reply["reason"] is not None
        return _response(reply, eos), last, _label(reply) if last else None


def read_scores(reply: Any, request_id: str, count: int) -> ScoreResponse:
    """The scores of `count` tokens in a reply; raises ServerError as above."""
    with parsing(f"POST {ROWS}"):
        _check(reply, request_id)
        logprobs = read_numbers(reply["logprobs"])
        return ScoreResponse(
            logprobs=logprobs[:count],
            entropies=read_numbers(reply["entropies"]),
            top_tokens=read_ids(reply["tokens"]),
            top_logprobs=logprobs[count:],
            version=_label(reply),
        )


def _check(reply: Mapping[str, Any], request_id: str) -> None:
    check_id(reply["id"], request_id)
    if reply["crc"] != crc_of(reply):
        raise ServerError(f"expected columns with CRC {reply['crc']}, got those of CRC {crc_of(reply)}.")


def _response(reply: Mapping[str, Any], eos: Set[int]) -> RowResponse:
    tokens = read_ids(reply["tokens"])
    reason = reply["reason"]
    if reason not in (None, "stop", *_REASONS):
        raise ServerError(f"expected finish reason stop, length or abort, got '{reason}'.")
    return RowResponse(
        tokens=tokens,
        logprobs=read_numbers(reply["logprobs"]),
        entropies=read_numbers(reply["entropies"]),
        reason=_REASONS.get(reason, "eos" if tokens and tokens[-1] in eos else "stop"),
        routed_experts=flat_experts(read_array(reply["experts"])) if "experts" in reply else None,
    )


def flat_experts(experts: np.ndarray) -> np.ndarray:
    """vLLM's [tokens, layers, experts per token] as `RowResponse` has them."""
    return narrow(experts.reshape(len(experts), -1))


def _label(reply: Mapping[str, Any]) -> str | None:
    """Label of the weights that sampled a response; None for one that was ended before its first token."""
    labels = {str(version) for version in reply["versions"]}
    if not labels and reply["reason"] == "abort":
        return None
    if len(labels) != 1:
        raise ServerError(f"expected a response by one weights version, got {sorted(labels)}.")
    return labels.pop()
