"""What is said to an SGLang server, and what its answers mean: pure functions from and to JSON (SGLang 0.5.23).

Every body made here is held against the request classes of the real package by
tests/components/engine/sglang/test_contract.py.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from components.engine.served.dialect import Answer, Ask, ScoreAnswer, ScoreAsk, ServerError
from pipeline.core.errors import ConfigError

Reason = Literal["stop", "length", "eos", "abort"]
PauseMode = Literal["abort", "retract", "in_place"]


def generate_body(ask: Ask, request_id: str, top_logprobs: int) -> dict[str, Any]:
    """POST /generate for one sample.

    SGLang's log-probs are those at the sampling temperature before truncation (at temperature 1 for greedy), which is
    what is wanted.
    One request per sample: under one seed, n > 1 would give n equal samples.

    Args:
        ask: what to sample; `seed` counts only with --enable-deterministic-inference.
        request_id: to abort it by.
        top_logprobs: the vocabulary size, for entropies, or 0 for none.
    """
    sampling: dict[str, Any] = {
        "max_new_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "sampling_seed": ask.seed,
        # A stop string may be a special token: its text must be there to be found, and stay.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if ask.stop:
        sampling["stop"] = list(ask.stop)
    if ask.temperature > 0 and ask.top_p < 1:
        sampling["top_p"] = ask.top_p
    if ask.temperature > 0 and ask.top_k > 0:
        sampling["top_k"] = ask.top_k
    body: dict[str, Any] = {
        "rid": request_id,
        "input_ids": ask.tokens,
        "sampling_params": sampling,
        "return_logprob": True,
    }
    if top_logprobs:
        body["top_logprobs_num"] = top_logprobs
    return body


def stream_body(ask: Ask, request_id: str, top_logprobs: int, interval: int) -> dict[str, Any]:
    """As `generate_body`, answered by server-sent events of `interval` tokens each."""
    body = generate_body(ask, request_id, top_logprobs) | {"stream": True}
    body["sampling_params"]["stream_interval"] = interval
    return body


def score_body(ask: ScoreAsk, request_id: str, top_logprobs: int) -> dict[str, Any]:
    """POST /generate without sampling: log-probs of the input from the last context token on.

    SGLang gives those of temperature 1; `read_scores` makes others of the whole vocabulary's, so ConfigError without
    them.
    """
    if ask.temperature != 1.0 and not top_logprobs:
        raise ConfigError(
            f"engine.sglang: scores at temperature {ask.temperature} were asked for, which SGLang gives only through "
            "all log-probs of each "
            "token's vocabulary; wanted temperature 1. Raise entropy_vocab above the vocabulary's size, or use "
            "engine=vllm."
        )
    body: dict[str, Any] = {
        "rid": request_id,
        "input_ids": ask.context + ask.tokens,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": len(ask.context) - 1,
    }
    if top_logprobs:
        body["top_logprobs_num"] = top_logprobs
    return body


def read_generated(body: Any, entropies: bool) -> Answer:
    """The answer to `generate_body`. Raises ServerError for one of another form."""
    try:
        return _answer(body, _reason(body["meta_info"]["finish_reason"]), 0, entropies)
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        if isinstance(error, ServerError):
            raise
        raise ServerError(f"/generate: an answer without its fields ({type(error).__name__}: {error}).") from error


def read_part(event: str, taken: int, entropies: bool) -> tuple[Answer, bool]:
    """What an event (JSON) of the answer to `stream_body` adds to `taken` tokens, and whether it is the last. Raises ServerError as above.

    Servers with --incremental-streaming-output send only what is new, others all so far.
    """
    try:
        body = json.loads(event)
        meta = body["meta_info"]
        last = meta["finish_reason"] is not None
        start = taken if len(body["output_ids"]) == meta["completion_tokens"] else 0
        return _answer(body, _reason(meta["finish_reason"]) if last else "stop", start, entropies), last
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        if isinstance(error, ServerError):
            raise
        raise ServerError(f"/generate: an event without its fields ({type(error).__name__}: {error}).") from error


def _answer(body: Any, reason: Reason, start: int, entropies: bool) -> Answer:
    meta = body["meta_info"]
    return Answer(
        tokens=[int(token) for token in body["output_ids"][start:]],
        logprobs=[float(entry[0]) for entry in meta["output_token_logprobs"][start:]],
        entropies=[entropy_of(top) for top in meta["output_top_logprobs"][start:]] if entropies else None,
        reason=reason,
        version=_version_of(meta),
    )


def _reason(finish: Any) -> Reason:
    kind = finish["type"]
    if kind == "stop":
        # A matched token id is an end-of-text token, a matched string a stop string.
        return "eos" if isinstance(finish.get("matched"), int) else "stop"
    if kind == "length":
        return "length"
    if kind == "abort":
        return "abort"
    raise ServerError(f"/generate: finish reason '{kind}'; wanted stop, length or abort.")


def read_scores(body: Any, ask: ScoreAsk, top: bool) -> ScoreAnswer:
    """The answer to `score_body`, at the temperature of `ask`; other temperatures than 1 need the whole vocabulary (`top`)."""
    try:
        meta = body["meta_info"]
        count = len(ask.tokens)
        logprobs = [float(entry[0]) for entry in meta["input_token_logprobs"][-count:]] if count else []
        entropies = None
        if top:
            tables = meta["input_top_logprobs"][-count:] if count else []
            temperature = ask.temperature or 1.0
            norms = [_log_sum([entry[0] / temperature for entry in table]) for table in tables]
            logprobs = [value / temperature - norm for value, norm in zip(logprobs, norms, strict=True)]
            entropies = [
                entropy_of([(entry[0] / temperature - norm,) for entry in table])
                for table, norm in zip(tables, norms, strict=True)
            ]
        return ScoreAnswer(logprobs=logprobs, entropies=entropies, version=_version_of(meta))
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise ServerError(f"/generate: scores without their fields ({type(error).__name__}: {error}).") from error


def entropy_of(top: Sequence[Sequence[Any]]) -> float:
    """−Σ p log p over all entries (log-prob first) of one position [nats]."""
    return -math.fsum(math.exp(entry[0]) * entry[0] for entry in top if entry[0] > -1e4)


def version_number(text: object) -> int | None:
    """A weight version as this package sets it; None for SGLang's own "default"."""
    return int(text) if isinstance(text, str) and text.isdigit() else None


def _version_of(meta: Mapping[str, Any]) -> int | None:
    """Version behind an answer. Should it have changed on the way, the first one: a wrong version is found by who wanted one version."""
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version")}]
    return version_number(spans[0]["version"])


def _log_sum(values: Sequence[float]) -> float:
    largest = max(values)
    return largest + math.log(sum(math.exp(value - largest) for value in values))


def disk_body(path: str, version: int) -> dict[str, Any]:
    """POST /update_weights_from_disk: all safetensors files of a folder; drops the prefix cache."""
    return {"model_path": path, "weight_version": str(version), "flush_cache": True}


def tensor_body(tensors: Mapping[str, Tensor], version: int | None, ranks: int) -> dict[str, Any]:
    """POST /update_weights_from_tensor: one bucket, in the body itself.

    The tensors travel as one flat byte tensor with a table of names, because pickling each of many tensors is slow. It
    is plain pickle: tensors shared by file descriptor, torch's default, end a server that this process did not start.

    Args:
        tensors: name → CPU tensor.
        version: set with the last bucket, None before.
        ranks: tensor-parallel ranks of the server; each takes its share of the whole tensors.
    """
    table, start = [], 0
    for name, tensor in in_order(tensors):
        size = tensor.nbytes
        table.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=start + size, numel=size
            )
        )
        start += size
    payload = base64.b64encode(pickle.dumps({"flattened_tensor": flat_bytes(tensors), "metadata": table})).decode()
    body: dict[str, Any] = {
        "serialized_named_tensors": [payload] * ranks,
        "load_format": "flattened_bucket",
        "flush_cache": version is not None,
    }
    if version is not None:
        body["weight_version"] = str(version)
    return body


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


def broadcast_body(name: str, tensors: Mapping[str, Tensor], version: int | None) -> dict[str, Any]:
    """POST /update_weights_from_distributed: one bucket, received as one flat byte tensor in the order of `in_order`."""
    ordered = in_order(tensors)
    body: dict[str, Any] = {
        "names": [tensor_name for tensor_name, _ in ordered],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
        "shapes": [list(tensor.shape) for _, tensor in ordered],
        "group_name": name,
        "load_format": "flattened_bucket",
        "flush_cache": version is not None,
    }
    if version is not None:
        body["weight_version"] = str(version)
    return body


def in_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Tensors by falling element size, so that each starts at a multiple of its element size in the flat bucket."""
    return sorted(tensors.items(), key=lambda item: -item[1].element_size())


def flat_bytes(tensors: Mapping[str, Tensor]) -> Tensor:
    """uint8 [total bytes]: all tensors in the order of `in_order`."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in in_order(tensors)])


def pause_body(mode: PauseMode) -> dict[str, Any]:
    """POST /pause_generation."""
    return {"mode": mode}


def resume_body() -> dict[str, Any]:
    """POST /continue_generation."""
    return {"torch_empty_cache": False}


def abort_body(request_id: str | None) -> dict[str, Any]:
    """POST /abort_request: one request, or all with None."""
    return {"rid": "", "abort_all": True} if request_id is None else {"rid": request_id}


def memory_body(tags: Sequence[str]) -> dict[str, Any]:
    """POST /release_memory_occupation and /resume_memory_occupation: of "weights", "kv_cache", "cuda_graph"."""
    return {"tags": list(tags)}


def checksum_body(skip: Sequence[str]) -> dict[str, Any]:
    """POST /weights_checker: a hash per weight whose name holds none of the strings in `skip`."""
    return {"action": "checksum", "skip_tensor_list": list(skip)}
