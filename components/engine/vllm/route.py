"""The path by which rows are sampled and scored in a vLLM server: requests and replies have columns, not objects.

vLLM's own /inference/v1/generate sends some 150 bytes of JSON per token; here it is 16. A reply has

- `id`: the request's;
- `tokens`: sampled ids, `logprobs` and `entropies`: of them (columns as `columns.py` writes them),
  and `crc` of the three. With `context` the latter two are of the prompt's tokens after that many; `tokens` are the
  `top` most likely ones in the place of each, and their log-probs follow those of the prompt's tokens;
- `reason`: vLLM's finish reason, null before the last part of a streamed reply;
- `versions`: labels of the weights that sampled, in the last part;
- `experts`: those chosen for each token but the last, in the last part of servers that return them: a column of vLLM's
  own, [tokens, layers, experts per token] as .npy in base64.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from creditgraph.components.engine.vllm.columns import (
    crc_of,
    pack_array,
    pack_ids,
    pack_numbers,
    read_ids,
    split_scores,
)
from creditgraph.components.engine.vllm.key import KeyMiddleware
from creditgraph.components.engine.vllm.scheduler import scoring_parameters

ROWS = "/creditgraph/rows"

_Receive = Callable[[], Awaitable[dict[str, Any]]]
_Send = Callable[[dict[str, Any]], Awaitable[None]]


class RowsMiddleware:
    """ASGI middleware of vLLM's API server that serves POST `ROWS`.

    Args:
        app: the application that gets the other requests.
    """

    def __init__(self, app: Callable[[dict[str, Any], _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: _Receive, send: _Send) -> None:
        """Serves a request, until it ends or its client is gone; vLLM then ends it too."""
        if scope["type"] != "http" or scope["path"] != ROWS:
            return await self._app(scope, receive, send)
        body = await _read(receive)
        work = asyncio.create_task(_serve(scope["app"].state, body, send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        return None


class GuardedRows(KeyMiddleware):
    """`RowsMiddleware` behind the server's key, which covers all other paths too."""

    def __init__(self, app: Callable[[dict[str, Any], _Receive, _Send], Awaitable[None]]) -> None:
        super().__init__(RowsMiddleware(app))


async def _serve(state: Any, body: bytes, send: _Send) -> None:
    """One request, as one reply or as server-sent events; 400 for one that vLLM refuses."""
    begun = False
    try:
        request = json.loads(body)
        stream = bool(request.get("stream"))
        async with contextlib.aclosing(_parts(state, request)) as parts:
            async for part in parts:
                content = json.dumps(part).encode()
                if not begun:
                    await _start(send, 200, b"text/event-stream" if stream else b"application/json")
                    begun = True
                if stream:
                    content = b"data: " + content + b"\n\n"
                await send({"type": "http.response.body", "body": content, "more_body": stream})
        if stream:
            await send({"type": "http.response.body", "body": b""})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if begun:
            raise
        # vLLM's own errors about a request are ValueErrors.
        await _start(send, 400, b"application/json")
        message = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
        await send({"type": "http.response.body", "body": message})


async def _parts(state: Any, request: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    """The reply's parts."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    context = request.get("context")
    sampling = request["sampling"]
    if context is not None:
        sampling = scoring_parameters(context, sampling["temperature"], request["top"])
    params = SamplingParams(
        **sampling,
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA if request.get("stream") else RequestOutputKind.FINAL_ONLY,
    )
    adapter = request.get("adapter")
    if adapter and adapter not in state.openai_serving_models.lora_requests:
        raise ValueError(f"no adapter is called '{adapter}'")
    outputs = state.engine_client.generate(
        {"prompt_token_ids": read_ids(request["tokens"]), **cache_of(request.get("cache"))},
        params,
        request["id"],
        lora_request=state.openai_serving_models.lora_requests[adapter] if adapter else None,
    )
    async for output in outputs:
        (done,) = output.outputs
        if done.finish_reason == "error":
            raise RuntimeError(f"request {request['id']} failed in vLLM's engine")
        if context is None:
            # Two numbers per token: log-prob and minus the entropy.
            flat = done.logprobs.logprobs if done.logprobs else []
            tokens, logprobs, entropies = done.token_ids, flat[::2], [-value for value in flat[1::2]]
        else:
            logprobs, entropies, tokens, top_logprobs = split_scores(output.prompt_logprobs)
            logprobs += top_logprobs
        part = {
            "id": request["id"],
            "tokens": pack_ids(tokens),
            "logprobs": pack_numbers(logprobs),
            "entropies": pack_numbers(entropies),
            "reason": done.finish_reason,
            "versions": [str(span.version) for span in done.weight_versions or ()],
        }
        if done.routed_experts is not None:
            part["experts"] = pack_array(done.routed_experts)
        yield part | {"crc": crc_of(part)}


def cache_of(label: str | None) -> dict[str, str]:
    """What keeps a request's part of vLLM's prefix cache apart from that of other weights; None: nothing does."""
    return {} if label is None else {"cache_salt": label}


async def _start(send: _Send, status: int, kind: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})


async def _read(receive: _Receive) -> bytes:
    parts = []
    more = True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message["type"] == "http.request" and message.get("more_body", False)
    return b"".join(parts)


async def _until_gone(receive: _Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
