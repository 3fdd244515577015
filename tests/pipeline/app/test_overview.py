"""`creditgraph runs` and `diff`, and runs that are continued by their directory."""

import csv
import io
import json

import pytest
import yaml

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.overview import differing, find_runs, rows_of, short_names


def make(folder, name, rows=3, **settings):
    """A run directory with `rows` iterations of 4 planned, reward .1 per iteration."""
    run = folder / name
    run.mkdir(parents=True)
    config = {"recipe": "r", "run": {"name": name, "seed": 0, "iterations": 4}, "learner": {"lr": 1.0}, **settings}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [{"iteration": i, "rewards/mean": 0.1 * i, "seconds/iteration": 1.0} for i in range(rows)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_runs_are_found_below_a_folder_and_not_inside_of_runs(tmp_path):
    a = make(tmp_path / "sweep", "a")
    make(a, "inner")
    b = make(tmp_path, "b")
    (tmp_path / ".hidden").mkdir()
    assert find_runs(tmp_path) == [b, a]
    assert find_runs(a) == [a]


@pytest.mark.parametrize(
    ("name", "sentence"), [("rums", "no such run directory. Did you mean 'runs'?"), ("empty", "and none is in it")]
)
def test_a_folder_without_runs_is_one_sentence(tmp_path, capsys, name, sentence):
    (tmp_path / "runs").mkdir()
    (tmp_path / "empty").mkdir()
    assert main(["runs", str(tmp_path / name)]) == 2
    assert sentence in capsys.readouterr().err


def test_rows_show_what_differs_seed_by_seed(tmp_path):
    make(tmp_path, "a", rows=4, learner={"lr": 2.0}, run={"name": "a", "seed": 1, "iterations": 4})
    make(tmp_path, "b", rows=4, learner={"lr": 10.0}, run={"name": "b", "seed": 0, "iterations": 4})
    make(tmp_path, "c", rows=2, learner={"lr": 2.0}, run={"name": "c", "seed": 0, "iterations": 4})
    rows = rows_of(find_runs(tmp_path))
    assert [row.path.name for row in rows] == ["c", "a", "b"]  # lr 2 before 10, as numbers; then seeds
    assert dict(rows[0].differs) == {"learner.lr": 2.0, "run.seed": 0}  # neither run.name
    assert [(row.state, row.done, row.planned) for row in rows] == [("stopped", 2, 4), *2 * [("finished", 4, 4)]]


def test_a_damaged_configuration_is_a_row_of_its_own(tmp_path):
    run = make(tmp_path, "a")
    (run / "config.yaml").write_text("{")
    (row,) = rows_of([run])
    assert row.state == "config.yaml cannot be read"


def test_short_names_are_unambiguous():
    assert short_names(["a.x", "b.x", "c.lr"]) == {"a.x": "a.x", "b.x": "b.x", "c.lr": "lr"}
    assert short_names(["x", "a.x"]) == {"x": "x", "a.x": "a.x"}


def test_csv_has_a_column_per_setting(tmp_path, capsys):
    make(tmp_path, "a")
    make(tmp_path, "b", learner={"lr": 3.0})
    assert main(["runs", str(tmp_path), "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["state"], row["iterations"], row["learner.lr"]) for row in rows] == [
        ("stopped", "3", "1.0"),
        ("stopped", "3", "3.0"),
    ]
    assert [float(row["reward_last"]) for row in rows] == pytest.approx([0.2, 0.2])


def test_diff_shows_settings_and_results(tmp_path, capsys):
    a, b = make(tmp_path, "a"), make(tmp_path, "b", rows=2, learner={"lr": 3.0})
    assert main(["diff", str(b), str(a)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == [str(b), str(a)]  # in the order given
    assert ["learner.lr", "3.0", "1.0"] in lines
    assert ["iterations", "2", "3"] in lines
    assert differing([{"run": {"name": "a"}}, {"run": {"name": "b"}}]) == []


def test_a_run_is_continued_by_its_directory(tmp_path, capsys):
    small = ["prompts.batch=2", "sampler.group_size=2", "evaluator.num_problems=2", "run.record.every=0"]
    assert main(["train", "recipe=toy_grpo", f"run.root={tmp_path}", "run.name=mine", "run.iterations=1", *small]) == 0
    (tmp_path / "mine").rename(tmp_path / "moved")
    capsys.readouterr()
    assert main(["train", str(tmp_path / "moved"), "run.iterations=2"]) == 0
    out = capsys.readouterr().out
    assert "continuing after iteration 0 (1 of 2 are done)" in out
    assert f"run directory: {tmp_path / 'moved'}" in out
    assert main(["train", str(tmp_path / "other")]) == 2
    assert "no run there" in capsys.readouterr().err
