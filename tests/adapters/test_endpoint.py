"""A policy behind an OpenAI-compatible server that is busy for a moment, for good, or silent."""

import dataclasses
import json
import signal
import subprocess
import sys
import threading
from itertools import pairwise

import pytest
import torch

from creditgraph.adapters.endpoint import RETRIES, EndpointPolicy
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rows import Rollouts
from creditgraph.components.models.load import load_tokenizer
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import ConfigError, DataError, RunError
from creditgraph.pipeline.core.handles import Requests, Sampling
from creditgraph.pipeline.core.jagged import Jagged
from tests.adapters.tiny_server import tiny_server
from tests.http_server import serving

CONTEXT, TOKENS = (Jagged.from_rows(rows, torch.int32) for rows in ([[3], [4], [5]], [[6, 7], [8], [9, 4]]))


@pytest.fixture
def server():
    with tiny_server() as server:
        yield server


def at(server, **more):
    return EndpointPolicy(f"{server.url}/v1", "tiny", load_tokenizer(ModelSpec(path="tiny")), **more)


def test_a_request_that_fails_once_is_sent_again(server):
    expected = at(server).score(CONTEXT, TOKENS).logprobs.values
    assert expected.isfinite().all()
    server.requests.clear()
    server.script = ["fail"]
    found = at(server, batch=2).score(CONTEXT, TOKENS).logprobs.values
    torch.testing.assert_close(found, expected)
    assert len(server.requests) == 3  # of two


def test_a_server_that_stays_busy_is_an_error_after_further_tries(server):
    server.script = ["fail"] * 10
    with pytest.raises(RunError, match="HTTP 500 no memory; expected the reply of an OpenAI-compatible server"):
        at(server).score(CONTEXT, TOKENS)
    assert len(server.requests) == RETRIES + 1


def test_rows_are_continued_each_with_its_seed_and_its_budget(server):
    rows = Jagged.from_rows([[46, 3], [46, 5], [46, 3]], torch.int32)
    asked = Requests(
        tokens=rows,
        seed=torch.tensor([1, 2, 3]) << 40,
        sampling=Sampling(max_tokens=9, temperature=1.0, top_p=0.5, top_k=7),
        max_tokens=torch.tensor([4, 9, 1]),
    )
    done = at(server, sampling={"min_p": 0.1}).generate(asked)
    sent = sorted((body["prompt"], body["max_tokens"], body["seed"]) for _, body, _ in server.requests)
    assert sent == [([46, 3], 1, 3 << 8), ([46, 3], 4, 1 << 8), ([46, 5], 9, 2 << 8)]
    for _, body, _ in server.requests:
        assert (body["top_p"], body["top_k"], body["min_p"], body["return_token_ids"]) == (0.5, 7, 0.1, True)
    assert len({body["cache_salt"] for _, body, _ in server.requests}) == 1
    for ids, reason, text, most in zip(done.tokens.to_lists(), done.finish_reason, done.text, [4, 9, 1], strict=True):
        assert reason == ("eos" if ids[-1] == 1 else "length")
        assert len(ids) <= most
        assert reason == "eos" or len(ids) == most
        assert text == at(server).tokenizer.decode(ids)
    known = at(server).score(rows, done.tokens).logprobs.values
    torch.testing.assert_close(done.logprobs.values, known, atol=1e-5, rtol=1e-5)
    assert server.requests[-1][1]["cache_salt"] != server.requests[0][1]["cache_salt"]
    assert (body["repetition_penalty"], body["skip_special_tokens"]) == (1.0, False)
    colder = dataclasses.replace(asked, sampling=Sampling(temperature=0.5))
    assert at(server).generate(colder).logprobs.values.isnan().all()
    assert (server.requests[-1][1]["top_p"], server.requests[-1][1]["top_k"]) == (1.0, -1)


def test_thoughts_are_not_sampled_at_an_endpoint(server):
    asked = Requests(tokens=CONTEXT, seed=torch.arange(3), sampling=Sampling(stop=("x",)))
    with pytest.raises(RunError, match=r"asked to sample up to a stop string.*Set the node's mode to plain, line or"):
        at(server).generate(asked)
    assert not server.requests


REWARD = "def reward(response, answer):\n    return len(response) % 7 / 8 if answer == '4' else 1.0\n"
ROWS = ([3, 4, 44, 7, 45], [6, 7, 8])


def vineppo(url, folder, *more):
    (folder / "mine.py").write_text(REWARD)
    return CreditGraph(
        "vineppo",
        *("model=tiny", "segmenter.use=segmenter.fixed", "segmenter.tokens=2", "value.continuations=2"),
        *("verifier.use=verifier.function", f"verifier.function={folder / 'mine.py'}:reward", "value.temperature=0"),
        *(f"--endpoint={url}/v1", "--model=tiny", *more),
    )


def batch(answer="4", **more):
    return Rollouts(
        mask=Jagged.from_rows([[1] * len(row) for row in ROWS]).to_padded(),
        rewards=torch.tensor([1.0, 0.0]),
        group=["a", "a"],
        tokens=Jagged.from_rows(ROWS, torch.int64).to_padded(),
        prompts=[[46, 3], [46, 3]],
        **({"answers": [answer] * 2} | more),
    )


def test_a_graph_continues_responses_at_an_endpoint_and_verifies_them_itself(server, tmp_path, policy):
    graph = vineppo(server.url, tmp_path, "value.max_tokens=8")
    found = graph(batch())
    budgets = sorted((len(body["prompt"]) - 2, body["max_tokens"]) for _, body, _ in server.requests)
    assert budgets == [(0, 8)] * 4 + [(2, 6)] * 4 + [(4, 4)] * 2
    for i, (row, reward) in enumerate(zip(ROWS, (1.0, 0.0), strict=True)):
        values = []
        for start in range(0, len(row), 2):
            state = Jagged.from_rows([[46, 3, *row[:start]]], torch.int32)
            sampling = Sampling(max_tokens=8 - start, temperature=0.0)
            more = policy.generate(Requests(tokens=state, seed=torch.tensor([0]), sampling=sampling)).tokens.to_lists()
            text = policy.tokenizer.decode([*row[:start], *more[0]]).removesuffix(policy.tokenizer.eos_token)
            values.append(len(text.rstrip()) % 7 / 8)
        gains = [b - a for a, b in pairwise([*values, reward])]
        assert len(set(gains)) == len(gains)
        expected = [gain for gain, k in zip(gains, [2] * len(gains), strict=True) for _ in range(k)][: len(row)]
        assert found[i, : len(row)].tolist() == pytest.approx(expected, abs=1e-6)
    # What was verified is not remembered for the group of the next batch, which has another answer.
    other = graph(batch(answer="5"))
    assert other[0].tolist() == pytest.approx([0.0] * 5, abs=1e-6)
    assert other[1, :3].tolist() == pytest.approx([0.0, 0.0, -1.0], abs=1e-6)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ([], "it samples; say how many tokens a whole response may have, value.max_tokens=4096 for example"),
        (["value.max_tokens=8", "value.mode=line"], "value.mode=line has no effect here"),
    ],
)
def test_settings_of_an_endpoint_that_cannot_work(more, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        vineppo("http://localhost:1", tmp_path, *more)


def test_a_server_says_what_it_holds_and_several_have_a_part_each(server, policy):
    expected = at(server).score(CONTEXT, TOKENS).logprobs.values
    with tiny_server() as other:
        server.requests.clear()
        both = EndpointPolicy([f"{server.url}/v1", f"{other.url}/v1/"], tokenizer=policy.tokenizer, batch=1)
        torch.testing.assert_close(both.score(CONTEXT, TOKENS).logprobs.values, expected)
        paths = [[path for path, _, _ in one.requests] for one in (server, other)]
    assert paths == [["/v1/models", "/v1/completions", "/v1/completions"], ["/v1/completions"]]
    with pytest.raises(ConfigError, match=r"--endpoint=localhost:1/v1: url: expected http://"):
        CreditGraph("igpo", "--endpoint=localhost:1/v1", "model=tiny")
    with pytest.raises(ConfigError, match="expected --endpoint=URL, maybe with --model=NAME, or policy="):
        CreditGraph("igpo", "--model=tiny", "model=tiny")


def test_a_graph_that_asks_no_model_has_no_endpoint():
    with pytest.raises(ConfigError, match="'grpo': it asks no model, so --endpoint= has no effect"):
        CreditGraph("grpo", "--endpoint=http://localhost:1/v1", "--model=tiny")


def test_rollouts_that_cannot_be_continued_or_verified(server, tmp_path):
    graph = vineppo(server.url, tmp_path, "value.max_tokens=8")
    gap = batch().mask.clone()
    gap[0, 1] = 0
    with pytest.raises(DataError, match="in one of them the policy did not sample all tokens, so what follows is not"):
        graph(dataclasses.replace(batch(), mask=gap))
    fixed = ["model=tiny", "segmenter.use=segmenter.fixed", "verifier.use=verifier.exact", "value.max_tokens=8"]
    exact = CreditGraph("vineppo", *fixed, f"--endpoint={server.url}/v1", "--model=tiny")
    with pytest.raises(
        DataError, match=r"verifier\.exact reads reference answers, which the rollouts lack; see Rollout"
    ):
        exact(batch(answers=None))
    assert not server.requests


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
            assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]  # the limit of a request is half an hour
        finally:
            process.kill()
            silent.set()
