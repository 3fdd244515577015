"""JSON of requests to an SGLang server and of its responses, as pure functions (SGLang 0.5.23).

tests/components/engine/sglang/test_contract.py compares every body made here with the request classes of the real
package.
"""

import base64
import inspect
import io
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.multiprocessing import reductions

from creditgraph.components.engine.bucket import Bucket, gpu_id
from creditgraph.components.engine.group import Meeting
from creditgraph.components.engine.messages import (
    FinishReason,
    RowRequest,
    RowResponse,
    ScoreRequest,
    ScoreResponse,
    narrow,
)
from creditgraph.components.engine.served.dialect import ServerError, check_id, number, parsing, token_id
from creditgraph.pipeline.core.errors import ConfigError

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def generate_body(request: RowRequest, request_id: str, top_logprobs: int, experts: bool = False) -> dict[str, Any]:
    """POST /generate for one sample.

    SGLang's log-probs are those at the sampling temperature before truncation (at temperature 1 for greedy), as
    `RowResponse` has them. One request per sample: under one seed, n > 1 would give n equal samples.

    Args:
        request: what to sample; `seed` counts only with --enable-deterministic-inference.
        request_id: id by which it can be aborted.
        top_logprobs: the vocabulary size, for entropies, or 0 for none.
        experts: whether to return those chosen for each token.
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
    body = _body(request_id, request.tokens, sampling, top_logprobs)
    return body | {"return_routed_experts": True} if experts else body


def streamed(body: dict[str, Any], interval: int) -> dict[str, Any]:
    """A `generate_body` whose response is server-sent events of `interval` tokens each."""
    return body | {"stream": True, "sampling_params": {**body["sampling_params"], "stream_interval": interval}}


def score_body(request: ScoreRequest, request_id: str, top_logprobs: int) -> dict[str, Any]:
    """POST /generate without sampling: log-probs of the input from the last context token on.

    `top_logprobs` is the vocabulary size, or 0 where entropies are not wanted. SGLang gives log-probs of temperature 1;
    `read_scores` makes others of the whole vocabulary's, so ConfigError without them.
    """
    if request.temperature != 1.0 and not top_logprobs:
        raise ConfigError(
            f"engine.sglang: expected scores at temperature 1, got temperature {request.temperature}, which needs the "
            "log-probs of the whole vocabulary. Raise entropy_vocab above the vocabulary's size, or use engine=vllm."
        )
    sampling = {"max_new_tokens": 0, "temperature": 1.0}
    body = _body(request_id, request.context + request.tokens, sampling, max(top_logprobs, request.top))
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
        routed_experts=_experts(meta),
    )


def _experts(meta: Mapping[str, Any]) -> np.ndarray | None:
    """Those of all tokens but the last, which SGLang returns at the end of a request that wants them."""
    if meta.get("routed_experts") is None:
        return None
    numbers = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
    return narrow(numbers.reshape(meta["prompt_tokens"] + meta["completion_tokens"] - 1, -1))


def _reason(finish: Any) -> FinishReason:
    kind = finish["type"]
    # A matched token id is an end-of-text token; a matched string is a stop string.
    if kind == "stop" and isinstance(finish.get("matched"), int):
        return "eos"
    if kind not in _REASONS:
        raise ServerError(f"POST /generate: expected finish reason stop, length or abort, got '{kind}'.")
    return _REASONS[kind]


def read_scores(reply: Any, request: ScoreRequest, whole: bool) -> ScoreResponse:
    """The response to `score_body` at the temperature of `request`, which is 1 without the `whole` vocabulary."""
    with parsing("POST /generate"):
        meta = reply["meta_info"]
        count = len(request.tokens)
        entries = meta["input_token_logprobs"][-count:]
        if [entry[1] for entry in entries] != request.tokens:
            raise ServerError("POST /generate: expected the log-probs of the tokens to score, got those of others.")
        logprobs = _logprobs(entries)
        entropies = None
        places = meta["input_top_logprobs"][-count:] if whole or request.top else []
        tables = [_logprobs(place) for place in places]
        if whole:
            temperature = request.temperature or 1.0
            tables = [[x / temperature for x in table] for table in tables]
            norms = [_log_sum(table) for table in tables]
            logprobs = [value / temperature - norm for value, norm in zip(logprobs, norms, strict=True)]
            tables = [[value - norm for value in table] for table, norm in zip(tables, norms, strict=True)]
            entropies = [_entropy(table) for table in tables]
        return ScoreResponse(
            logprobs=logprobs,
            entropies=entropies,
            # SGLang has the most likely ones first.
            top_tokens=[token_id(entry[1]) for place in places for entry in place[: request.top]],
            top_logprobs=[value for table in tables for value in table[: request.top]],
            version=_version_of(meta),
        )


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


def group_body(meeting: Meeting, first: int) -> dict[str, Any]:
    """POST /init_weights_update_group: the server's ranks, from `first` on, in a group whose rank 0 is this process."""
    return {
        "master_address": meeting.address,
        "master_port": meeting.port,
        "rank_offset": first,
        "world_size": meeting.world,
        "group_name": meeting.name,
        "backend": meeting.backend,
    }


def broadcast_body(group: str, bucket: Bucket) -> dict[str, Any]:
    """POST /update_weights_from_distributed: one bucket, received as one flat byte tensor."""
    return {
        "names": [name for name, _, _ in bucket.forms],
        "dtypes": [dtype for _, dtype, _ in bucket.forms],
        "shapes": [shape for _, _, shape in bucket.forms],
        "group_name": group,
        "load_format": "flattened_bucket",
        **_labelled(bucket),
    }


def tensor_body(bucket: Bucket, ranks: int) -> dict[str, Any]:
    """POST /update_weights_from_tensor: one bucket, from shared memory of this host's GPU, or by value on a CPU."""
    return {"serialized_named_tensors": [pickled(bucket.views)] * ranks, **_labelled(bucket)}


def _labelled(bucket: Bucket) -> dict[str, Any]:
    # Caches are dropped, and the label set, with the last bucket.
    if bucket.label is None:
        return {"flush_cache": False}
    return {"flush_cache": True, "weight_version": bucket.label}


class _Pickler(pickle.Pickler):
    """Pickles tensors as SGLang's `MultiprocessingSerializer`: those on a GPU by their memory's CUDA IPC handle."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return NotImplemented
        reduce: Any = reductions.reduce_tensor
        rebuild, arguments = reduce(value)
        # A GPU's number differs between processes, its id does not; SGLang reads both.
        names = list(inspect.signature(rebuild).parameters)
        place = names.index("storage_device")
        return rebuild, (*arguments[:place], gpu_id(value.device), *arguments[place + 1 :])


def pickled(pairs: Sequence[tuple[str, Tensor]]) -> str:
    """Named tensors, which must live until they are read if they are on a GPU, in base64."""
    buffer = io.BytesIO()
    # On a CPU without the rest of the bucket's memory, which pickle would add to each view.
    _Pickler(buffer).dump([(name, t.clone() if t.device.type == "cpu" else t) for name, t in pairs])
    return base64.b64encode(buffer.getvalue()).decode()


def resume_body(weights: bool) -> dict[str, Any]:
    """POST /resume_memory_occupation: of the weights, or of all else."""
    return {"tags": ["weights"] if weights else ["kv_cache", "cuda_graph"]}


def abort_body(request_id: str | None) -> dict[str, Any]:
    """POST /abort_request: one request, or all with None."""
    return {"rid": "", "abort_all": True} if request_id is None else {"rid": request_id}


def checksum_body() -> dict[str, Any]:
    """POST /weights_checker: a hash per weight."""
    return {"action": "checksum"}
