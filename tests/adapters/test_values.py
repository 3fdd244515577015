"""Values of imported rollouts from a server with the embedded model, and the credit that is shown with them."""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import torch

from creditgraph.adapters.commands import values
from creditgraph.adapters.sampled_values import Settings, ValueSampler
from creditgraph.components.text.templates import extract_answer
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.core.errors import ConfigError, RunError
from creditgraph.pipeline.run.recording import read_payload, recorded_sums
from tests.adapters.test_imports import command
from tests.adapters.tiny_server import tiny_server

PROMPT = "<solve> 5 s1 * 3 s2 + 6 </problem>"
RIGHT = " s1 5 * 3 2 </thought> s2 2 + 6 8 \\boxed{ 8 } </thought>"
WRONG = " s1 5 * 3 7 </thought> s2 7 + 6 0 \\boxed{ 0 } </thought>"


@pytest.fixture(scope="module")
def server():
    with tiny_server() as server:
        yield server


@pytest.fixture
def run(tmp_path, server):
    rows = [
        {"prompt": PROMPT, "response": text, "reward": reward, "answer": "8", "advantage": 2 * reward - 1}
        for text, reward in ((RIGHT, 1.0), (WRONG, 0.0), (RIGHT, 1.0))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = ["--endpoint", f"{server.url}/v1", "--model", "tiny"]
    command(tmp_path / "rows.jsonl", "--from", "jsonl", "--tokenizer", "tiny", *policy, "-o", tmp_path / "run")
    server.requests.clear()
    return tmp_path / "run"


def sample(run, server, *arguments, url=""):
    parser = argparse.ArgumentParser()
    values.configure(parser)
    given = [run, "--endpoint", url or f"{server.url}/v1", "--model", "tiny", *arguments]
    return values.main(parser.parse_args([str(a) for a in given]))


def by_hand(server, body):
    """The share of right answers among the server's continuations of a request, which its seed determines."""
    choices = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"]
    return sum(extract_answer(choice["text"]) == "8" for choice in choices) / len(choices)


def test_values_are_means_of_rewards_with_their_errors(run, server, capsys):
    assert sample(run, server, "--verifier", "verifier.exact", "--rollouts", "32", "--rows", "2") == 0
    bodies = [body for _, body, _ in server.requests]
    # Before the first thought both rows are the same; after it one is right and one is wrong.
    assert len(bodies) == 3
    assert {(b["n"], b["temperature"], b["top_k"], b["repetition_penalty"]) for b in bodies} == {(32, 1.0, -1, 1.0)}
    start = min((b["prompt"] for b in bodies), key=len)
    assert all(b["prompt"][: len(start)] == start for b in bodies)
    assert len({b["seed"] for b in bodies}) == 3
    assert "3 requests for 2 rollouts of iteration 0: at most" in capsys.readouterr().out
    found = read_payload(run / "record" / "values.values" / "000000.parquet")
    ends = read_payload(run / "record" / "values.segments" / "000000.parquet").ends.to_lists()
    rewards = read_payload(run / "record" / "rollouts.rewards" / "000000.parquet")
    mean = {tuple(body["prompt"]): by_hand(server, body) for body in bodies}
    prompt = read_payload(run / "record" / "rollouts.prompts" / "000000.parquet").tokens.row(0).tolist()
    responses = read_payload(run / "record" / "rollouts.trajectories" / "000000.parquet")
    for uid, row, errors, cuts in zip(found.uid, found.values.rows(), found.errors.rows(), ends, strict=True):
        outcome = float(rewards.value[rewards.index_of(uid[None])])
        assert len(row) == len(cuts) + 1 == 3
        assert row[-1] == outcome  # known, not sampled
        tokens = responses.response_tokens.row(int(responses.index_of(uid[None]))).tolist()
        assert row[:-1].tolist() == [mean[(*prompt, *tokens[:start])] for start in (0, cuts[0])]
        # Of 32 zeros and ones with mean p the standard error is √(p(1 − p)/31).
        torch.testing.assert_close(errors[:-1], (row[:-1] * (1 - row[:-1]) / 31).sqrt(), atol=1e-6, rtol=1e-5)
    assert {"values.values/000000.parquet", "values.segments/000000.parquet"} <= set(recorded_sums(run / "record"))


def test_credit_and_report_show_them(run, server, capsys):
    sample(run, server, "--verifier", "verifier.exact", "--rollouts", "8", "--rows", "2")
    capsys.readouterr()
    recipes = ["recipe=toy_rredcot", "segmenter.use=segmenter.thought"]
    assert main(["credit", *recipes, str(run)]) == 0
    out = capsys.readouterr().out
    assert "true advantage" in out
    assert "standard error of a value" in out
    shown = {line.split("  ")[0].strip(): line for line in out.splitlines()}
    assert "correlation with the true advantage" in shown["recorded rollouts.credit"]
    assert "correlation with the true advantage" in shown["toy_rredcot"]  # the server scored the answers
    assert any(body.get("echo") for _, body, _ in server.requests)
    assert main(["report", str(run)]) == 0
    assert "not recorded in every iteration" not in capsys.readouterr().out
    assert main(["credit", "recipe=toy_vineppo", "value.mode=plain", str(run)]) == 0
    assert "nothing here verifies what it sampled: of" in capsys.readouterr().out


def test_other_boundaries_functions_and_texts(run, server, tmp_path):
    (tmp_path / "mine.py").write_text("def reward(response, answer):\n    return float(len(response) > 1)\n")
    settings = Settings(
        url=f"{server.url}/v1", model="tiny", rollouts=2, rows=1, segmenter="fixed", settings={"tokens": 6},
        verifier=f"{tmp_path / 'mine.py'}:reward", text=True,
    )  # fmt: skip
    with ValueSampler(run, settings) as sampler:
        plan = sampler.plan()
        sampled = sampler.sample(plan)
    assert plan.segments.ends.row(0)[:2].tolist() == [6, 12]
    assert set(sampled.values.values.row(0)[:-1].tolist()) == {1.0}
    assert all(isinstance(body["prompt"], str) for _, body, _ in server.requests)
    assert sampled.tokens > 0
    with ValueSampler(run, Settings(url=f"{server.url}/v1", model="tiny", segmenter="newline")) as sampler:
        assert sampler.plan().cost(4)[0] == 1  # no line ends, and all rows have one prompt


def test_a_refused_request_ends_those_that_are_out(run):
    others, failed, ended = threading.Event(), threading.Event(), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["prompt"] == first:
                others.wait(60)
                self.send_error(400, "no such model")
            else:
                others.set()
                ended.append(failed.wait(60))

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as slow:
        slow.daemon_threads = False  # the end of the block waits for them
        threading.Thread(target=slow.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{slow.server_port}/v1"
        settings = Settings(url=url, model="none", rollouts=2, rows=2, verifier="verifier.exact")
        with ValueSampler(run, settings) as sampler:
            plan = sampler.plan()
            first = list(next(iter(plan.states)))
            with pytest.raises(RunError, match="HTTP 400"):
                sampler.sample(plan)
        failed.set()
        slow.shutdown()
    assert ended
    assert all(ended), "requests without a reply kept the command waiting"


def test_mistakes_end_in_a_sentence(run, server):
    with pytest.raises(ConfigError, match="nothing in it can verify a new response"):
        sample(run, server)
    with pytest.raises(RunError, match=r"none of 6 continuations could be verified"):
        sample(run, server, "--verifier", "verifier.code", "--rollouts", "2", "--rows", "2")
    with pytest.raises(ConfigError, match="add --yes"):
        sample(run, server, "--verifier", "verifier.exact", "--rollouts", "4000")
    with pytest.raises(ConfigError, match="expected rollouts ≥ 2"):
        sample(run, server, "--rollouts", "1")
    with pytest.raises(ConfigError, match="expected http"):
        sample(run, server, url="localhost:8000")
    with pytest.raises(RunError, match="is not recorded in that iteration; recorded: \\[0\\]"):
        sample(run, server, "--iteration", "7")
    with pytest.raises(RunError, match=r"no such model.*Nothing was saved"):
        sample(run, server, "--verifier", "verifier.exact", "--model", "other")
    step = {"prompt_ids": [1], "tokens": [5], "reward": 0.5, "group": "a", "episode": 7}
    (run / "steps.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in (step, step | {"prompt_ids": [1, 5, 6]}))
    )
    command(run / "steps.jsonl", "--from", "jsonl", "--graph", "mt_grpo", "-o", run / "turns")
    with pytest.raises(ConfigError, match="its rows are turns of episodes"):
        sample(run / "turns", server, "--verifier", "verifier.exact")
    server.script[:] = ["fail"]
    assert sample(run, server, "--verifier", "verifier.exact", "--rollouts", "2", "--rows", "1") == 0  # asked again
    assert not (run / "record" / "values.values" / "000007.parquet").exists()
