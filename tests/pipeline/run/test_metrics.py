import hashlib
import json
import logging
import math
import os

import pytest

from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.run.metrics import JsonLines, read_lines, read_metrics, unreadable_lines


def test_lines_are_there_at_once_and_nan_is_null(tmp_path):
    sink = JsonLines(tmp_path / "m.jsonl")
    sink.log(0, {"a": 0.1, "b": math.nan, "c": math.inf})
    assert (tmp_path / "m.jsonl").read_text() == '{"iteration": 0, "a": 0.1, "b": null, "c": null}\n'
    sink.sync()
    sink.close()
    assert math.isnan(read_metrics(tmp_path / "m.jsonl")[0]["b"])


def test_opening_cuts_later_iterations_and_a_half_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"iteration": i}) + "\n" for i in range(4)) + '{"iteration": 1')
    assert [r["iteration"] for r in read_metrics(path)] == [0, 1, 2, 3]
    JsonLines(path, last_iteration=1).close()
    assert path.read_text() == '{"iteration": 0}\n{"iteration": 1}\n'
    JsonLines(path, last_iteration=9).close()
    assert len(read_metrics(path)) == 2
    JsonLines(path).close()
    assert path.read_text() == ""


def test_a_flipped_byte_costs_no_other_row_and_is_reported(tmp_path, caplog):
    path = tmp_path / "m.jsonl"
    sink = JsonLines(path)
    for i in range(1000):
        sink.log(i, {"a": i / 7})
    mark = sink.mark()
    assert mark == {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    sink.log(1000, {"a": 0.0})
    sink.close()
    raw = bytearray(path.read_bytes())
    assert raw.split(b"\n")[3].startswith(b'{"iter')
    raw[raw.index(b"\n", raw.index(b'"iteration": 2')) + 1] ^= 1  # the bracket of row 3
    path.write_bytes(raw)
    assert unreadable_lines(path) == [4]
    with caplog.at_level(logging.INFO, "creditgraph"):
        JsonLines(path, 999, mark).close()
    assert [r["iteration"] for r in read_metrics(path)] == [i for i in range(1000) if i != 3]
    assert path.read_bytes() == raw[: mark["bytes"]]
    assert [r.getMessage().removeprefix(f"{path}: ") for r in caplog.records] == [
        "damaged since the checkpoint that the run continues from (its bytes differ). What can be read is kept.",
        "lines that are not as they were written: 1 (line 4); they are kept. Compare them with a copy.",
        "rows after iteration 999 are removed and run again: 1.",
    ]


def test_unreadable_lines_among_removed_rows_are_kept_and_a_later_number_removes_no_row(tmp_path):
    path = tmp_path / "m.jsonl"
    rows = [json.dumps({"iteration": i}) + "\n" for i in range(6)]
    rows[1] = json.dumps({"iteration": 9}) + "\n"  # was 1
    rows[4] = '{"iteration" 4}\n'
    path.write_text("".join(rows) + '{"iteration": 6')
    JsonLines(path, 3).close()
    assert path.read_text() == "".join(rows[:4]) + rows[4]
    JsonLines(path, 3).close()
    assert path.read_text() == "".join(rows[:4]) + rows[4]


@pytest.mark.parametrize(("keep", "sentence"), [(0, "its last 34 bytes"), (20, "its last 14 bytes"), (34, "")])
def test_a_lost_or_shortened_file_is_reported(tmp_path, caplog, keep, sentence):
    path = tmp_path / "m.jsonl"
    sink = JsonLines(path)
    sink.write([{"iteration": 0}, {"iteration": 1}])
    mark = sink.mark()
    sink.close()
    os.truncate(path, keep)
    if not keep:
        path.unlink()
    JsonLines(path, 1, mark).close()
    assert sentence in caplog.text
    assert bool(caplog.text) == bool(sentence)


def test_a_line_separator_in_a_text_ends_no_row(tmp_path):
    sink = JsonLines(tmp_path / "m.jsonl")
    sink.write([{"iteration": 0, "text": "a\u2028b\x85c"}])
    sink.close()
    assert read_lines(tmp_path / "m.jsonl") == [{"iteration": 0, "text": "a\u2028b\x85c"}]


def test_a_full_disk_is_a_sentence(tmp_path):
    (tmp_path / "m.jsonl").symlink_to("/dev/full")
    sink = JsonLines.__new__(JsonLines)
    sink.path = tmp_path / "m.jsonl"
    sink._file = open(sink.path, "w")  # noqa: SIM115
    with pytest.raises(RunError, match=r"m\.jsonl: cannot be written \(No space left on device\): the disk is full"):
        sink.log(0, {})
