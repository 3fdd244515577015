"""Every data file composes, and its entries load from small files of the schema that the dataset's card states."""

import json
import re

import pyarrow
import pyarrow.parquet
import pytest
from hub_rows import SCHEMAS, derived

from creditgraph.components.data.rows import is_short_answer
from creditgraph.components.tasks import TASKS
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.data.check import check_entry
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.run.compose.choices import CONFIG_DIR, list_choices
from creditgraph.pipeline.run.compose.experiment import compose

NAMES = [name for name in list_choices("data", [CONFIG_DIR]) if name != "file"]  # a file of the user's own
PROMISED = (
    "aime_2024 aime_2025 aime_2026 amc23 math_500 minerva_math olympiadbench hmmt_2025 acereason_math math_level5 "
    "sciknoweval_l3 "
    "strategyqa commonsense_qa livecodebench_v6 livecodebench gsm8k deepmath_103k open_rs opencodereasoning "
    "dapo_math_17k math numina_cot "
    "numina_competitions numina_olympiads openr1_math_4k "
)
ROWS = 60


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Dataset → a local copy with `ROWS` rows: the files an entry names, or one Parquet file."""
    folder = tmp_path_factory.mktemp("copies")

    def make(name, files, settings):
        rows = [SCHEMAS[name](i) if name in SCHEMAS else derived(settings, i) for i in range(ROWS)]
        place = folder / name.replace("/", "--")
        if files:
            place.mkdir(exist_ok=True)
            for k, file in enumerate(files):
                (place / file).write_text("".join(json.dumps(row) + "\n" for row in rows[k :: len(files)]))
            return place
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place.with_suffix(".parquet"))
        return place.with_suffix(".parquet")

    return make


def entries():
    return [(name, entry) for name in NAMES for entry in compose([f"data={name}"])["data"]]


def localised(settings, copies):
    """The entry with a local copy of its schema in place of the hub."""
    if settings["source"] in TASKS:
        return settings | {"size": 5}
    local = settings | {"path": str(copies(settings["name"], settings.get("files"), settings))}
    if settings.get("shuffle"):
        local |= {"size": min(settings["size"], 6), "skip": min(settings.get("skip", 0), 6)}
    if settings.get("join"):
        join = settings["join"]
        local["join"] = join | {"path": str(copies(join["name"], join.get("files"), settings))}
    return local


def test_every_promised_dataset_is_there():
    assert [name for name in PROMISED.split() if name not in NAMES] == []


@pytest.mark.parametrize("name", NAMES)
def test_entries_load_and_the_verifier_accepts_their_answers(name, copies):
    sections = compose([f"data={name}"])["data"]
    assert sections
    for entry, settings in sections.items():
        check = check_entry(localised(settings, copies), f"data.{entry}", None, 0)
        assert check.loaded.counts.rejected.total() <= ROWS // 2
        assert check.refused == []
        assert len(check.loaded.rows) >= 1
        assert all(row.metadata["question"] and row.text for row in check.loaded.rows)
        if settings["source"] == "hub":
            assert settings["verifier"].startswith("verifier.")
            assert "revision" in settings


@pytest.mark.parametrize("name", ["gsm8k", "math", "commonsense_qa", "strategyqa", "sciknoweval_l3", "livecodebench"])
def test_a_new_dataset_needs_no_schema(name, copies):
    """Its file alone is enough: rows are derived from the columns of its entry."""
    settings = compose([f"data={name}"])["data"]["eval"] | {"name": f"somebody/{name}"}
    check = check_entry(localised(settings, copies), "data.eval", None, 0)
    assert len(check.loaded.rows) == ROWS
    assert check.refused == []


@pytest.mark.parametrize("name", [n for n in NAMES if n not in TASKS and not n.startswith("chains")])
def test_files_say_where_their_schema_is_from(name):
    first, second, third = list_choices("data", [CONFIG_DIR])[name].read_text().splitlines()[:3]
    assert re.match(r"# \w.*\.$", first)
    assert re.match(
        r"# (Columns as on|Column names from .*, not checked against) the dataset card; not loaded here\.$", second
    )
    assert third == f"# `creditgraph data check {name}` loads it and prints the revision to pin."


def only(name, copies, entry="eval"):
    settings = compose([f"data={name}"])["data"][entry]
    return check_entry(localised(settings, copies), f"data.{entry}", None, 0)


def test_answers_are_taken_from_where_they_stand(copies):
    assert [r.answer for r in only("gsm8k", copies).loaded.rows][:2] == ["0,000", "1,000"]
    assert [r.answer for r in only("amc23", copies).loaded.rows][:2] == ["0", "1"]
    assert [r.answer for r in only("aime_2024", copies).loaded.rows][:2] == ["000", "001"]
    assert [r.answer for r in only("olympiadbench", copies).loaded.rows][:2] == ["0, 1", "$1$"]
    assert [r.answer for r in only("strategyqa", copies).loaded.rows][:2] == ["yes", "no"]
    assert [r.answer for r in only("math", copies).loaded.rows][:2] == ["\\frac{0}{7}", "\\frac{1}{7}"]


def test_filters_count_what_they_leave_out(copies):
    level = only("math_level5", copies).loaded
    assert [r.metadata["source_row"] for r in level.rows] == list(range(4, ROWS, 5))
    assert level.counts.filtered == {"level": ROWS * 4 // 5}
    science = only("sciknoweval_l3", copies).loaded
    assert [r.metadata["source_row"] for r in science.rows] == [3, 19, 35, 51]
    assert science.counts.filtered == {"details.level": ROWS * 3 // 4, "domain": 11}
    olympiads = only("numina_olympiads", copies, "train").loaded  # rows 0, 3 … 57; every second one has a long answer
    assert olympiads.counts.rejected == {"an answer of N characters; at most N are taken": 10}
    assert (len(olympiads.rows), olympiads.counts.used, olympiads.counts.not_chosen) == (6, 6, 4)


def test_train_and_eval_of_one_split_do_not_overlap(copies):
    for name, total in (("acereason_math", ROWS), ("numina_olympiads", ROWS // 6)):
        rows = [only(name, copies, entry).loaded.rows for entry in ("train", "eval")]
        train, held_out = ({row.metadata["question"] for row in part} for part in rows)
        assert not train & held_out
        assert len(train | held_out) == total


def test_olympiads_come_in_an_order_of_the_seed(copies):
    settings = compose(["data=numina_olympiads"])["data"]["train"]

    def order(**changes):
        rows = check_entry(localised(settings | changes, copies), "data.train", None, 0).loaded.rows
        return [row.metadata["source_row"] for row in rows]

    assert order() == order()
    assert order() != sorted(order())
    assert order() != order(seed=7)
    # The order is one of rows: what another filter leaves stays in it.
    everything = check_entry(
        localised(settings | {"max_answer": 0, "short_answer": False}, copies) | {"size": 0}, "d", None, 0
    )
    wide = [row.metadata["source_row"] for row in everything.loaded.rows]
    assert [row for row in wide if row in order()] == order()


def test_a_check_of_the_first_rows_skips_none(copies):
    settings = localised(compose(["data=numina_olympiads"])["data"]["eval"], copies) | {"skip": 400}
    assert len(check_entry(settings, "data.eval", None, 30).loaded.rows) == 5  # rows 0, 6 … 24
    with pytest.raises(DataError, match="skip left out all of its 10 usable rows"):
        check_entry(settings, "data.eval", None, 0)


def test_half_of_the_private_tests_each(copies):
    train, held_out = (
        {
            int(re.search(r"number, (\d+)", row.metadata["question"])[1]): row.metadata["tests"]
            for row in only("livecodebench", copies, entry).loaded.rows
        }
        for entry in ("train", "eval")
    )
    # The medium ones; those of a multiple of four have no private tests, and of three the second half has two.
    assert sorted(train) == sorted(held_out) == [i for i in range(1, ROWS, 3) if i % 4]
    for row, tests in train.items():
        inputs = [test["input"] for test in (*tests, *held_out[row])]
        assert sorted(inputs) == sorted(f"{row + k}\n" for k in (1, 2, 3))
        assert (len(tests), len(held_out[row])) == (1, 2)
        assert not any(test["public"] for test in (*tests, *held_out[row]))
    assert len({int(tests[0]["input"]) - row for row, tests in train.items()}) == 3  # not always the same place


def test_rows_without_choices_are_asked_for_a_value(copies):
    rows = {r.metadata["source_row"]: r for r in only("sciknoweval_l3", copies).loaded.rows}
    assert (rows[3].answer, rows[3].metadata["answer_kind"]) == ("B", "choice")
    assert (rows[19].answer, rows[19].metadata["answer_kind"], rows[19].metadata["question"]) == (
        "19 g",
        "value",
        "Metal 19?",
    )
    assert "choices" not in rows[19].metadata


@pytest.mark.parametrize(
    ("answer", "short"),
    [
        ("7", True),
        ("C", True),
        ("F", False),
        ("\\frac{3}{7}", True),
        ("\\sqrt{2} + \\pi", True),
        ("x = y", False),
        ("12 apples", False),
        ("3 cm", False),
        ("5 cm²", False),
        ("50\\%", False),
        ("1 or 2", False),
        ("\\text{4}", False),
        ("(1, 2", False),
        (": 5", False),
        ("\\{1, 2\\}", True),
    ],
)
def test_short_answers(answer, short):
    """The rule of 2605.25507's release."""
    assert is_short_answer(answer) == short


def test_choices_stand_under_the_question(copies):
    row = only("commonsense_qa", copies).loaded.rows[1]
    assert row.metadata["question"] == "Where is 1?\n\nA. sky\nB. sea\nC. sun\nD. sand\nE. salt"
    assert (row.answer, row.metadata["choices"][1]) == ("B", "sea")


def test_programs_carry_their_tests(copies):
    check = only("livecodebench_v6", copies)
    rows = {r.metadata["source_row"]: r for r in check.loaded.rows}
    assert sorted(rows) == list(range(1, ROWS, 3))  # the medium ones
    assert rows[1].metadata["tests"][1] == {"input": "2\n", "output": "2\n", "public": False}
    assert rows[1].metadata["fn_name"] == ""
    assert rows[1].metadata["question"].endswith("The program reads standard input and writes standard output.")
    assert rows[10].metadata["fn_name"] == "same"
    assert "The program begins with:\n```python\nclass Solution:" in rows[10].metadata["question"]
    assert check.verifier == "65 tests, 20 of them public; 10 problems call a function, 10 read standard input"


def test_a_joined_dataset_gives_question_and_tests(copies):
    check = only("opencodereasoning", copies, "train")
    # Odd rows are of APPS; row i is its row i // 2.
    assert [r.metadata["question"].split(".")[0] for r in check.loaded.rows] == [f"Echo {i}" for i in range(ROWS // 2)]
    assert check.loaded.counts.filtered == {"dataset": ROWS // 2}
    assert json.loads(check.loaded.rows[2].metadata["tests"]) == {"inputs": ["2\n"], "outputs": ["2\n"]}


def test_the_command_checks(copies, capsys):
    local = copies("openai/gsm8k", None, {})
    assert main(["data", "check", "gsm8k", "--entry", "eval", "--path", str(local), "--rows", "10"]) == 0
    said = capsys.readouterr().out
    assert "10 read, the first 10 looked at, 10 usable" in said
    assert "verifier.math accepts 10 of 10 reference answers" in said
    assert "(as plain text; --model NAME shows it through its chat template), answer '0,000'\n  | Count to 0." in said


def test_the_command_finds_answers_its_verifier_refuses(tmp_path, capsys):
    rows = [{"question": "Is it?", "answer": "yes"}, {"question": "Or?", "answer": "perhaps\x1b[31m"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["data", "check", "strategyqa", "--entry", "eval", "--path", str(tmp_path / "rows.jsonl")]) == 1
    said = capsys.readouterr().out
    assert "verifier.boolean accepts 1 of 2 reference answers" in said
    assert "row 1: 'perhaps␛[31m': the reference" in said


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["check", "gsm8"], "no data file 'gsm8'. Did you mean 'gsm8k'?"),
        (["check", "gsm8k", "--entry", "evl"], "no entry 'evl'. Did you mean 'eval'?"),
        (
            ["check", "gsm8k", "--path", "x"],
            "--path: expected one entry of gsm8k, got train, eval. Add --entry train.",
        ),
        (["check", "gsm8k", "--rows", "-1"], "--rows ≥ 0 (0: all), got --rows -1."),
    ],
)
def test_mistakes_of_the_command(arguments, text, capsys):
    assert main(["data", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_without_a_network_the_local_way_is_named(monkeypatch, capsys):
    import datasets

    def unreachable(*_args, **_kwargs):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    assert main(["data", "check", "gsm8k", "--entry", "train"]) == 2
    assert "set data.train.path=FILE_OR_FOLDER to read a local copy" in capsys.readouterr().out
