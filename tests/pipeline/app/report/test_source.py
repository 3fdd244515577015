"""Run directories with something missing: the reader says so and reads the rest."""

import fcntl
import json
import os

import pyarrow.parquet as pq
import pytest

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.report.cards import data_card
from creditgraph.pipeline.app.report.page import report_html
from creditgraph.pipeline.app.report.rollouts import collect
from creditgraph.pipeline.app.report.source import read_run
from creditgraph.pipeline.core.errors import RunError


def notes_of(run):
    source = read_run(run)
    html = report_html([source])
    return source.notes, html


def test_a_sound_run_has_no_notes(make_run):
    run = make_run()
    notes, html = notes_of(run)
    assert notes == []
    assert "8 rollouts" in html


def test_no_such_run(tmp_path, capsys):
    (tmp_path / "toy_srpo-s0").mkdir()
    assert main(["report", str(tmp_path / "toy_srpo-s1")]) == 2
    assert "no such run directory. Did you mean 'toy_srpo-s0'?" in capsys.readouterr().err
    with pytest.raises(RunError, match="not a run"):
        read_run(tmp_path / "toy_srpo-s0")


def test_no_recordings(make_run):
    notes, html = notes_of(make_run(records=False))
    assert notes == [
        "nothing is recorded (record/ is empty), so there are no rollouts; train with run.record.every=1 to see them"
    ]
    assert "No rollouts are recorded." in html
    assert "Learning curves" in html


def test_no_metrics_and_no_config(make_run):
    run = make_run()
    (run / "metrics.jsonl").unlink()
    (run / "config.yaml").write_text("a: [", encoding="utf-8")
    notes, html = notes_of(run)
    assert any(n.startswith("config.yaml cannot be read") for n in notes)
    assert any("no metrics" in n for n in notes)
    assert any("tokenizer is not on this machine" in n for n in notes)
    assert "8 rollouts" in html


def test_half_written_parquet_is_named_and_the_rest_is_shown(make_run):
    run = make_run()
    file = run / "record" / "advantage.credit" / "000001.parquet"
    file.write_bytes(file.read_bytes()[:100])
    source = read_run(run)
    rollouts = collect([source])
    assert any("record/advantage.credit/000001.parquet is half-written or damaged" in n for n in source.notes)
    assert len(rollouts) == 8
    assert sum(v == v for v in rollouts.rows["mean_credit"]) == 3  # iteration 0 alone


def test_a_newer_schema_is_left_out(make_run):
    run = make_run()
    file = run / "record" / "rewards.rewards" / "000000.parquet"
    table = pq.read_table(file)
    note = json.loads(table.schema.metadata[b"creditgraph"]) | {"format": 99}
    pq.write_table(table.replace_schema_metadata({b"creditgraph": json.dumps(note)}), file)
    notes, _ = notes_of(run)
    assert any("expected record format 1, got 99" in n for n in notes)


def test_one_record_of_an_older_schema_among_newer_ones(make_run):
    run = make_run()
    file = run / "record" / "rewards.rewards" / "000000.parquet"
    table = pq.read_table(file)
    note = json.loads(table.schema.metadata[b"creditgraph"])
    del note["fields"]["valid"]
    pq.write_table(table.drop_columns(["valid"]).replace_schema_metadata({b"creditgraph": json.dumps(note)}), file)
    source = read_run(run)
    rollouts = collect([source])
    assert any("has no valid, which Rewards needs; it was recorded by another version" in n for n in source.notes)
    assert [bool(x == x) for x in rollouts.rows["reward"]] == [False] * 4 + [
        True,
        True,
        False,
        True,
    ]  # iteration 0 has none, nor has a failed chain


def test_a_data_card_is_shown_whatever_it_holds(make_run):
    run = make_run()
    card = {
        "data.train": {
            "source": "<b>hub/x</b>",
            "rows": {"read": 12345, "rejected": {"no answer": 3}, "filtered": {}},
            "files": [{"sha256": "ab"}],
        }
    }
    (run / "data_card.json").write_text(json.dumps(card), encoding="utf-8")
    source = read_run(run)
    parts = dict(data_card(source))
    assert parts["data.train"] == [
        ("source", "<b>hub/x</b>"),
        ("rows.read", "12,345"),
        ("rows.rejected.no answer", "3"),
        ("rows.filtered", "none"),
        ("files.0.sha256", "ab"),
    ]
    assert ("tasks", "chains 2") in parts["as configured and recorded"]
    html = report_html([source])
    assert "&lt;b&gt;hub/x" in html
    assert "<h3>data.train</h3>" in html
    (run / "data_card.json").write_text("{", encoding="utf-8")
    assert any(n.startswith("data_card.json cannot be read") for n in notes_of(run)[0])


def test_a_run_still_going(make_run):
    run = make_run()
    handle = os.open(run / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        notes, html = notes_of(run)
    finally:
        os.close(handle)
    assert any(n.startswith("still running") for n in notes)
    assert "(still running)" in html
    assert notes_of(run)[0] == []


def test_missing_outputs_are_named(make_run):
    run = make_run()
    for file in (run / "record" / "advantage.credit").iterdir():
        file.unlink()
    (run / "record" / "rewards.rewards" / "000001.parquet").unlink()
    source = read_run(run)
    rollouts = collect([source])
    assert "no output with Credit is recorded: no credit (tokens stay plain)" in source.notes
    assert "rewards.rewards is not recorded in every iteration that has rollouts" in source.notes
    assert len(rollouts) == 8


def test_a_graph_of_another_version(make_run):
    run = make_run()
    text = (run / "config.yaml").read_text(encoding="utf-8")
    (run / "config.yaml").write_text(text.replace("use: buffer.merge", "use: buffer.gone"), encoding="utf-8")
    notes, html = notes_of(run)
    assert any("does not build in this version" in n for n in notes)
    assert 'id="graph"' not in html
