"""Poisoned answers of servers (tools/attack_suites/answers.py): a tenth of them, and that the suite notices a hole."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from attack_suites import answers

from creditgraph.components.engine import messages, rows
from creditgraph.components.engine.served import dialect


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    monkeypatch.setattr(dialect, "LARGEST_RESPONSE", dialect.LARGEST_RESPONSE)  # the suite lowers it


def test_no_poisoned_answer_is_taken():
    assert len(answers.cases()) >= 200
    assert len({str(case) for case in answers.cases()}) == len(answers.cases())
    ended = {str(case): answers.run(case) for case in answers.quick()}
    assert {name: detail for name, (held, detail) in ended.items() if not held} == {}


@pytest.mark.parametrize(
    ("place", "check", "name"),
    [
        (rows, "check_logprobs", "vllm row: logprobs.0 is -1e30"),
        (rows, "check_entropies", "vllm row: entropies.0 is 1e30"),
        (messages, "check_entropies", "vllm score: entropies.2 is 1e30"),
        (messages, "check_logprobs", "vllm score: logprobs.2 is infinity"),
    ],
)
def test_the_suite_notices_a_missing_check(monkeypatch, place, check, name):
    case = next(case for case in answers.cases() if str(case) == name)
    assert answers.run(case)[0]
    monkeypatch.setattr(place, check, lambda *_: None)
    assert not answers.run(case)[0]
