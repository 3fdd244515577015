"""Hub datasets by the real code of `datasets`, with a fake network; failures as sentences."""

import builtins
import json

import pyarrow
import pyarrow.parquet
import pytest

from creditgraph.components.data.loading import load_data
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import DataError

ROWS = [{"question": f"q {i}", "answer": str(i), "trace": "x"} for i in range(20)]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """`load_dataset("a/b", …)` loads a Parquet file by the code of `datasets`, streamed or not; anything else is an
    error of the hub."""
    import datasets

    real = datasets.load_dataset
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")

    def load_dataset(name, subset, *, split, revision, **options):
        if revision not in (None, COMMIT):
            raise datasets.exceptions.DatasetNotFoundError(
                f"Revision '{revision}' doesn't exist for dataset '{name}' on the Hub."
            )
        files = {"train": str(tmp_path / "rows.parquet")}
        return real("parquet", data_files=files, split=split, cache_dir=str(tmp_path / "cache"), **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def load(toolbox, **entry):
    settings = {"source": "hub", "name": "a/b", "template": "plain", **entry}
    return load_data(settings, Context(), toolbox.tokenizer(), place="data.train", room=1000)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("split", "expected"), [("train", range(20)), ("train[5:8]", range(5, 8)), ("train[:25%]", range(5))]
)
def test_downloaded_and_streamed_rows_are_the_same(streaming, split, expected, hub, toolbox):
    if streaming and "%" in split:
        with pytest.raises(
            DataError,
            match=r"its number of rows is unknown while streaming, expected a part in rows, as in train\[:1000\]",
        ):
            load(toolbox, split=split, streaming=streaming)
        return
    assert [r.answer for r in load(toolbox, split=split, streaming=streaming).rows] == [str(i) for i in expected]


def test_a_stream_is_read_no_further_than_needed(hub, toolbox):
    loaded = load(toolbox, streaming=True, size=3, revision=COMMIT)
    assert len(loaded.rows) == 3
    assert loaded.revision == COMMIT


def test_a_revision_that_does_not_exist(hub, toolbox):
    with pytest.raises(
        DataError,
        match=r"dataset 'a/b': revision 'v9' does not exist .* Correct data.train.revision, take null for the newest",
    ):
        load(toolbox, revision="v9")


def test_a_stream_that_breaks_says_how_far_it_came(monkeypatch, toolbox):
    import datasets

    def rows():
        yield from ROWS[:7]
        raise OSError("connection reset")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_a, **_k: datasets.IterableDataset.from_generator(rows))
    with pytest.raises(
        DataError,
        match=r"the stream broke after 7 rows \(.*connection reset.*\)\. Try again, set data.train.streaming=false",
    ):
        load(toolbox, streaming=True, revision=COMMIT)


def test_named_files_of_a_repository_are_fetched_one_by_one(monkeypatch, tmp_path, toolbox):
    import huggingface_hub

    folder = tmp_path / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    requested = []

    def download(name, file, *, repo_type, revision):
        requested.append((name, file, repo_type, revision))
        k = len(requested) - 1
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in ROWS[3 * k : 3 * k + 3]))
        return str(folder / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    loaded = load(toolbox, files=["test.jsonl", "test2.jsonl"], revision="main")
    assert [r.answer for r in loaded.rows] == ["0", "1", "2", "3", "4", "5"]
    assert requested == [("a/b", "test.jsonl", "dataset", "main"), ("a/b", "test2.jsonl", "dataset", "main")]
    assert loaded.revision == COMMIT


UNREACHABLE = "it cannot be loaded from the Hugging Face hub .*Check the name, the network and access rights"
FAILURES = [  # type, text, further settings, what the sentence says
    ("ConnectionError", "Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)", {}, UNREACHABLE),
    ("DatasetNotFoundError", "Dataset 'a/b' doesn't exist on the Hub or cannot be accessed.", {}, UNREACHABLE),
    (
        "DatasetNotFoundError",
        "Revision 'x' doesn't exist for dataset 'a/b'.",
        {"revision": "x"},
        "revision 'x' does not exist",
    ),
    (
        "ValueError",
        'Unknown split "tets".',
        {"split": "tets"},
        "split 'tets' cannot be loaded .*Correct data.train.split",
    ),
    (
        "RuntimeError",
        "Dataset scripts are no longer supported, but found b.py",
        {},
        "has a loading script.*Name its files in data.train.files",
    ),
]


@pytest.mark.parametrize(("kind", "said", "entry", "text"), FAILURES)
def test_every_failure_names_the_local_way(kind, said, entry, text, monkeypatch, toolbox):
    import datasets

    error = getattr(datasets.exceptions, kind, None) or getattr(builtins, kind)

    def fail(*_args, **_kwargs):
        raise error(said)

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        DataError, match=rf"dataset 'a/b': .*{text}.*set data.train.path=FILE_OR_FOLDER to read a local copy"
    ):
        load(toolbox, **entry)


def test_a_joined_dataset_that_cannot_be_loaded_is_named(hub, toolbox, tmp_path):
    join = {"path": str(tmp_path / "missing.jsonl"), "row": "answer"}
    with pytest.raises(DataError, match=r"missing.jsonl does not exist"):
        load(toolbox, join=join, question="joined.question")
    (tmp_path / "other.jsonl").write_text('{"statement": "s0"}\n[1]\n{"statement": "s2"}\n')
    join["path"] = str(tmp_path / "other.jsonl")
    with pytest.raises(DataError, match=r"data.train.join: .* has no column 'question'; it has statement"):
        load(toolbox, join=join, question="joined.question")
    loaded = load(toolbox, join=join, question="joined.statement")
    assert [r.text for r in loaded.rows] == ["s0", "s2"]
    assert loaded.counts.rejected == {
        "answer names no row of the joined dataset": 17,
        "a JSON list, expected an object": 1,
    }
