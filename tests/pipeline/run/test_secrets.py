"""Secrets in settings reach no file of a run."""

import json
import logging

import pytest
import yaml
from http_server import serving

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose
from creditgraph.pipeline.run.compose.secrets import from_environment, public

TOKEN, PASSWORD, LITERAL = "tok-9f27ab", "pass-4411cd", "lit-77e0ee"


def judge(how, path, body):
    return 200, json.dumps({"results": [{"value": float(i % 2)} for i in range(len(body["items"]))]})


def test_no_file_of_a_run_or_report_has_a_secret(tmp_path, monkeypatch, caplog, capsys):
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    with serving(judge) as server:
        url = f"{server.url}/verify?next=http://user:{PASSWORD}@elsewhere"
        overrides = [
            "recipe=toy_grpo",
            "verifier.use=verifier.external",
            f"verifier.url='{url}'",
            "verifier.headers={Authorization: 'Bearer ${oc.env:REWARD_TOKEN}', X-API-Key: " + LITERAL + "}",
        ]
        small = ["run.iterations=2", "run.record.every=1", "prompts.batch=2", "evaluator.num_problems=2"]
        assert main(["train", *overrides, *small]) == 0
        assert {f"Bearer {TOKEN}"} == {key for _, _, key in server.requests}  # it was sent
        (run,) = (tmp_path / "runs").iterdir()
        with caplog.at_level(logging.WARNING, "creditgraph"):
            replayed = main(["replay", str(run), "--iteration", "1", "--node", "rewards"])
    assert replayed == 0
    assert "secrets are masked there (X-API-Key, url)" in caplog.text
    assert main(["report", str(run), "-o", "report.html"]) == 0
    said = capsys.readouterr()
    texts = {str(f): f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} | {
        "output": (said.out + said.err).encode()
    }
    assert len(texts) > 10
    found = [(f, s) for f, raw in texts.items() for s in (TOKEN, PASSWORD, LITERAL) if s.encode() in raw or s in f]
    assert found == []
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["verifier"]["headers"] == {"Authorization": "Bearer ${oc.env:REWARD_TOKEN}", "X-API-Key": "***"}
    assert config["verifier"]["url"].endswith("next=http://***@elsewhere")


def test_a_run_continues_with_another_value_of_the_variable(tmp_path, monkeypatch):
    overrides = ["recipe=toy_grpo", "verifier.use=verifier.external", "verifier.headers={A: '${oc.env:REWARD_TOKEN}'}"]
    configurations = []
    for value in ("one", "two"):
        monkeypatch.setenv("REWARD_TOKEN", value)
        experiment = build_experiment(compose(overrides))
        assert experiment.graph["verifier"].config.headers == {"A": value}
        configurations.append(experiment.public)
    assert configurations[0] == configurations[1]
    assert from_environment(configurations[0], "config.yaml")["verifier"]["headers"] == {"A": "two"}
    monkeypatch.delenv("REWARD_TOKEN")
    with pytest.raises(ConfigError, match=r"config.yaml: 'A' needs the environment variable REWARD_TOKEN; set it"):
        from_environment(configurations[0], "config.yaml")


def test_what_looks_like_a_secret_is_masked_and_nothing_else():
    settings = {
        "api_key": "a",
        "headers": {"X-Auth-Token": "b", "Accept": "json"},
        "dbPassword": "c",
        "url": "https://me:d@host/x",
        "max_tokens": 5,
        "stop_tokens": "e",
        "tokenizer": "f",
        "key_file": "g",
        "list": ["http://h:i@j"],
        "token": "",
    }
    assert public(settings) == settings | {
        "api_key": "***",
        "headers": {"X-Auth-Token": "***", "Accept": "json"},
        "dbPassword": "***",
        "url": "https://***@host/x",
        "list": ["http://***@j"],
    }
