"""Why of the report: every explaining node of the graph, and notes where one cannot say."""

import shutil

import pytest

from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.pipeline.app.report.page import report_html
from creditgraph.pipeline.app.report.reasons import reasons
from creditgraph.pipeline.app.report.source import read_run
from creditgraph.pipeline.run.recording import read_payload


def test_each_row_of_the_credit_has_its_formula(make_run):
    texts = reasons(read_run(make_run()), 0)
    assert sorted(texts) == [10, 11, 13]
    # Rewards 1, 0, 0: population std √2/3.
    assert texts[10].startswith("advantage (advantage.group): (r − mean)/std = (1 − .333)/.471 = +1.41\n")


def test_nodes_that_follow_each_other_all_speak(real_run):
    run = read_run(real_run)
    texts = reasons(run, run.iterations()[-1])
    credit = read_payload(next((real_run / "record" / "advantage.credit").glob("*.parquet")))
    assert len(texts) == len(credit)
    for text in texts.values():
        first, second = text.partition("\nadvantage (advantage.redistribute): ")[::2]
        assert first.startswith("outcome (advantage.group): ")
        assert "segment 1: value " in second
    assert not any("why credit" in note for note in run.notes)


def test_a_missing_input_is_named(make_run):
    path = make_run()
    shutil.rmtree(path / "record" / "rewards.rewards")
    run = read_run(path)
    assert reasons(run, 0) == {}
    assert (
        "why credit is as it is: advantage (advantage.group) could not say (its inputs rewards are not recorded)"
        in run.notes
    )


def fails(self, outputs, **inputs):
    raise ValueError("no idea")


@pytest.mark.parametrize(
    ("explain", "note"),
    [
        (fails, "could not say (ValueError: no idea)"),
        (lambda self, outputs, **inputs: ["x"], "gave 1 texts for 3 rows"),
    ],
)
def test_what_a_component_does_wrong_costs_a_note_and_no_report(make_run, monkeypatch, explain, note):
    run = read_run(make_run())
    monkeypatch.setattr(GroupAdvantage, "explain", explain)
    assert note in report_html([run])
    assert any(note in text for text in run.notes)


def test_a_component_that_says_nothing_has_no_note(make_run, monkeypatch):
    run = read_run(make_run())
    monkeypatch.setattr(GroupAdvantage, "explain", lambda self, outputs, **inputs: [])
    assert reasons(run, 0) == {}
    assert not any("why" in note for note in run.notes)
