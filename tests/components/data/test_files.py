"""Files as they come: compressed, cut short, huge cells, nulls, parts of splits, copies of the hub."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from creditgraph.components.data.files import bounds, open_path
from creditgraph.components.data.loading import load_data
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import DataError

ROWS = [{"question": f"q {i}", "answer": str(i)} for i in range(2500)]


def text_of(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def zstd(data):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def load(path, toolbox, context=None, **entry):
    options = {name: entry.pop(name) for name in ("drop_duplicates", "place") if name in entry}
    settings = {"source": "file", "path": str(path), "template": "plain", **entry}
    return load_data(settings, context or Context(), toolbox.tokenizer(), room=1 << 30, **options)


def reasons(loaded):
    return dict(loaded.counts.rejected)


# Tests are named after the files alone: gzip writes the time, and workers of pytest-xdist must collect equal names.
COMPRESSED = {
    "a.jsonl.gz": gzip.compress(text_of(ROWS)),
    "a.jsonl.zst": zstd(text_of(ROWS)),
    "a.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "a.json.zst": zstd(text_of(ROWS)),
    "a.csv.gz": gzip.compress(b"question,answer\n" + b"".join(f'"q {i}",{i}\n'.encode() for i in range(2500))),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_files_give_the_rows_of_plain_ones(name, tmp_path, toolbox):
    (tmp_path / name).write_bytes(COMPRESSED[name])
    loaded = load(tmp_path / name, toolbox).rows
    assert [(r.text, r.answer) for r in loaded] == [(r["question"], r["answer"]) for r in ROWS]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_compressed_file_that_is_cut_short_is_refused_with_the_rows_it_gave(name, tmp_path, toolbox):
    data = COMPRESSED[name]
    (tmp_path / name).write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(
        DataError,
        match=rf"{name} cannot be decompressed after \d+ lines \(.*\), expected a complete file\. Copy it again",
    ):
        load(tmp_path / name, toolbox)
    (tmp_path / name).write_bytes(b"no such magic")
    with pytest.raises(DataError, match=rf"{name} cannot be decompressed after 0 lines"):
        load(tmp_path / name, toolbox)


def test_a_whole_json_file_cut_short_and_a_parquet_file_cut_short(tmp_path, toolbox):
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode())[:-50])
    with pytest.raises(DataError, match=r"a.json.gz cannot be decompressed after 0 lines"):
        load(tmp_path / "a.json.gz", toolbox)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a.parquet cannot be read as parquet"):
        load(tmp_path / "a.parquet", toolbox)


def test_a_plain_file_cut_short_loses_its_last_row_alone(tmp_path, toolbox):
    (tmp_path / "a.jsonl").write_bytes(text_of(ROWS[:3])[:-5])
    loaded = load(tmp_path / "a.jsonl", toolbox)
    assert [r.answer for r in loaded.rows] == ["0", "1"]
    assert len(reasons(loaded)) == 1
    assert next(iter(reasons(loaded))).startswith("not JSON (")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv"])
def test_answers_of_a_megabyte_are_rejected_and_no_other_row_suffers(name, tmp_path, toolbox):
    rows = [*ROWS[:2], {"question": "huge", "answer": "7" * 1_000_000}, ROWS[3]]
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
    elif name == "a.csv":
        (tmp_path / name).write_text("question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in rows))
    else:
        (tmp_path / name).write_bytes(text_of(rows))
    loaded = load(tmp_path / name, toolbox)
    assert [r.answer for r in loaded.rows] == ["0", "1", "3"]
    assert reasons(loaded) == {"an answer of N characters; at most N are taken": 1}
    assert len(load(tmp_path / name, toolbox, max_answer=0).rows[2].answer) == 1_000_000


def test_nulls_wrong_types_and_numbers_that_are_none(tmp_path, toolbox):
    answers = [None, "", "  ", {"a": 1}, [["x"]], [], float("nan"), float("inf"), 3.0, 0.5, ["1", "2"], True, 10**400]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"question": f"q{i}", "answer": a}) + "\n" for i, a in enumerate(answers))
    )
    loaded = load(tmp_path / "a.jsonl", toolbox)
    assert [r.answer for r in loaded.rows] == ["3", "0.5", "1, 2", "yes", str(10**400)]
    assert reasons(loaded) == {
        "no answer": 3,
        "answer is a dict, expected text": 1,
        "answer is a list, expected text": 2,
        "answer is nan, expected a number": 1,
        "answer is inf, expected a number": 1,
    }


def test_json_that_is_too_deep_costs_its_row(tmp_path, toolbox):
    (tmp_path / "a.jsonl").write_text(
        "[" * 100_000 + "\n" + json.dumps(ROWS[0]) + "\n" + '{"question": "\\ud800", "answer": "1"}\n'
    )
    loaded = load(tmp_path / "a.jsonl", toolbox)
    assert len(loaded.rows) == 1
    assert reasons(loaded)["question is not UTF-8"] == 1
    assert sum(reasons(loaded).values()) == 2


def test_duplicates_by_normalised_text_are_counted(tmp_path, toolbox):
    questions = ["What is 1 + 1?", "what  is 1 + 1?", "What is 1 + 1?", "What is １ + １?", "What is 1 + 2?"]
    (tmp_path / "a.jsonl").write_bytes(text_of([{"question": q, "answer": "2"} for q in questions]))
    loaded = load(tmp_path / "a.jsonl", toolbox, drop_duplicates=True)
    assert [r.metadata["source_row"] for r in loaded.rows] == [0, 4]
    assert (loaded.counts.duplicates, loaded.counts.read, loaded.counts.used) == (3, 5, 2)
    assert load(tmp_path / "a.jsonl", toolbox).counts.duplicates == 0


def test_columns_inside_columns(tmp_path, toolbox):
    rows = [{"question": "q", "answer": "a", "details": {"level": level, "x": 1}} for level in ("L1", "L3", None)]
    for name in ("a.jsonl", "a.parquet"):
        if name == "a.jsonl":
            (tmp_path / name).write_bytes(text_of(rows))
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
        loaded = load(tmp_path / name, toolbox, keep={"details.level": ["L3", "L4"]})
        assert [r.metadata["source_row"] for r in loaded.rows] == [1]
        assert loaded.counts.filtered == {"details.level": 2}
        with pytest.raises(DataError, match=r"has no column 'details.lvl'; it has question, answer, details"):
            load(tmp_path / name, toolbox, keep={"details.lvl": "L3"})
        with pytest.raises(DataError, match=r"keep left out all of its 3 rows by details.level"):
            load(tmp_path / name, toolbox, keep={"details.level": "L9"})


@pytest.mark.parametrize(
    ("part", "count", "expected"),
    [
        ("[:90%]", 25, (0, 22)),
        ("[90%:]", 25, (22, 25)),
        ("[10:20]", 5, (10, 20)),
        ("[-10%:]", 20, (18, 20)),
        ("[5:]", 9, (5, None)),
    ],
)
def test_parts_are_cut_as_datasets_cuts_them(part, count, expected):
    import datasets

    assert bounds(part, lambda: count) == expected
    instruction = (
        datasets.ReadInstruction.from_spec(f"train{part}").to_absolute({"train": count}) if "%" in part else None
    )
    if instruction:
        assert (instruction[0].from_ or 0, count if instruction[0].to is None else instruction[0].to) == expected


def test_a_part_of_a_local_file_and_a_wrong_part(tmp_path, toolbox):
    (tmp_path / "a.jsonl").write_bytes(text_of(ROWS[:10]))
    first, second = (load(tmp_path / "a.jsonl", toolbox, split=f"train{part}").rows for part in ("[:80%]", "[80%:]"))
    assert [r.answer for r in first] + [r.answer for r in second] == [str(i) for i in range(10)]
    assert len(first) == 8
    with pytest.raises(DataError, match=r"split part '\[:x\]': .*Expected \[from:to\] in rows or per cent"):
        load(tmp_path / "a.jsonl", toolbox, split="train[:x]")


def test_a_copy_of_a_hub_repository_is_read_by_split(tmp_path, toolbox):
    folder = tmp_path / "copy" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "copy" / "README.md").write_text("a card")
    for name, rows in (
        ("train-00000-of-00002", ROWS[:3]),
        ("train-00001-of-00002", ROWS[3:5]),
        ("test-00000-of-00001", ROWS[5:6]),
    ):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
    hub = {"source": "hub", "name": "a/b"}
    assert [r.answer for r in load(tmp_path / "copy", toolbox, **hub, split="train").rows] == ["0", "1", "2", "3", "4"]
    assert [r.answer for r in load(tmp_path / "copy", toolbox, **hub, split="test").rows] == ["5"]
    with pytest.raises(DataError, match=r"has no file of split 'validation'; it has data/test-00000-of-00001.parquet"):
        load(tmp_path / "copy", toolbox, **hub, split="validation")
    with pytest.raises(DataError, match=r"copy has no file 'test6.jsonl', expected a copy of the repository"):
        load(tmp_path / "copy", toolbox, **hub, files=["test6.jsonl"])


def test_only_needed_columns_of_a_parquet_file_are_read(tmp_path):
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([row | {"trace": "x" * 100} for row in ROWS]), tmp_path / "a.parquet"
    )
    assert set(next(open_path(tmp_path / "a.parquet", ["question", "answer"]).rows)) == {"question", "answer"}


def test_types_that_cannot_be_read(tmp_path):
    for name, shown in (("a.parquet.gz", ".parquet.gz"), ("a.txt", ".txt"), ("a.bz2", ".bz2")):
        (tmp_path / name).write_text("x")
        with pytest.raises(
            DataError, match=rf"{name}: expected one of .jsonl, .* \(text types also with .gz or .zst\), got '{shown}'"
        ):
            open_path(tmp_path / name, [])


def test_choices_that_are_none(tmp_path, toolbox):
    rows = [
        {"question": "q", "answer": "B", "c": {"text": ["x", "y"], "label": ["A", "B"]}},
        {"question": "q", "answer": "2", "c": {"text": ["x", "y"], "label": ["1", "2"]}},
        {"question": "q", "answer": "y", "c": ["x", "y"]},
        {"question": "q", "answer": "C", "c": ["x", "y"]},
        {"question": "q", "answer": "A", "c": ["x"]},
        {"question": "q", "answer": "A", "c": None},
        {"question": "q", "answer": "A", "c": "x, y"},
    ]
    (tmp_path / "a.jsonl").write_bytes(text_of(rows))
    loaded = load(tmp_path / "a.jsonl", toolbox, choices="c")
    assert [r.answer for r in loaded.rows] == ["B", "B", "y"]
    assert all(r.text == "q\n\nA. x\nB. y" for r in loaded.rows)
    assert reasons(loaded) == {
        "answer names none of the N choices": 1,
        "c: expected N to N texts": 2,
        "c is text that is not JSON, expected a list": 1,
    }
