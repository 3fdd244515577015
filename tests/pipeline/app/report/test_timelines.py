"""The timeline of the page: windows, nesting, ranks, and traces with something wrong."""

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.report import timelines
from creditgraph.pipeline.app.report.page import report_html
from creditgraph.pipeline.app.report.source import read_run
from creditgraph.pipeline.app.report.timelines import load_tracks, timeline, windows

spec = importlib.util.spec_from_file_location("report_conftest", Path(__file__).with_name("conftest.py"))
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)
put_trace = helpers.put_trace


def spans_of(run):
    header, columns = timeline(read_run(run))
    names = [header["names"][i] for i in columns["name"]]
    rows = zip(
        columns["track"], names, columns["begin"].round(3), columns["seconds"].round(3), columns["depth"], strict=True
    )
    return header, [(header["tracks"][t], n, float(b), float(s), int(d)) for t, n, b, s, d in rows]


def test_spans_of_every_iteration_with_those_around_them(make_run):
    run = make_run()
    put_trace(run)
    header, spans = spans_of(run)
    assert header["windows"] == [[0, 0.0, 3.0], [1, 3.0, 6.0]]
    assert spans[:3] == [
        ("main", "learner", 1.5, 1.5, 0),
        ("main", "learner", 4.5, 1.5, 0),
        ("generation", "sampler", 0.0, 2.0, 0),
    ]
    assert ("generation", "generate", 0.5, 1.0, 1) in spans
    assert ("generation", "other ranks", 2.0, 0.5, 0) in spans
    assert read_run(run).notes == []


def test_tracks_of_several_ranks_are_named_by_rank(make_run):
    run = make_run()
    for rank in (10, 2):
        put_trace(run, rank)
    assert spans_of(run)[0]["tracks"] == ["rank 2 main", "rank 2 generation", "rank 10 main", "rank 10 generation"]


def test_an_iteration_run_again_counts_in_its_newest_attempt(make_run):
    run = make_run()
    span = {
        "name": "learner",
        "cat": "learning",
        "ph": "X",
        "ts": 1_700_000_900 * 10**6,
        "dur": 10**6,
        "tid": 1,
        "pid": 0,
    }
    put_trace(run, more=",\n" + json.dumps(span | {"args": {"iteration": 1, "attempt": 2}}))
    result = windows(load_tracks(read_run(run)))
    assert result[1] == (1_700_000_900 * 10**6, 1_700_000_901 * 10**6)
    assert result[0][1] - result[0][0] == 3 * 10**6


def test_a_trace_cut_off_by_a_kill_is_reported_and_shown(make_run):
    run = make_run()
    put_trace(run, more=',\n{"name":"sam')
    source = read_run(run)
    assert timeline(source) is not None
    assert source.notes == ["traces/rank-0.json: 1 line cannot be read (cut off by a kill?) and left out"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "\x00\xff",
        '[\n{"ph":"X"}',
        '[\n{"ph":"X","name":"a","cat":"b","ts":1e99,"dur":1,"pid":0,"tid":1,"args":{"attempt":1}}',
        "[[]]",
    ],
)
def test_a_trace_without_spans_leaves_the_section_out(make_run, text):
    run = make_run()
    (run / "traces").mkdir()
    (run / "traces" / "rank-0.json").write_text(text, encoding="utf-8")
    html = report_html([read_run(run)])
    assert 'id="timeline"' not in html
    assert "8 rollouts" in html


def test_one_bad_event_among_good_ones_is_counted(make_run):
    run = make_run()
    put_trace(run, more=',\n{"ph":"X","name":"new","cat":"b","begin":3,"pid":0,"tid":1,"args":{"attempt":1}}')
    source = read_run(run)
    assert len(spans_of(run)[1]) == 8
    timeline(source)
    assert source.notes == ["traces/rank-0.json: 1 events are of another version and left out"]


def test_of_a_long_run_spaced_iterations_are_shown(make_run, monkeypatch):
    monkeypatch.setattr(timelines, "MOST_SPANS", 20)
    run = make_run()
    put_trace(run, iterations=20)
    source = read_run(run)
    header, columns = timeline(source)
    assert [i for i, _, _ in header["windows"]] == [0, 5, 10, 14, 19]
    assert len(columns["begin"]) == 20
    assert source.notes == ["the timeline shows 5 of 20 iterations, evenly spaced; traces/ has all"]


def test_of_many_ranks_spaced_ones_are_shown(make_run):
    run = make_run()
    for rank in range(20):
        put_trace(run, rank)
    (run / "traces" / "rank-0.json").rename(run / "traces" / "rank-0.earlier.json")
    source = read_run(run)
    header, _ = timeline(source)
    shown = {int(t.split()[1]) for t in header["tracks"]}
    assert len(shown) == 16
    assert {0, 19} <= shown
    assert source.notes == ["the timeline shows 16 of 20 ranks, evenly spaced; traces/ has all"]


def test_all_ranks_in_one_file(make_run, tmp_path, capsys):
    run = make_run()
    assert main(["report", str(run), "--trace", str(tmp_path / "all.json")]) == 2
    assert (
        "no traces/rank-N.json; expected a run that was trained with run.trace.enabled=true" in capsys.readouterr().err
    )
    put_trace(run, more=',\n{"name":"half')
    put_trace(run, 1)
    for name in ("all.json", "all.json.gz"):
        assert main(["report", str(run), "--trace", str(tmp_path / name)]) == 0
        data = (tmp_path / name).read_bytes()
        events = json.loads(gzip.decompress(data) if name.endswith("gz") else data)
        assert {e["pid"] for e in events} == {0, 1}
        assert len(events) == 20
    assert "20 events" in capsys.readouterr().out


def test_a_real_run_has_a_timeline(real_run):
    header, spans = spans_of(real_run)
    assert [i for i, _, _ in header["windows"]] == [-1, 0, 1, 2]  # start, two iterations, the final pass
    assert {
        "generation",
        "learning",
        "credit",
        "verification",
        "recording",
        "checkpoint",
        "evaluation",
        "setup",
    } <= set(header["phases"])
    assert any(n == "generate" and d == 1 for _, n, _, _, d in spans)
