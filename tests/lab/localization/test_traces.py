"""Labelled traces of others: BIG-Bench-Mistake's format, and agreement with a judge or a file."""

import json

import pytest

from creditgraph.lab.localization.traces import read_traces
from creditgraph.pipeline.core.errors import DataError

ROWS = [
    {"input": "q1", "steps": ["a", "b", "c", "d"], "answer": "1", "target": "2", "mistake_index": 0},
    {"input": "q2", "steps": ["a", "b"], "answer": "2", "target": "2", "mistake_index": None},
    {"input": "q3", "steps": ["a", "b"], "answer": "1", "target": "2", "mistake_index": 1},
]


@pytest.fixture
def traces(tmp_path):
    def write(rows):
        file = tmp_path / "traces.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    return write


def test_agreement_by_hand(traces, localization, tmp_path):
    # Truth: steps 1 of 4 and 2 of 2 (mistake_index counts from 0). The labels name 3 (after it) and 1 (before it).
    labels = tmp_path / "labels.jsonl"
    labels.write_text('{"uid": 1, "first_error": 3}\n{"uid": 3, "first_error": 1}\n')
    code, result, _ = localization(traces(ROWS), "--labels", labels)
    assert code == 0
    assert (result["traces"], result["without_mistake"]) == (2, 1)
    assert (result["exact"]["count"], result["clean"]["count"], result["clean"]["total"]) == (0, 1, 2)
    # Uniform steps: exact 1/4 and 1/2; clean 1/4 and 2/2.
    assert (result["random_exact"], result["random_clean"]) == (0.375, 0.625)
    labels.write_text('{"uid": 1, "first_error": 1}\n')
    code, printed, _ = localization(traces(ROWS), "--labels", labels, json_output=False)
    assert code == 0
    assert "2 traces with a labelled mistake, 1 no label; 1 without one are left out" in printed
    assert "1 of 1" in printed


def test_mistakes(traces, localization):
    code, _, error = localization(traces(ROWS))
    assert code == 2
    assert "expected --judge URL --judge-model NAME, or --labels FILE" in error
    for change, message in (
        ({"mistake_index": 4}, "line 1: mistake_index 4; expected 0 to 3, or null"),
        ({"mistake_index": True}, "mistake_index True; expected"),
        ({"steps": "a"}, "expected a list of texts as steps"),
    ):
        with pytest.raises(DataError, match=message):
            read_traces(traces([ROWS[0] | change]))
    with pytest.raises(DataError, match="line 1: has no steps; expected input, steps, answer, target, mistake_index"):
        read_traces(traces([{k: v for k, v in ROWS[0].items() if k != "steps"}]))
