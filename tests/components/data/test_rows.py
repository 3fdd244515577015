"""Columns that verifiers read: tests of programs, choices; problems without a reference answer."""

import json

import pytest
import torch

from creditgraph.components.data.loading import load_data, make_prompts
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.run.recording import read_payload, write_payload


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


def test_tests_that_cannot_be_run_reject_their_row(tmp_path, toolbox):
    deep = "[" * 100_000 + "]" * 100_000
    tests = {
        "sound": [{"input": "1", "output": "2"}],
        "nested": deep,
        "arguments": {"inputs": [deep], "outputs": ["1"], "fn_name": "f"},
        "many": [{"input": "1", "output": "2"}] * 10_001,
    }
    rows, context = load(
        tmp_path,
        toolbox,
        [{"question": name, "io": value} for name, value in tests.items()],
        answer="",
        answer_kind="code",
        metadata={"tests": "io"},
    )
    assert [row.metadata["question"].split()[0] for row in rows] == ["sound"]
    assert [rejected["reason"][:44] for rejected in context.rejected] == [
        "the prompt's tests are nested deeper than 10",
        "a test of the prompt cannot be read (maximum",
        "the prompt has 10001 tests; at most 10000 ar",
    ]


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


WORKED = [
    {"question": "p", "answer": "4", "solution": " Two and two: 4. "},
    {"question": "q", "answer": "5", "solution": None},
    {"question": "r", "answer": "6", "solution": ["first", "second"]},
    {"question": "s", "answer": "7", "solution": 3},
]


def test_reference_solutions_reach_the_prompts_and_their_record(tmp_path, toolbox):
    rows, context = load(tmp_path, toolbox, WORKED, solution="solution")
    assert [row.solution for row in rows] == ["Two and two: 4.", "", "first"]
    assert [r["reason"] for r in context.rejected] == ["solution is a int, expected text"]
    prompts = make_prompts(rows[:], toolbox.tokenizer(), torch.arange(3))
    assert prompts.solution == ["Two and two: 4.", "", "first"]
    assert all("Two" not in text for text in prompts.text)
    write_payload(tmp_path / "0.parquet", prompts)
    read = read_payload(tmp_path / "0.parquet")
    assert read.solution == prompts.solution
    assert read.select(torch.tensor([2, 0])).solution == ["first", "Two and two: 4."]


def test_an_answer_column_with_worked_solutions_is_the_solution(tmp_path, toolbox):
    text = "So it is \\boxed{4}."
    boxed, _ = load(tmp_path, toolbox, [{"question": "p", "answer": text}], answer_boxed=True)
    assert (boxed[0].answer, boxed[0].solution) == ("4", text)
    after, _ = load(tmp_path, toolbox, [{"question": "p", "answer": "1 + 3\n#### 4"}], answer_after="####")
    assert (after[0].answer, after[0].solution) == ("4", "1 + 3\n#### 4")
    plain, _ = load(tmp_path, toolbox, WORKED[:1])
    assert plain[0].solution == ""


def test_a_missing_solution_column_is_reported(tmp_path, toolbox):
    with pytest.raises(DataError, match="has no column 'solutions'; it has question, answer, solution"):
        load(tmp_path, toolbox, WORKED, solution="solutions")


def test_the_embedded_task_has_solutions(toolbox):
    rows = load_data({"source": "chains", "size": 2}, Context()).rows
    for row in rows:
        assert row.solution.count("</thought>") == len(row.metadata["steps"])
        assert row.solution.endswith(f"\\boxed{{ {row.answer} }} </thought>")
