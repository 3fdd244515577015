"""A verifier over HTTP: a real server that answers, fails, hangs and talks nonsense."""

import json
import time

import pytest
from http_server import serving

from creditgraph.components.verifier.external import External


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
        ("nonsense", "the response is not JSON with 'results'"),
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
