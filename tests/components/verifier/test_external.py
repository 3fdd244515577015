"""A verifier over HTTP: a real server that answers, fails, hangs and talks nonsense."""

import contextlib
import gzip
import json
import re
import socket
import threading
import time

import pytest
from http_server import serving

from creditgraph.components.verifier.base import Item
from creditgraph.components.verifier.external import External
from creditgraph.pipeline.core.component import Context


def judge(how, path, body):
    if how == "hang":
        time.sleep(1.5)
    if how in ("busy", "refuse"):
        return 503 if how == "busy" else 400, "busy"
    results = [{"value": float(i["extracted"] == i["answer"]), "detail": "seen"} for i in body["items"]]
    if how == "values":
        results = [{"value": v} for v in (None, True, float("nan"), 0.5)][: len(results)]
    return 200, "<html>" if how == "nonsense" else json.dumps({"results": results[1:] if how == "short" else results})


@pytest.fixture
def server():
    with serving(judge) as http:
        http.url += "/verify"
        yield http


def verify(toolbox, server, texts, node=None, **settings):
    node = node or toolbox.start(External, url=server.url, **{"wait": 0.01, **settings})
    prompts = toolbox.prompts(["p"] * len(texts), answers=["1"] * len(texts))
    rewards = node.run().verifier.verify(prompts, toolbox.trajectories(texts, prompt_uid=prompts.uid))
    return rewards, node


def test_batches_keep_their_order(toolbox, server):
    texts = [f"\\boxed{{{i % 3}}} {i}" for i in range(20)]
    rewards, node = verify(toolbox, server, texts, batch=3, concurrency=4, headers={"Authorization": "key"})
    assert rewards.correct.tolist() == [i % 3 == 1 for i in range(20)]
    assert rewards.detail == ["seen"] * 20
    assert sorted(len(body["items"]) for _, body, _ in server.requests) == [2] + [3] * 6
    assert {key for _, _, key in server.requests} == {"key"}
    verify(toolbox, server, texts, node)
    assert len(server.requests) == 7  # remembered
    node.close()


def test_failures_that_pass_are_tried_again(toolbox, server):
    server.script = ["busy", "busy"]
    rewards, node = verify(toolbox, server, ["\\boxed{1}"])
    assert rewards.correct.tolist() == [True]
    assert len(server.requests) == 3
    node.close()


def test_failures_that_stay_are_reported_and_requested_again_the_next_time(toolbox, server):
    server.script = ["busy", "busy"]
    rewards, node = verify(toolbox, server, ["\\boxed{1}"], retries=1)
    assert rewards.valid.tolist() == [False]
    assert rewards.detail == [f"{server.url}: HTTP 503 busy"]
    rewards, _ = verify(toolbox, server, ["\\boxed{1}"], node)
    assert rewards.correct.tolist() == [True]
    node.run()
    assert node.context.metrics["failures"] == 1
    node.close()


@pytest.mark.parametrize(
    ("how", "detail"),
    [
        ("refuse", "HTTP 400 busy"),
        ("short", "0 results for 1 items"),
        ("nonsense", "the response is not JSON that can be read: b'<html>'"),
    ],
)
def test_replies_that_cannot_be_used(toolbox, server, how, detail):
    server.script = [how]
    rewards, node = verify(toolbox, server, ["\\boxed{1}"])
    assert rewards.detail == [f"{server.url}: {detail}"]
    assert len(server.requests) == 1
    node.close()


def test_values_that_are_no_numbers_cost_their_row_alone(toolbox, server):
    server.script = ["values"]
    rewards, node = verify(toolbox, server, [f"\\boxed{{1}} {i}" for i in range(4)])
    assert rewards.valid.tolist() == [False, False, False, True]
    assert rewards.value.tolist() == [0, 0, 0, 0.5]
    node.close()


def test_a_server_that_hangs_or_is_not_there(toolbox, server):
    server.script = ["hang"]
    rewards, node = verify(toolbox, server, ["\\boxed{1}"], seconds=0.3, retries=0)
    assert rewards.detail == [f"no response from {server.url} in 0.3 s"]
    node.close()
    node = toolbox.start(External, url="http://127.0.0.1:9/verify", retries=1, wait=0.01)
    rewards, _ = verify(toolbox, server, ["\\boxed{1}"], node)
    assert "http://127.0.0.1:9/verify" in rewards.detail[0]
    node.close()


def test_a_url_is_required():
    with pytest.raises(ValueError, match=r"url: expected http.*got 'verify'"):
        External.Config(url="verify")


def raw_server(send):
    """A server that reads a request and lets `send(connection)` answer; the URL."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection):
        with connection, contextlib.suppress(OSError):
            asked = b""
            while not asked.endswith(b"]}"):
                asked += connection.recv(1 << 20)
            send(connection)

    threading.Thread(target=serve, daemon=True).start()
    return listening, f"http://127.0.0.1:{listening.getsockname()[1]}"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def body(raw, further=b""):
    return lambda connection: connection.sendall(HEAD + further + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)


def drip(begin):
    """A byte now and then, for ever: each read is in time, the whole never is."""

    def send(connection):
        connection.sendall(begin)
        for _ in range(200):
            time.sleep(0.1)
            connection.sendall(b" ")

    return send


def results(value):
    return body(b'{"results": [%s]}' % value)


HOSTILE = {
    "a byte of the body now and then": (drip(HEAD + b"Content-Length: 1000\r\n\r\n"), "no response from .* in 1 s"),
    "a byte of a header now and then": (drip(b"HTTP/1.1 200 OK\r\nX: "), "no response from .* in 1 s"),
    "a number of 400 digits": (results(b'{"value": ' + b"9" * 400 + b"}"), "no finite number"),
    "a number of 5,000 digits": (results(b'{"value": ' + b"9" * 5000 + b"}"), "not JSON that can be read"),
    "200,000 brackets": (body(b"[" * 200_000), "not JSON that can be read"),
    "1e300": (results(b'{"value": 1e300}'), "no finite number"),
    "NaN": (results(b'{"value": NaN}'), "no finite number"),
    "a text as correct": (results(b'{"value": 1, "correct": "false"}'), "'correct' and 'valid' are not true or false"),
    "null as valid": (results(b'{"value": 1, "valid": null}'), "'correct' and 'valid' are not true or false"),
    "a gzip bomb": (body(gzip.compress(bytes(1 << 26)), b"Content-Encoding: gzip\r\n"), "is compressed .gzip."),
    "65 MiB": (body(b" " * (65 << 20)), "longer than 64 MiB|no response"),
    "a list": (body(b"[1]"), "not JSON with 'results'"),
}


@pytest.mark.parametrize(("send", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_server_makes_an_item_invalid_and_ends_nothing(send, reason):
    listening, url = raw_server(send)
    component = External(External.Config(url=url, seconds=1.0, retries=0))
    component.setup(Context(node="verifier"))
    begin = time.monotonic()
    with listening, contextlib.closing(component):
        (verdict,) = component.verdicts([Item(text="1", answer="1", metadata={})])
    assert time.monotonic() - begin < 8
    assert (verdict.valid, verdict.correct, verdict.value) == (False, False, 0.0)
    assert re.search(reason, verdict.detail), verdict.detail
