"""prompts.dataset: sources, order, resuming, and what bad input gets."""

import json

import pytest
import torch

from creditgraph.components.data.loading import load_data, make_prompts
from creditgraph.components.prompts.dataset import DatasetPrompts
from creditgraph.components.tasks import TASKS
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.errors import ConfigError, DataError, RunError
from creditgraph.pipeline.core.ranks import Ranks

TASK = TASKS["chains"]

CHAINS = {"source": "chains", "size": 20, "difficulty": {"steps": [3, 5], "hard_facts": None}}
PLAIN = {"source": "file", "template": "plain"}
# The embedded tokenizer's words, so that token counts are easy to see.
PROBLEMS = [{"question": f"<solve> {i} s1 + 2", "answer": str(i + 2)} for i in range(8)]


def started(entry=None, seed=0, model=None, **config):
    node = DatasetPrompts(DatasetPrompts.Config(**config))
    node.setup(Context(node="prompts", seed=seed, model=model or ModelSpec(), data={"train": entry or CHAINS}))
    return node


def draw(node, iterations, start=0):
    batches = []
    for iteration in range(start, start + iterations):
        node.context.iteration = iteration
        batches.append(node.run().batch)
    return batches


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {**PLAIN, "path": str(path)}


def reasons(node):
    return [r["reason"] for r in node.context.rejected]


def test_chains_batch_carries_everything_a_verifier_needs():
    batch = draw(started(batch=4), 1)[0]
    assert len(batch) == 4
    for i in range(4):
        problem = batch.metadata[i]
        assert batch.answer[i] == TASK.answer(problem)
        assert batch.text[i] == f"<solve> {problem['question']} </problem>"
        assert TASK.first_error(problem, TASK.solution(problem)) == 0
    assert batch.tokens.values.dtype == torch.int32
    # "<solve>", the start value, three words per step, "</problem>"
    assert batch.tokens.lengths.tolist() == [3 + 3 * len(m["steps"]) for m in batch.metadata]


def test_an_epoch_takes_each_row_once_and_the_next_has_another_order():
    batches = draw(started(batch=5), 8)
    rows = [m["source_row"] for b in batches for m in b.metadata]
    assert sorted(rows[:20]) == sorted(rows[20:]) == list(range(20))
    assert rows[:20] != rows[20:]
    assert len({u for b in batches for u in b.uid.tolist()}) == 40


def test_a_batch_may_span_epochs_and_exceed_the_data():
    rows = [m["source_row"] for b in draw(started({**CHAINS, "size": 3}, batch=7), 1) for m in b.metadata]
    assert len(rows) == 7
    assert sorted(rows[:3]) == sorted(rows[3:6]) == [0, 1, 2]


def test_order_follows_the_seed_and_shuffle_can_be_off():
    first, again, other = (draw(started(seed=s, batch=20), 1)[0] for s in (0, 0, 1))
    assert first.text == again.text
    assert first.text != other.text
    assert sorted(first.text) == sorted(other.text)
    plain = draw(started(batch=20, shuffle=False), 1)[0]
    assert [m["source_row"] for m in plain.metadata] == list(range(20))


def test_resuming_gives_the_same_batches_as_never_stopping():
    whole = draw(started(batch=6), 9)
    first = started(batch=6)
    draw(first, 4)
    state = first.state_dict()
    second = started(batch=6)
    second.load_state_dict(state)
    for expected, batch in zip(whole[4:], draw(second, 5, start=4), strict=True):
        assert expected.text == batch.text
        assert torch.equal(expected.uid, batch.uid)
        assert expected.tokens.equal(batch.tokens)


def test_resuming_on_other_data_is_refused():
    state = started().state_dict()
    with pytest.raises(RunError, match="expected the checkpoint's data of 20 problems, got 10"):
        started({**CHAINS, "size": 10}).load_state_dict(state)


def test_train_and_held_out_rows_are_disjoint():
    context = Context()
    easy = {"source": "chains", "size": 300, "difficulty": {"steps": [1, 2], "hard_facts": None}}
    train, held_out = (load_data({**easy, "split": split}, context).rows for split in ("train", "eval"))
    assert not {r.text for r in train} & {r.text for r in held_out}


def test_every_file_type_gives_the_same_rows(tmp_path):
    import datasets
    import pyarrow.csv
    import pyarrow.parquet

    table = datasets.Dataset.from_list(PROBLEMS).data.table
    entries = [jsonl(tmp_path / "a.jsonl", PROBLEMS)]
    (tmp_path / "a.json").write_text(json.dumps(PROBLEMS), encoding="utf-8")
    (tmp_path / "nested.json").write_text(json.dumps({"version": 1, "data": PROBLEMS}), encoding="utf-8")
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    pyarrow.csv.write_csv(table, tmp_path / "a.csv")
    datasets.Dataset.from_list(PROBLEMS).save_to_disk(tmp_path / "folder")
    entries += [
        {**PLAIN, "path": str(tmp_path / name)} for name in ("a.json", "nested.json", "a.parquet", "a.csv", "folder")
    ]
    entries.append({**PLAIN, "path": str(next((tmp_path / "folder").glob("*.arrow")))})
    for entry in entries:
        rows = load_data(entry, Context()).rows
        assert [(r.text, r.answer) for r in rows] == [(p["question"], p["answer"]) for p in PROBLEMS], entry


def test_columns_filter_boxed_answers_and_size(tmp_path):
    rows = [
        {"problem": "1 s1 + 2", "solution": "so \\boxed{\\frac{3}{1}}", "kind": "a"},
        {"problem": "2 s1 + 2", "solution": "so \\boxed{4}", "kind": "b"},
        {"problem": "3 s1 + 2", "solution": "so it goes", "kind": "a"},
        {"problem": "4 s1 + 2", "solution": "so \\boxed{6}", "kind": "a"},
        {"problem": "5 s1 + 2", "solution": "so \\boxed{7}", "kind": "a"},
    ]
    entry = jsonl(tmp_path / "a.jsonl", rows)
    entry |= {"question": "problem", "answer": "solution", "answer_boxed": True, "keep": {"kind": "a"}, "size": 2}
    node = started(entry, batch=2, shuffle=False)
    batch = draw(node, 1)[0]
    assert batch.answer == ["\\frac{3}{1}", "6"]
    assert [m["source_row"] for m in batch.metadata] == [0, 3]
    assert reasons(node) == ["no \\boxed{} in solution"]


def test_bad_rows_are_skipped_counted_and_recorded(tmp_path):
    path = tmp_path / "a.jsonl"
    good = b'{"question": "1 s1 + 2", "answer": "3"}\n'
    path.write_bytes(
        good
        + b'{"question": "2 s1 + 2"}\n'
        + b'{"question": "3 s1 + 2", "answer": "  "}\n'
        + b'{"question": "x\xe9", "answer": "5"}\n'
        + b'{"question": 6, "answer": "8"}\n'
        + b'{"question": "7 s1 + 2", "answer": {"a": "9"}}\n'
        + b"[1, 2]\n"
        + b'{"question": \n'
        + b'{"question": "<solve>' + b" 7" * 599 + b'", "answer": "9"}\n'
        + b'{"question": "hello", "answer": "9"}\n'
        + b'{"question": "8 s1 + 2", "answer": 10}\n'
        + good
    )  # fmt: skip
    node = started({**PLAIN, "path": str(path)}, batch=2, shuffle=False)
    rejected = reasons(node)
    assert rejected[:5] == [
        "no answer",
        "no answer",
        "question is not UTF-8",
        "question is a int, expected text",
        "answer is a dict, expected text",
    ]
    assert rejected[5] == "a JSON list, expected an object"
    assert rejected[6].startswith("not JSON (")
    assert rejected[7] == "prompt of 600 tokens; expected at most 511"
    assert rejected[8] == "no word of the prompt is in the model's vocabulary"
    assert node.context.rejected[2]["row"] == {"source": str(path), "row": 3}
    assert node.context.metrics["rejected"] == 9
    # A number is a fine answer, and the repeated question is taken once.
    assert draw(node, 1)[0].answer == ["3", "10"]


def test_longer_prompts_than_the_setting_are_rejected(tmp_path):
    entry = jsonl(tmp_path / "a.jsonl", [{"question": "<solve>" + " 7" * (n - 1), "answer": "1"} for n in (11, 12, 13)])
    node = started(entry, model=ModelSpec(max_context=32), max_tokens=11, batch=1)
    assert len(node.rows) == 1
    assert reasons(node)[0] == "prompt of 12 tokens; expected at most 11"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", r"a.jsonl is empty, expected one problem per row"),
        (b"\n\n", r"data.train: .*a.jsonl: it has no rows\. Expected rows with a question and an answer"),
        (b'{"question": "1"}\n', r"data.train: .*a.jsonl has no column 'answer'; it has question."),
        (
            b'{"questions": "1", "answer": "2"}\n',
            r"no column 'question'; it has questions, answer. Did you mean 'questions'\?",
        ),
        (b'{"question": "1", "answer": ""}\n' * 3, r"all 3 rows were rejected \(3 × no answer\)"),
    ],
)
def test_files_without_a_usable_row(tmp_path, content, text):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=text):
        started({**PLAIN, "path": str(path)})


def test_missing_and_unreadable_files(tmp_path):
    (tmp_path / "train.jsonl").write_text("x")
    with pytest.raises(
        DataError, match=r"train.jsnl does not exist, expected one of .jsonl, .* Did you mean 'train.jsonl'\?"
    ):
        started({**PLAIN, "path": str(tmp_path / "train.jsnl")})
    (tmp_path / "a.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"a.parquet cannot be read as parquet"):
        started({**PLAIN, "path": str(tmp_path / "a.parquet")})
    (tmp_path / "a.json").write_text("{broken")
    with pytest.raises(DataError, match=r"a.json: not JSON .*expected a list of objects"):
        started({**PLAIN, "path": str(tmp_path / "a.json")})
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"a.txt: expected one of .*, got '.txt'"):
        started({**PLAIN, "path": str(tmp_path / "a.txt")})
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"none has no file of .*Expected a folder written by save_to_disk"):
        started({**PLAIN, "path": str(tmp_path / "none")})


def test_unreachable_hub_names_the_local_way(monkeypatch):
    import datasets

    def unreachable(*_args, **_kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        DataError,
        match=r"dataset 'a/b': it cannot be loaded .*\(no route to host\)\. .*set data.train.path=FILE_OR_FOLDER",
    ):
        started({"source": "hub", "name": "a/b"})


def test_hub_dataset_takes_its_split(monkeypatch):
    import datasets

    def load_dataset(name, subset, *, split, revision):
        assert (name, subset, revision) == ("a/b", None, "v1")
        if split != "test[:2]":
            raise ValueError(f"Unknown split \"{split}\". Should be one of ['train', 'test'].")
        return datasets.Dataset.from_list(PROBLEMS[:2])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    entry = {"source": "hub", "name": "a/b", "split": "test[:2]", "template": "plain", "revision": "v1"}
    assert [r.answer for r in load_data(entry, Context()).rows] == ["2", "3"]
    with pytest.raises(
        DataError, match=r"dataset 'a/b': split 'tets' cannot be loaded \(Unknown split \"tets\". Should be one of"
    ):
        load_data({**entry, "split": "tets"}, Context())


def test_folder_with_splits(tmp_path):
    import datasets

    splits = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(PROBLEMS), "test": datasets.Dataset.from_list(PROBLEMS[:2])}
    )
    splits.save_to_disk(tmp_path / "folder")
    entry = {**PLAIN, "path": str(tmp_path / "folder"), "split": "test"}
    assert [r.answer for r in load_data(entry, Context()).rows] == ["2", "3"]
    with pytest.raises(DataError, match=r"folder has no split 'tets'; it has train, test. Did you mean 'test'\?"):
        load_data({**entry, "split": "tets"}, Context())


def test_wrong_settings_come_together():
    with pytest.raises(ConfigError) as error:
        started({"source": "chains", "sizes": 3, "difficulty": {"stepz": [1, 2]}})
    assert "data.train.sizes: unknown setting. Did you mean 'size'?" in str(error.value)
    assert "data.train.difficulty.stepz: unknown setting. Did you mean 'steps'?" in str(error.value)
    with pytest.raises(ConfigError, match=r"data\.train\.source: expected file or hub or chains.*, got 'fil'"):
        started({"source": "fil"})
    with pytest.raises(ConfigError, match="source 'file' has no path"):
        started({"source": "file"})
    with pytest.raises(
        ConfigError, match=r"node 'prompts': split 'trains' is not in the data section. Did you mean 'train'\?"
    ):
        started(split="trains")


def test_make_prompts_takes_the_given_uids():
    rows = load_data(CHAINS, Context()).rows[:3]
    node = started()
    batch = make_prompts(rows, node.tokenizer, torch.tensor([7, 5, 9]))
    assert batch.uid.tolist() == [7, 5, 9]
    assert [node.tokenizer.decode(t) for t in batch.tokens.to_lists()] == batch.text


def test_replicas_take_shares_of_one_batch():
    """Prompts and their ids do not depend on the number of replicas, nor does the place in the data."""
    whole = draw(started(batch=8), 3)
    for count in (2, 3):
        nodes = [started(batch=8) for _ in range(count)]
        for rank, node in enumerate(nodes):
            node.context.ranks = Ranks(rank=rank, world=count, num_replicas=count)
        shares = [draw(node, 3) for node in nodes]
        for iteration, batch in enumerate(whole):
            parts = [share[iteration] for share in shares]
            assert torch.cat([p.uid for p in parts]).tolist() == batch.uid.tolist()
            assert [t for p in parts for t in p.text] == batch.text
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert all(node.state_dict() == nodes[0].state_dict() for node in nodes)
    with pytest.raises(
        ConfigError,
        match=r"node 'prompts': expected at least one problem per replica, got batch 2 for 3 replicas",
    ):
        DatasetPrompts(DatasetPrompts.Config(batch=2)).setup(
            Context(node="prompts", ranks=Ranks(world=3, num_replicas=3))
        )


def test_a_bad_row_is_rejected_once_however_many_replicas_read_it(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '{"question": "1 + 1", "answer": ""}\n{"question": "<solve> 1 s1 + 2", "answer": "3"}\n'
    )
    contexts = [Context(node="prompts", ranks=Ranks(rank=r, world=2, num_replicas=2)) for r in range(2)]
    for context in contexts:
        load_data({**PLAIN, "path": str(tmp_path / "rows.jsonl")}, context)
    assert [len(c.rejected) for c in contexts] == [1, 0]
