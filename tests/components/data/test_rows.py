"""Columns that verifiers read: tests of programs, choices; problems without a reference answer."""

import json

import pytest

from components.data.loading import load_data
from pipeline.core.component import Context
from pipeline.core.errors import DataError


def load(tmp_path, toolbox, rows, **entry):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    context = Context()
    settings = {"source": "file", "path": str(path), "template": "plain", **entry}
    return load_data(settings, context, toolbox.tokenizer()).rows, context


def test_tests_and_choices_reach_the_verifier(tmp_path, toolbox):
    tests = [{"input": "1", "output": "2"}]
    rows, context = load(
        tmp_path,
        toolbox,
        [{"question": "q", "io": tests, "c": ["a", "b"]}],
        answer="",
        metadata={"tests": "io", "choices": "c"},
    )
    assert rows[0].answer == ""
    assert rows[0].metadata["tests"] == tests
    assert rows[0].metadata["choices"] == ["a", "b"]
    assert rows[0].metadata["question"] == "q"
    assert context.rejected == []


def test_truth_values_become_words_and_numbers_text(tmp_path, toolbox):
    rows, _ = load(
        tmp_path,
        toolbox,
        [{"question": "p", "answer": True}, {"question": "q", "answer": False}, {"question": "r", "answer": 4}],
    )
    assert [row.answer for row in rows] == ["yes", "no", "4"]


def test_a_missing_column_is_reported(tmp_path, toolbox):
    with pytest.raises(DataError, match=r"has no column 'test'; it has question, tests\. Did you mean 'tests'"):
        load(tmp_path, toolbox, [{"question": "q", "tests": []}], answer="", metadata={"tests": "test"})
