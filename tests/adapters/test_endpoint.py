"""A policy behind an OpenAI-compatible server that is busy for a moment, for good, or silent."""

import json
import signal
import subprocess
import sys
import threading

import pytest
import torch

from creditgraph.adapters.endpoint import RETRIES, EndpointPolicy
from creditgraph.components.models.load import load_tokenizer
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.jagged import Jagged
from tests.adapters.tiny_server import tiny_server
from tests.http_server import serving

CONTEXT, TOKENS = (Jagged.from_rows(rows, torch.int32) for rows in ([[3], [4], [5]], [[6, 7], [8], [9, 4]]))


@pytest.fixture
def server():
    with tiny_server() as server:
        yield server


def policy(server, **more):
    return EndpointPolicy(f"{server.url}/v1", "tiny", load_tokenizer(ModelSpec(path="tiny")), **more)


def test_a_request_that_fails_once_is_sent_again(server):
    expected = policy(server).score(CONTEXT, TOKENS).logprobs.values
    assert expected.isfinite().all()
    server.requests.clear()
    server.script = ["fail"]
    found = policy(server, batch=2).score(CONTEXT, TOKENS).logprobs.values
    torch.testing.assert_close(found, expected)
    assert len(server.requests) == 3  # of two


def test_a_server_that_stays_busy_is_an_error_after_further_tries(server):
    server.script = ["fail"] * 10
    with pytest.raises(RunError, match="HTTP 500 no memory; expected the reply of an OpenAI-compatible server"):
        policy(server).score(CONTEXT, TOKENS)
    assert len(server.requests) == RETRIES + 1


def test_an_interrupt_ends_a_request_without_a_reply():
    silent, asked = threading.Event(), threading.Event()

    def answer(how, path, body):
        asked.set()
        silent.wait()
        return 200, json.dumps({})

    code = (
        "import signal, torch; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell's `&` ignores it
        "from creditgraph.adapters.endpoint import EndpointPolicy; "
        "from creditgraph.pipeline.core.jagged import Jagged; "
        "row = Jagged.from_rows([[3]], torch.int32); "
        "EndpointPolicy({url!r}, 'm', None).score(row, row)"
    )
    with serving(answer) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", code.format(url=server.url)], stderr=subprocess.PIPE, text=True
        )
        assert asked.wait(120)
        process.send_signal(signal.SIGINT)
        try:
            assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]  # the limit of a request is 120 s
        finally:
            process.kill()
            silent.set()
