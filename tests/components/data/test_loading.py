"""Large sets in bounded memory, the data card, rejected rows, and resuming on data that has changed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from creditgraph.components.data.card import MAX_REJECTED
from creditgraph.components.data.loading import load_data
from creditgraph.components.data.store import IN_MEMORY, Row, RowStore
from creditgraph.components.prompts.dataset import DatasetPrompts
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.ranks import Ranks

ROOT = Path(__file__).resolve().parents[3]


def rows_of(store):
    return [(r.text, r.answer, r.metadata, r.solution) for r in store]


def test_a_store_gives_back_what_was_put_in_from_memory_and_from_a_file(tmp_path):
    rows = [
        Row(text=f"täxt {i} 漢\n", answer=str(i), metadata={"i": i, "x": "y" * 1000, "deep": [{"a": None}]})
        for i in range(30)
    ]
    rows += [Row(text="t", answer="a", metadata={}, solution="sölution")]
    small, large = RowStore(), RowStore(tmp_path)
    for row in rows:
        small.append(row)
        large.append(row)
    large.append(Row(text="t", answer="a", metadata={"x": "z" * (IN_MEMORY + 1)}))
    large.append(rows[0])
    assert list(small) == rows
    assert large[:31] == rows
    assert large[-1] == large[32] == rows[0]
    assert small[5:20:7] == rows[5:20:7]
    assert len(large) == 33
    with pytest.raises(IndexError):
        small[31]
    assert list(tmp_path.iterdir()) == []  # the file has no name: nothing is left behind, whatever ends the process


def test_a_store_has_one_hash_per_content():
    def digest(*texts):
        store = RowStore()
        for text in texts:
            store.append(Row(text=text, answer="a", metadata={}))
        return store.digest

    assert digest("a", "b") == digest("a", "b")
    assert len({digest("a", "b"), digest("b", "a"), digest("a"), digest("ab")}) == 4
    stores = RowStore(), RowStore()
    for store, solution in zip(stores, ("x", "y"), strict=True):
        store.append(Row(text="a", answer="a", metadata={}, solution=solution))
    assert len({store.digest for store in stores} | {digest("a")}) == 3


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"source": "file", "path": str(path), "template": "plain"}


PROBLEMS = [{"question": f"<solve> {i} s1 + 2", "answer": str(i), "level": "ab"[i % 2]} for i in range(10)]


def node(entry, run_dir=None, **config):
    dataset = DatasetPrompts(DatasetPrompts.Config(batch=2, **config))
    dataset.setup(Context(node="prompts", data={"train": entry}, run_dir=run_dir))
    return dataset


def test_the_card_of_a_run_says_where_its_problems_came_from(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    rows = [
        *PROBLEMS,
        PROBLEMS[0],
        {"question": "<solve> 3", "answer": "", "level": "a"},
        {"question": "hello", "answer": "1", "level": "a"},
    ]
    entry = jsonl(tmp_path / "a.jsonl", rows) | {"keep": {"level": "a"}, "verifier": "verifier.math"}
    dataset = node(entry, run)
    load_data(jsonl(tmp_path / "b.jsonl", PROBLEMS[:3]), Context(run_dir=run), place="data.eval")
    card = json.loads((run / "data_card.json").read_text())
    assert list(card) == ["data.eval", "data.train"]
    train = card["data.train"]
    assert train["source"] == str(tmp_path / "a.jsonl")
    assert train["files"] == [{"path": str(tmp_path / "a.jsonl"), "bytes": (tmp_path / "a.jsonl").stat().st_size}]
    assert train["settings"]["keep"] == {"level": "a"}
    assert train["settings"]["verifier"] == "verifier.math"
    assert "difficulty" not in train["settings"]
    # Ten problems, five of level b; the first one again; one without an answer; one without a known word.
    assert train["rows"] == {
        "read": 13,
        "filtered": {"level": 5},
        "rejected": {"no answer": 1, "no word of the prompt is in the model's vocabulary": 1},
        "duplicates": 1,
        "not_chosen": 0,
        "used": 5,
        "with_solution": 0,
    }
    assert train["prompt_tokens"] == {"min": 5, "max": 5, "mean": 5.0}
    assert train["hash"] == f"blake2b:{dataset.rows.digest}"
    assert card["data.eval"]["rows"]["used"] == 3


def test_the_card_of_a_hub_dataset_names_its_revision(tmp_path, monkeypatch):
    from creditgraph.components.data import loading
    from creditgraph.components.data.files import RawDataset

    monkeypatch.setattr(loading, "open_hub", lambda *_a, **_k: RawDataset(rows=iter(PROBLEMS), revision="c" * 40))
    context = Context(run_dir=tmp_path)
    load_data({"source": "hub", "name": "a/b", "revision": "main", "template": "plain"}, context)
    card = json.loads((tmp_path / "data_card.json").read_text())["data"]
    assert (card["revision_requested"], card["revision"], card["source"]) == ("main", "c" * 40, "dataset 'a/b'")


def test_one_rank_writes_the_card_and_the_rejected_rows(tmp_path):
    entry = jsonl(tmp_path / "a.jsonl", [*PROBLEMS, {"question": "<solve> 3", "answer": ""}])
    for rank in (1, 0):
        dataset = DatasetPrompts(DatasetPrompts.Config(batch=4))
        context = Context(
            node="prompts", data={"train": entry}, run_dir=tmp_path, ranks=Ranks(rank=rank, world=2, num_replicas=2)
        )
        dataset.setup(context)
        assert (tmp_path / "data_card.json").exists() == (rank == 0)
        assert len(context.rejected) == (rank == 0)


def test_of_many_rejected_rows_the_first_are_listed_and_all_counted(tmp_path):
    bad = [{"question": f"<solve> {i}", "answer": ""} for i in range(MAX_REJECTED + 7)]
    dataset = node(jsonl(tmp_path / "a.jsonl", [*bad, *PROBLEMS]), tmp_path)
    assert len(dataset.context.rejected) == MAX_REJECTED
    assert dataset.context.metrics["rejected"] == MAX_REJECTED + 7
    assert len(dataset.rows) == 10


def test_a_checkpoint_holds_a_place_and_refuses_other_data_of_the_same_size(tmp_path):
    dataset = node(jsonl(tmp_path / "a.jsonl", PROBLEMS))
    dataset.run()
    state = dataset.state_dict()
    assert {k: v for k, v in state.items() if k != "hash"} == {"epoch": 0, "position": 2, "rows": 10}
    changed = node(jsonl(tmp_path / "a.jsonl", [*PROBLEMS[:9], {"question": "<solve> 9 s1 + 3", "answer": "9"}]))
    with pytest.raises(RunError, match=r"expected the checkpoint's data, got other problems in the same number"):
        changed.load_state_dict(state)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data_and_a_killed_run_goes_on_where_it_was():
    """As tools/bench_data measures it: a process loads the file, is killed, and another one goes on."""
    command = [sys.executable, str(ROOT / "tools" / "bench_data"), "--rows", "4000", "--notes", "20000"]
    done = subprocess.run([*command, "--types", "zstd", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["zstd"]
    assert result["place_restored"]
    # 4,000 rows of 20,000 characters are 80 MB; 16 MB of them may stay in memory before the file is used.
    assert result["peak_mb"] - result["imported_mb"] < 50
    assert result["rows"] == {
        "read": 4000,
        "filtered": {"source": 400},
        "rejected": {"no answer": 40},
        "duplicates": 40,
        "not_chosen": 0,
        "used": 3520,
        "with_solution": 0,
    }
