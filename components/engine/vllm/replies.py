"""Reads vLLM's replies to /inference/v1/generate (0.32); every field that is used is checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from typing import Any

from components.engine.messages import FinishReason, RowResponse, ScoreRequest, ScoreResponse
from components.engine.served.dialect import ServerError, check_id, number, parsing, token_id

GENERATE = "/inference/v1/generate"
ID_PREFIX = "generate-tokens-"  # which the server puts before the ids of requests
_FLOOR = -9999.0  # vLLM's JSON has this instead of NaN and −∞ in log-probs of sampled tokens
_REASONS: dict[str, FinishReason] = {"length": "length", "abort": "abort"}


def read_response(reply: Any, request_id: str, eos: Set[int]) -> tuple[RowResponse, str | None]:
    """Response and label; raises ServerError for a reply of another form or to another request."""
    with parsing(f"POST {GENERATE}"):
        check_id(reply["request_id"], ID_PREFIX + request_id)
        (choice,) = reply["choices"]
        return _response(choice, eos), _label(choice)


def read_event(event: str, request_id: str, eos: Set[int]) -> tuple[RowResponse, bool, str | None]:
    """Reads an event of a streamed reply: the next part, whether it is the last, and then the label."""
    with parsing(f"POST {GENERATE}, '{event[:200]}'"):
        reply = json.loads(event)
        check_id(reply["request_id"], ID_PREFIX + request_id)
        (choice,) = reply["choices"]
        last = choice.setdefault("finish_reason", None) is not None
        return _response(choice, eos), last, _label(choice) if last else None


def read_scores(reply: Any, request: ScoreRequest, request_id: str) -> ScoreResponse:
    """The scores in a reply; raises ServerError as above."""
    with parsing(f"POST {GENERATE}"):
        check_id(reply["request_id"], ID_PREFIX + request_id)
        table = reply["prompt_logprobs"][len(request.context) :]
        logprobs = []
        entropies = []
        for token, entry in zip(request.tokens, table, strict=True):
            logprobs.append(number(entry[str(token)]["logprob"]))
            (other,) = (value for key, value in entry.items() if key != str(token))
            entropies.append(-number(other["logprob"]))
        (choice,) = reply["choices"]
        return ScoreResponse(logprobs=logprobs, entropies=entropies, version=_label(choice))


def _response(choice: Mapping[str, Any], eos: Set[int]) -> RowResponse:
    tokens = [token_id(token) for token in choice["token_ids"]]
    entries = (choice["logprobs"] or {"content": []})["content"] or []
    for token, entry in zip(tokens, entries, strict=False):
        if entry["token_id"] != token:
            raise ServerError(f"expected the log-prob of token {token}, got that of token {entry['token_id']}.")
    reason = choice["finish_reason"]
    if reason not in (None, "stop", *_REASONS):
        raise ServerError(f"expected finish reason stop, length or abort, got '{reason}'.")
    logprobs = [number(entry["logprob"]) for entry in entries]
    return RowResponse(
        tokens=tokens,
        logprobs=[math.nan if value <= _FLOOR else value for value in logprobs],
        entropies=[_entropy(entry) for entry in entries],
        reason=_REASONS.get(reason, "eos" if tokens and tokens[-1] in eos else "stop"),
    )


def _entropy(entry: Mapping[str, Any]) -> float:
    (other,) = (top for top in entry["top_logprobs"] if top["token_id"] != entry["token_id"])
    return -number(other["logprob"])


def _label(choice: Mapping[str, Any]) -> str | None:
    """Label of the weights that sampled a response; None for one that was ended before its first token."""
    labels = {str(span["version"]) for span in choice.get("weight_versions") or []}
    if not labels and choice["finish_reason"] == "abort":
        return None
    if len(labels) != 1:
        raise ServerError(f"expected a response by one weights version, got {sorted(labels)}.")
    return labels.pop()
