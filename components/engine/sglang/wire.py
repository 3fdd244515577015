"""JSON of requests to an SGLang server and of its responses, as pure functions (SGLang 0.5.23).

tests/components/engine/sglang/test_contract.py compares every body made here with the request classes of the real
package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from components.engine.messages import FinishReason, RowRequest, RowResponse, ScoreRequest, ScoreResponse
from components.engine.served.dialect import ServerError, check_id, number, parsing, token_id
from pipeline.core.errors import ConfigError

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def generate_body(request: RowRequest, request_id: str, top_logprobs: int) -> dict[str, Any]:
    """POST /generate for one sample.

    SGLang's log-probs are those at the sampling temperature before truncation (at temperature 1 for greedy), as
    `RowResponse` has them. One request per sample: under one seed, n > 1 would give n equal samples.

    Args:
        request: what to sample; `seed` counts only with --enable-deterministic-inference.
        request_id: id by which it can be aborted.
        top_logprobs: the vocabulary size, for entropies, or 0 for none.
    """
    sampling: dict[str, Any] = {
        "max_new_tokens": request.max_tokens,
        "temperature": request.temperature,
        "sampling_seed": request.seed,
        # The end-of-text token stays.
        "no_stop_trim": True,
    }
    if request.ignore_eos:
        sampling["ignore_eos"] = True
    if request.temperature > 0 and request.top_p < 1:
        sampling["top_p"] = request.top_p
    if request.temperature > 0 and request.top_k > 0:
        sampling["top_k"] = request.top_k
    return _body(request_id, request.tokens, sampling, top_logprobs)


def streamed(body: dict[str, Any], interval: int) -> dict[str, Any]:
    """A `generate_body` whose response is server-sent events of `interval` tokens each."""
    return body | {"stream": True, "sampling_params": {**body["sampling_params"], "stream_interval": interval}}


def score_body(request: ScoreRequest, request_id: str, top_logprobs: int) -> dict[str, Any]:
    """POST /generate without sampling: log-probs of the input from the last context token on.

    SGLang gives those of temperature 1; `read_scores` makes others of the whole vocabulary's, so ConfigError without
    them.
    """
    if request.temperature != 1.0 and not top_logprobs:
        raise ConfigError(
            f"engine.sglang: expected scores at temperature 1, got temperature {request.temperature}, which needs the "
            "log-probs of the whole vocabulary. Raise entropy_vocab above the vocabulary's size, or use engine=vllm."
        )
    sampling = {"max_new_tokens": 0, "temperature": 1.0}
    body = _body(request_id, request.context + request.tokens, sampling, top_logprobs)
    return body | {"logprob_start_len": len(request.context) - 1}


def _body(request_id: str, tokens: list[int], sampling: dict[str, Any], top_logprobs: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "rid": request_id,
        "input_ids": tokens,
        "sampling_params": sampling,
        "return_logprob": True,
    }
    return body | {"top_logprobs_num": top_logprobs} if top_logprobs else body


def check_request(reply: Any, request_id: str) -> None:
    """Raises ServerError for the reply to another request."""
    with parsing("POST /generate"):
        check_id(reply["meta_info"]["id"], request_id)


def read_generated(reply: Any, entropies: bool) -> tuple[RowResponse, str | None]:
    """Response and version in the reply to `generate_body`; raises ServerError for one of another form."""
    with parsing("POST /generate"):
        meta = reply["meta_info"]
        return _response(reply, _reason(meta["finish_reason"]), 0, entropies), _version_of(meta)


def read_event(event: str, taken: int, entropies: bool, request_id: str) -> tuple[RowResponse, bool, str | None]:
    """Reads an event (JSON) of a streamed reply: the part after `taken` tokens, whether it is the last, the version.

    Servers with --incremental-streaming-output send only what is new, others all so far. Raises ServerError as above.
    """
    with parsing(f"POST /generate, '{event[:200]}'"):
        reply = json.loads(event)
        meta = reply["meta_info"]
        check_id(meta["id"], request_id)
        last = meta["finish_reason"] is not None
        start = taken if len(reply["output_ids"]) == meta["completion_tokens"] else 0
        reason = _reason(meta["finish_reason"]) if last else "stop"
        return _response(reply, reason, start, entropies), last, _version_of(meta)


def _response(reply: Any, reason: FinishReason, start: int, entropies: bool) -> RowResponse:
    meta = reply["meta_info"]
    tokens = [token_id(token) for token in reply["output_ids"][start:]]
    entries = meta["output_token_logprobs"][start:]
    for token, entry in zip(tokens, entries, strict=False):
        if entry[1] != token:
            raise ServerError(f"POST /generate: expected the log-prob of token {token}, got that of token {entry[1]}.")
    return RowResponse(
        tokens=tokens,
        logprobs=_logprobs(entries),
        entropies=[_entropy(_logprobs(top)) for top in meta["output_top_logprobs"][start:]] if entropies else None,
        reason=reason,
    )


def _reason(finish: Any) -> FinishReason:
    kind = finish["type"]
    # A matched token id is an end-of-text token; a matched string is a stop string.
    if kind == "stop" and isinstance(finish.get("matched"), int):
        return "eos"
    if kind not in _REASONS:
        raise ServerError(f"POST /generate: expected finish reason stop, length or abort, got '{kind}'.")
    return _REASONS[kind]


def read_scores(reply: Any, request: ScoreRequest, top: bool) -> ScoreResponse:
    """The response to `score_body` at the temperature of `request`, which is 1 without the vocabulary (`top`)."""
    with parsing("POST /generate"):
        meta = reply["meta_info"]
        count = len(request.tokens)
        entries = meta["input_token_logprobs"][-count:]
        if [entry[1] for entry in entries] != request.tokens:
            raise ServerError("POST /generate: expected the log-probs of the tokens to score, got those of others.")
        logprobs = _logprobs(entries)
        entropies = None
        if top:
            temperature = request.temperature or 1.0
            tables = [[x / temperature for x in _logprobs(table)] for table in meta["input_top_logprobs"][-count:]]
            norms = [_log_sum(table) for table in tables]
            logprobs = [value / temperature - norm for value, norm in zip(logprobs, norms, strict=True)]
            entropies = [_entropy([value - norm for value in table]) for table, norm in zip(tables, norms, strict=True)]
        return ScoreResponse(logprobs=logprobs, entropies=entropies, version=_version_of(meta))


def _logprobs(entries: Sequence[Sequence[Any]]) -> list[float]:
    """The log-probs of entries, which have them first; SGLang's JSON has null for NaN."""
    return [math.nan if entry[0] is None else number(entry[0]) for entry in entries]


def _entropy(logprobs: Sequence[float]) -> float:
    """−Σ p log p of one position [nats]; SGLang has −1e30 for probabilities of 0."""
    return -math.fsum(math.exp(x) * x for x in logprobs if not x < -1e4)


def _log_sum(values: Sequence[float]) -> float:
    largest = max(values)
    return largest + math.log(sum(math.exp(value - largest) for value in values))


def _version_of(meta: Mapping[str, Any]) -> str | None:
    """Label of the weights that sampled; raises ServerError if it changed meanwhile."""
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version")}]
    labels = {str(span["version"]) for span in spans}
    if len(labels) != 1:
        raise ServerError(f"POST /generate: expected a response by one weights version, got {sorted(labels)}.")
    return labels.pop()


def disk_body(path: str, label: str) -> dict[str, Any]:
    """POST /update_weights_from_disk: all safetensors files of a folder; drops the prefix cache."""
    return {"model_path": path, "weight_version": label, "flush_cache": True}


def group_body(name: str, address: str, port: int, backend: str, ranks: int) -> dict[str, Any]:
    """POST /init_weights_update_group: a process group of this process (rank 0) and the server's ranks."""
    return {
        "master_address": address,
        "master_port": port,
        "rank_offset": 1,
        "world_size": 1 + ranks,
        "group_name": name,
        "backend": backend,
    }


def broadcast_body(name: str, tensors: Mapping[str, Tensor], label: str | None) -> dict[str, Any]:
    """POST /update_weights_from_distributed: one bucket, received as one flat byte tensor ordered by `in_order`."""
    ordered = in_order(tensors)
    body: dict[str, Any] = {
        "names": [tensor_name for tensor_name, _ in ordered],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
        "shapes": [list(tensor.shape) for _, tensor in ordered],
        "group_name": name,
        "load_format": "flattened_bucket",
        "flush_cache": label is not None,
    }
    if label is not None:
        body["weight_version"] = label
    return body


def in_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Tensors by falling element size, so that each starts at a multiple of its element size in the flat bucket."""
    return sorted(tensors.items(), key=lambda item: -item[1].element_size())


def flat_bytes(tensors: Mapping[str, Tensor]) -> Tensor:
    """uint8 [total bytes]: all tensors in the order of `in_order`."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in in_order(tensors)])


def abort_body(request_id: str | None) -> dict[str, Any]:
    """POST /abort_request: one request, or all with None."""
    return {"rid": "", "abort_all": True} if request_id is None else {"rid": request_id}


def checksum_body() -> dict[str, Any]:
    """POST /weights_checker: a hash per weight."""
    return {"action": "checksum"}
