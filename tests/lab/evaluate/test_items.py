"""Records on disk: whole or absent, never mixed, never doubled."""

import pyarrow.parquet as pq
import pytest

from creditgraph.lab.evaluate.items import SCHEMA, Chunk, ItemStore, plan, short_hash
from creditgraph.pipeline.core.errors import RunError

MADE = {"suite": "s", "suite_version": 1, "task": {"samples": 2, "temperature": 1.0}, "weights": "abc"}


def rows(chunk, text="x"):
    values = {
        "string": [text] * chunk.rows,
        "int32": list(range(chunk.rows)),
        "int64": list(range(chunk.rows)),
        "bool": [True] * chunk.rows,
        "float": [0.5] * chunk.rows,
        "double": [-1.5] * chunk.rows,
        "list<element: int32>": [[1, 2]] * chunk.rows,
        "list<item: int32>": [[1, 2]] * chunk.rows,
    }
    return {f.name: values[str(f.type)] for f in SCHEMA}


def test_the_plan_covers_every_item_once():
    for problems, greedy, samples, most in [(7, True, 3, 4), (7, False, 3, 7), (1, True, 0, 1), (5, True, 9, 2)]:
        chunks = plan(problems, greedy, samples, most)
        actual = [(c.part, i, s) for c in chunks for i in range(c.first, c.last) for s in range(c.samples)]
        expected = [("greedy", i, 0) for i in range(problems) if greedy] + [
            ("sampled", i, s) for i in range(problems) for s in range(samples)
        ]
        assert actual == expected
        assert len({c.name for c in chunks}) == len(chunks)
        assert all(c.rows <= max(most, c.samples) for c in chunks)


def test_a_chunk_is_there_when_it_is_whole(tmp_path):
    store, chunk = ItemStore(tmp_path / "t", MADE, 4), Chunk(part="sampled", first=0, last=2, samples=2)
    assert not store.done(chunk)
    store.write(chunk, rows(chunk))
    assert ItemStore(tmp_path / "t", MADE, 4).done(chunk)
    (table,) = store.tables([chunk], ["text", "tokens"])
    assert table.to_pydict() == {"text": ["x"] * 4, "tokens": [[1, 2]] * 4}
    assert sorted(p.name for p in (tmp_path / "t").iterdir()) == ["_task.json", "sampled-000000.parquet"]


@pytest.mark.parametrize("damage", ["cut", "foreign", "short"])
def test_a_damaged_chunk_is_asked_again(tmp_path, damage):
    store, chunk = ItemStore(tmp_path / "t", MADE, 4), Chunk(part="sampled", first=0, last=2, samples=2)
    store.write(chunk, rows(chunk))
    path = tmp_path / "t" / chunk.name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "foreign":
        pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    else:
        pq.write_table(pq.read_table(path).slice(1), path)
    assert not store.done(chunk)
    assert store.damaged == [chunk.name]


def test_equal_records_are_equal_bytes(tmp_path):
    chunk = Chunk(part="greedy", first=3, last=5, samples=1)
    for name in ("a", "b"):
        ItemStore(tmp_path / name, MADE, 4).write(chunk, rows(chunk))
    assert (tmp_path / "a" / chunk.name).read_bytes() == (tmp_path / "b" / chunk.name).read_bytes()


def test_records_of_another_evaluation_are_not_mixed(tmp_path):
    ItemStore(tmp_path / "t", MADE, 4)
    changed = {**MADE, "suite_version": 2, "task": {"samples": 2, "temperature": 0.7}}
    with pytest.raises(RunError) as error:
        ItemStore(tmp_path / "t", changed, 4)
    text = str(error.value)
    for part in ("suite_version: was 1, now 2", "task.temperature: was 1.0, now 0.7", "label=NAME", "--fresh"):
        assert part in text
    assert "weights" not in text
    (tmp_path / "t" / "_task.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        ItemStore(tmp_path / "t", MADE, 4)


def test_chunks_are_cut_as_the_evaluation_began(tmp_path):
    ItemStore(tmp_path / "t", MADE, 4)
    assert ItemStore(tmp_path / "t", MADE, 99).chunk_rows == 4


def test_hashes_know_where_a_part_ends():
    assert short_hash("ab", "c") != short_hash("a", "bc")
    assert len(short_hash("\ud800")) == 16
