"""Labels from files."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from failures_by_hand import failure

from creditgraph.lab.localization.labels import file_labels, oracle_labels
from creditgraph.pipeline.core.errors import DataError

FAILURES = [failure(2**60 + i, oracle=i + 1) for i in range(4)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_and_parquet_give_the_same(tmp_path):
    rows = [
        {"uid": str(2**60), "first_error": 3},
        {"uid": str(2**60 + 1), "first_error": None},
        {"uid": str(2**60 + 2), "first_error": 7},  # of six steps
        {"uid": "5", "first_error": 1},
    ]
    labels = file_labels(write(tmp_path / "l.jsonl", rows), FAILURES)
    assert labels.step == {2**60: 3}
    assert labels.unlabelled == {"no label": 2, "out of range": 1}
    assert labels.notes == [f"{tmp_path / 'l.jsonl'}: 1 of its 4 uids are no failure of these"]
    table = pa.table({"uid": [int(row["uid"]) for row in rows], "first_error": [row["first_error"] for row in rows]})
    pq.write_table(table, tmp_path / "l.parquet")
    assert file_labels(tmp_path / "l.parquet", FAILURES).step == labels.step


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"uid": 1, "step": 3}], "row 1: has uid, step, expected uid and first_error"),
        ([{"uid": "x", "first_error": 3}], "row 1: uid 'x' and first_error 3, expected integers"),
        ([{"uid": 1, "first_error": 2.5}], "first_error 2.5, expected integers"),
        ([{"uid": 1, "first_error": 2}, {"uid": 1, "first_error": 3}], "row 2: uid 1 has two labels"),
        ([{"uid": 1, "first_error": 2}], "labels 1 failures, none of which this run recorded"),
        ([[1, 2]], "1 of 1 lines are no JSON object"),
    ],
)
def test_mistakes(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        file_labels(write(tmp_path / "l.jsonl", rows), FAILURES)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        file_labels(tmp_path / "none.jsonl", FAILURES)
    (tmp_path / "bad.parquet").write_text("x")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        file_labels(tmp_path / "bad.parquet", FAILURES)


def test_the_oracle_knows_all_or_none():
    assert oracle_labels(FAILURES).step == {2**60 + i: i + 1 for i in range(4)}
    assert oracle_labels([*FAILURES, failure(1)]) is None
