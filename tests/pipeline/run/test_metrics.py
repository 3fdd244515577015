import json
import math

import pytest

from pipeline.core.errors import RunError
from pipeline.run.metrics import JsonLines, read_metrics


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


def test_a_full_disk_is_a_sentence(tmp_path):
    (tmp_path / "m.jsonl").symlink_to("/dev/full")
    sink = JsonLines.__new__(JsonLines)
    sink.path = tmp_path / "m.jsonl"
    sink._file = open(sink.path, "w")  # noqa: SIM115
    with pytest.raises(RunError, match=r"m\.jsonl: cannot be written \(No space left on device\): the disk is full"):
        sink.log(0, {})
