"""The embedded model behind /v1/completions: token ids with `echo` and log-probs, or sampled continuations."""

import json
import threading
from contextlib import contextmanager

import torch

from creditgraph.components.engine.local.engine import LocalEngine
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.handles import Requests, Sampling
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Weights
from tests.http_server import serving


@contextmanager
def tiny_server():
    """A server as `tests.http_server.serving` makes it."""
    engine = LocalEngine(LocalEngine.Config())
    engine.setup(Context(node="engine", model=ModelSpec(path="tiny")))
    policy = engine.run(weights=Weights(version=0)).policy

    one_at_a_time = threading.Lock()

    def answer(how, path, body):
        if how == "fail":
            return 500, "no memory"
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": server.model}]})
        if path != "/v1/completions" or body["model"] != server.model:
            return 404, "no such model"
        with one_at_a_time:  # the engine serves one caller
            choices = scored(policy, body) if body.get("echo") else sampled(policy, body)
        return 200, json.dumps({"choices": choices, "usage": {"completion_tokens": sum(c["tokens"] for c in choices)}})

    with serving(answer) as server:
        server.model = "tiny"
        yield server
    engine.close()


def scored(policy, body):
    first = Jagged.from_rows([row[:1] for row in body["prompt"]], torch.int32)
    rest = Jagged.from_rows([row[1:] for row in body["prompt"]], torch.int32)
    found = policy.score(first, rest).logprobs.to_lists()
    # One more for the token that is sampled in any case.
    return [{"index": i, "tokens": 0, "logprobs": {"token_logprobs": [None, *x, -1.0]}} for i, x in enumerate(found)]


def sampled(policy, body):
    prompt, n = body["prompt"], body.get("n", 1)
    ids = policy.tokenizer(prompt, add_special_tokens=False)["input_ids"] if isinstance(prompt, str) else prompt
    requests = Requests(
        tokens=Jagged.from_rows([ids] * n, torch.int32),
        seed=torch.arange(n) + (body["seed"] << 8),
        sampling=Sampling(max_tokens=body["max_tokens"], temperature=body["temperature"]),
    )
    done = policy.generate(requests)
    rows, known = done.tokens.to_lists(), done.logprobs.to_lists()
    texts = policy.tokenizer.batch_decode(rows, skip_special_tokens=body.get("skip_special_tokens", True))
    choices = [{"index": i, "text": x, "tokens": len(row)} for i, (x, row) in enumerate(zip(texts, rows, strict=True))]
    if body.get("return_token_ids"):
        reasons = ["length" if reason == "length" else "stop" for reason in done.finish_reason]
        for choice, ids, logprobs, reason in zip(choices, rows, known, reasons, strict=True):
            choice |= {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}
    return choices
