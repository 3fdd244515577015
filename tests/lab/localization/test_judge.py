"""The judge over HTTP: a real server that answers, fails, hangs and talks nonsense; answers are asked for once."""

import json
import time
from dataclasses import replace

import pytest
from failures_by_hand import Reset, failure
from http_server import serving

from creditgraph.lab.localization import judge
from creditgraph.lab.localization.judge import JudgeSettings, judge_labels, request
from creditgraph.pipeline.core.errors import ConfigError, RunError


@pytest.fixture
def server():
    """Answers with the entry of `replies` whose key is in the request, or with `reply`."""

    def answer(how, path, body):
        content = body["messages"][0]["content"]
        reply = next((text for part, text in http.replies.items() if part in content), http.reply)
        if reply == "hang":
            time.sleep(1.5)
        completion = json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]})
        return 503 if reply == "busy" else 200, {"busy": "busy", "html": "<html>"}.get(reply, completion)

    with serving(answer) as http:
        http.replies, http.reply = {}, "The sum is off, so \\boxed{2}"
        http.settings = JudgeSettings(url=f"{http.url}/v1/", model="big", seconds=0.5, retries=1, wait=0.01)
        yield http


@pytest.fixture
def ask(server, tmp_path):
    def call(failures, **changes):
        return judge_labels(replace(server.settings, **changes), failures, tmp_path / "a" / "answers.jsonl", print)

    return call


def test_the_request(server, ask, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
    labels = ask([failure(1, solution="Add them.")])
    assert labels.step == {1: 2}
    ((path, body, key),) = server.requests
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("big", 0, 4096)
    content = body["messages"][0]["content"]
    assert "exactly one number in a box, \\boxed{N}: the number of that step, from 1 to 6" in content
    assert "Problem: Problem 1?" in content
    assert "Step 6: Step of problem 1, number 6" in content
    assert "The right answer to the problem is: 7" in content
    assert "A right solution:\nAdd them." in content
    assert "right answer" not in request(failure(1, answer=""))


def test_answers_that_name_no_step_are_no_label_and_are_counted_apart(server, ask):
    server.replies = {
        "Problem 1?": "\\boxed{4}",
        "Problem 2?": "Step 3 breaks; the right value is \\boxed{42}",  # labelled, and also out of range
        "Problem 3?": "\\boxed{42}",
        "Problem 4?": "Step 0",
        "Problem 5?": "I cannot tell.",
        "Problem 6?": None,
        "Problem 7?": " **5**.\n",
        "Problem 8?": "-3",
    }
    labels = ask([failure(i) for i in range(1, 9)])
    assert labels.step == {1: 4, 2: 3, 7: 5}
    assert labels.out_of_range == 1
    assert labels.unlabelled == {"out of range": 3, "no number": 2}
    assert labels.notes == []


def test_a_second_call_asks_nothing_and_another_model_asks_again(server, ask):
    failures = [failure(i) for i in range(1, 6)]
    assert len(ask(failures).step) == 5
    assert len(server.requests) == 5
    assert ask(failures, url="http://127.0.0.1:1/v1").step == dict.fromkeys(range(1, 6), 2)  # nobody listens there
    assert len(server.requests) == 5
    ask([*failures, failure(6)])
    assert len(server.requests) == 6
    ask(failures[:1], model="other")
    ask(failures[:1], max_tokens=7)
    ask([replace(failures[0], answer="8")])
    assert len(server.requests) == 9


def test_failed_requests_are_counted_and_sent_again_by_the_next_call(server, ask):
    server.replies = {"Problem 2?": "busy", "Problem 3?": "hang", "Problem 4?": "html"}
    failures = [failure(i) for i in range(1, 6)]
    labels = ask(failures)
    assert labels.step == {1: 2, 5: 2}
    assert labels.unlabelled == {"request failed": 3}
    for reason in ("HTTP 503 busy", "in 0.5 s", "the response is not JSON that can be read"):
        assert (
            sum(note.startswith("requests to the judge that failed: 1 (") and reason in note for note in labels.notes)
            == 1
        )
    # One request each, and one further try of those that may pass.
    assert len(server.requests) == 5 + 2
    server.replies = {}
    assert ask(failures).step == dict.fromkeys(range(1, 6), 2)
    assert len(server.requests) == 7 + 3


def test_a_line_that_was_cut_off_is_asked_again_and_harms_no_other(server, ask, tmp_path):
    failures = [failure(i) for i in range(1, 4)]
    ask(failures)
    cache = tmp_path / "a" / "answers.jsonl"
    cache.write_bytes(cache.read_bytes()[:-20])
    assert len(ask(failures).step) == 3
    assert len(server.requests) == 4
    assert len(ask(failures).step) == 3
    assert len(server.requests) == 4
    assert "secret" not in cache.read_text()


def test_an_interrupted_call_keeps_its_answers(server, ask, tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "REPORT_EVERY", 5)

    def interrupt(line):
        assert line == "judge: 5 of 40 requests"
        raise KeyboardInterrupt

    cache = tmp_path / "a" / "answers.jsonl"
    failures = [failure(i) for i in range(40)]
    with pytest.raises(KeyboardInterrupt):
        judge_labels(replace(server.settings, concurrency=1), failures, cache, interrupt)
    time.sleep(0.3)  # a request that was under way
    sent = len(server.requests)
    assert 5 <= sent < 40
    assert len(cache.read_text().splitlines()) == 5
    assert len(ask(failures).step) == 40
    assert len(server.requests) == sent + 35


def test_a_server_that_dies_is_given_up(server, ask, monkeypatch):
    monkeypatch.setattr(judge, "GIVE_UP", 3)
    server.replies = {"Problem 1?": "\\boxed{1}"}
    server.reply = "busy"
    labels = ask([failure(i) for i in range(1, 41)], retries=0, concurrency=1)
    assert labels.step == {1: 1}
    assert labels.unlabelled == {"request failed": 39}
    assert any("given up after 3 failures in a row" in note for note in labels.notes)
    assert len(server.requests) < 10


def test_a_wrong_address_costs_one_request(server, ask):
    server.reply = "busy"
    with pytest.raises(RunError, match=r"the first of 9 requests failed \(.*HTTP 503 busy\).*model 'big'"):
        ask([failure(i) for i in range(9)])
    assert len(server.requests) == 2
    for url in ("localhost:8000", "ftp://h/v1", "http://"):
        with pytest.raises(ConfigError, match="expected the server's base URL"):
            JudgeSettings(url=url, model="m")


def test_the_command_with_a_judge(server, make_run, localization):
    # The task is not the embedded one, so that only the judge knows. It names step 2 for both failures.
    run = make_run([Reset(3, 2, (True, False)), Reset(3, 4, (False, None))], oracle=False)
    judged = ["--judge", server.settings.url, "--judge-model", "big"]
    code, result, _ = localization(run, *judged)
    assert code == 0
    assert result["truth"] == "judge big"
    assert result["labelled"] == 2
    assert result["deviations"] == {"0": 1, "2": 1}
    asked = len(server.requests)
    assert localization(run, *judged)[1] == result
    assert len(server.requests) == asked
    code, _, error = localization(run, "--judge", server.settings.url)
    assert code == 2
    assert "a judge also needs --judge-model" in error


def test_a_judge_of_labelled_traces(server, localization, tmp_path):
    # The judge names step 2 of both; the labels say 2 and 1 (mistake_index counts from 0).
    file = tmp_path / "traces.jsonl"
    row = {"input": "q", "steps": ["a", "b", "c"], "answer": "1", "target": "2"}
    file.write_text("".join(json.dumps(row | {"mistake_index": i}) + "\n" for i in (1, 0)))
    code, result, _ = localization(file, "--judge", server.settings.url, "--judge-model", "big")
    assert code == 0
    assert (result["exact"]["count"], result["clean"]["count"]) == (1, 1)
    assert (tmp_path / "traces" / "answers.jsonl").exists()
