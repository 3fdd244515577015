"""The timeline of a run: spans that nest, files that can always be read, clocks of roles, heartbeats."""

import itertools
import json
import os
import threading
import time
from collections import defaultdict

import pytest
import toy_graph as toy

from creditgraph.pipeline.run.distributed.team import Team
from creditgraph.pipeline.run.metrics import read_metrics
from creditgraph.pipeline.run.timeline import clocks, files, heartbeat, spans
from creditgraph.pipeline.run.timeline.files import cut_torn_line, read_trace, trace_files
from creditgraph.pipeline.run.timeline.heartbeat import where
from creditgraph.pipeline.run.timeline.spans import Timeline, TraceSettings


def spans_of(run):
    events = [e for f in trace_files(run) for e in read_trace(f)[0]]
    return [e for e in events if e["ph"] == "X"], events


def check(spans):
    """Written in the order of their ends, and nesting; returns track → seconds of its outermost spans."""
    tracks = defaultdict(list)
    for e in spans:
        assert {"name", "cat", "ts", "dur", "pid", "tid"} <= e.keys()
        assert e["dur"] >= 0
        tracks[e["pid"], e["tid"]].append(e)
    outer = defaultdict(float)
    for track, events in tracks.items():
        ends = [e["ts"] + e["dur"] for e in events]
        assert all(b >= a - 2 for a, b in itertools.pairwise(ends)), "rounded to microseconds"
        open_ends = []
        for e in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while open_ends and open_ends[-1] <= e["ts"] + 2:
                open_ends.pop()
            end = e["ts"] + e["dur"]
            assert not open_ends or end <= open_ends[-1] + 2, e
            if not open_ends:
                outer[track] += e["dur"] / 1e6
            open_ends.append(end)
    return outer


def test_overlapping_lanes_are_tracks_of_spans_that_nest(tmp_path):
    begin = time.time()
    toy.train(tmp_path / "r", 6, delay=2, sleep=0.01)
    wall = time.time() - begin
    spans, events = spans_of(tmp_path / "r")
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"main", "generation", "recorder"} <= set(named.values())
    assert all(seconds <= wall for seconds in check(spans).values())
    assert all(begin - 1 < e["ts"] / 1e6 < begin + wall + 1 for e in spans)
    by_lane = defaultdict(set)
    for e in spans:
        by_lane[named[e["tid"]]].add((e["name"], e["cat"], e["args"].get("iteration")))
    assert {("score", "verification", i) for i in range(6)} <= by_lane["generation"]
    assert {("learner", "learning", i) for i in range(6)} <= by_lane["main"]
    assert ("checkpoint", "checkpoint", 2) in by_lane["main"]
    assert ("score.rewards", "recording", 0) in by_lane["recorder"]


def test_shares_are_of_the_iteration_and_in_the_metrics(tmp_path):
    toy.train(tmp_path / "r", 3, delay=1, sleep=0.02)
    rows = [r for r in read_metrics(tmp_path / "r" / "metrics.jsonl") if "seconds/iteration" in r]
    for row in rows:
        assert {k: True for k in row if k.startswith("utilisation/")} == {
            f"utilisation/{r}": True for r in spans.REPORTED
        }
        # Both clocks are read a moment apart, and a busy machine makes the moment long.
        assert 0.5 * 0.02 <= row["utilisation/learner"] * row["seconds/iteration"] <= 2 * row["seconds/learner"]
        assert row["utilisation/learner"] <= 1
        assert row["utilisation/engine"] == 0


def test_a_resumed_run_appends_and_a_torn_line_is_cut(tmp_path):
    toy.train(tmp_path / "r", 2)
    file = tmp_path / "r" / "traces" / "rank-0.json"
    before, bad = read_trace(file)
    assert bad == 0
    with file.open("a") as handle:
        handle.write(',\n{"name":"half')
    assert read_trace(file)[1] == 1
    toy.train(tmp_path / "r", 4)
    events, bad = read_trace(file)
    assert bad == 0
    assert events[: len(before)] == before
    assert [e["name"] for e in events if e["ph"] == "i"] == ["attempt 1", "attempt 2"]
    spans = [e for e in events if e["ph"] == "X" and e["name"] == "learner" and e["cat"] == "learning"]
    assert [(e["args"]["attempt"], e["args"]["iteration"]) for e in spans] == [(1, 0), (1, 1), (2, 2), (2, 3)]
    # As Chrome and Perfetto read it: an array whose closing bracket is missing.
    assert json.loads(file.read_text() + "]") == events


@pytest.mark.parametrize("text", ["", "[", "[\n", '[\n{"a":1', '[\n{"a":1},\n{"b', '[\n{"a":1},\n', '[\n{"a":1}'])
def test_a_trace_cut_anywhere_can_be_continued(tmp_path, text):
    file = tmp_path / "rank-0.json"
    file.write_text(text)
    size = cut_torn_line(file)
    kept = file.read_text()
    assert len(kept) == size
    whole = kept + (",\n" if size else "[\n") + '{"c":2}'
    assert json.loads(whole + "]")[-1] == {"c": 2}
    assert ('{"a":1}' in whole) == ('{"a":1}' in text)


def test_a_full_trace_keeps_the_newest_half(tmp_path):
    trace = Timeline(tmp_path, TraceSettings(megabytes=0.02))
    trace.start(Team())
    for i in range(400):
        with trace.span("node", "generation", i):
            pass
        if i % 20 == 19:
            trace._flush()
    trace.close()
    files = trace_files(tmp_path)
    assert [f.name for f in files] == ["rank-0.earlier.json", "rank-0.json"]
    assert sum(f.stat().st_size for f in files) < 0.03e6
    kept = [e["args"]["iteration"] for e in spans_of(tmp_path)[0]]
    assert kept == list(range(kept[0], 400))
    for file in files:
        assert "process_name" in {e["name"] for e in read_trace(file)[0]}


def test_switched_off_there_is_a_heartbeat_and_no_trace(tmp_path):
    toy.train(tmp_path / "r", 1, trace=TraceSettings(enabled=False))
    assert not (tmp_path / "r" / "traces").exists()
    assert json.loads((tmp_path / "r" / "heartbeat.json").read_text())["state"] == "ended"


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path, monkeypatch, caplog):
    write = os.write

    def full(file, data):
        if data.startswith((b"[\n{", b",\n{")):
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(files.os, "write", full)
    assert toy.train(tmp_path / "r", 2).status == "finished"
    assert "rank-0.json cannot be written (No space left on device); the run continues without it" in caplog.text


def test_a_heartbeat_tells_what_takes_so_long(tmp_path):
    trace = Timeline(tmp_path)
    trace.start(Team())
    with trace.span("sampler", "generation", 7), trace.span("generate", "generation"):
        beat = None
        while not (beat and beat["lanes"]):  # the thread beats once a second
            time.sleep(0.02)
            beat = heartbeat.read_heartbeat(tmp_path / "heartbeat.json")
    trace.close()
    lane = beat["lanes"]["main"]
    assert (lane["node"], lane["iteration"], lane["phase"], lane["inside"]) == ("sampler", 7, "generation", "generate")
    assert lane["since"] <= beat["time"]
    assert where(tmp_path) == "", "all have ended"


def beat(run, rank, now, node, phase, iteration, since, age=0.5, track="main", attempt=2, **more):
    lanes = {track: {"node": node, "phase": phase, "iteration": iteration, "since": now - since, "inside": ""}}
    note = {
        "rank": rank,
        "world": 4,
        "host": f"n{rank}",
        "attempt": attempt,
        "state": "running",
        "time": now - age,
        "lanes": lanes,
    } | more
    (run / heartbeat.heartbeat_name(rank)).write_text(json.dumps(note))


def test_the_rank_that_others_wait_for_comes_first(tmp_path):
    now = time.time()
    assert where(tmp_path) == ""
    beat(tmp_path, 0, now, "learner", "waiting", 12, 210)
    beat(tmp_path, 1, now, "sampler", "generation", 12, 214)
    beat(tmp_path, 2, now, "learner", "waiting", 12, 209)
    beat(tmp_path, 3, now, "learner", "learning", 12, 3, age=90)
    beat(tmp_path, 7, now, "sampler", "generation", 3, 9000, attempt=1)  # of an attempt with more ranks
    assert where(tmp_path, now) == (
        "rank 3 (n3) silent since 90 s; rank 3 in learner of iteration 12 since 3 s; rank 1 in sampler of iteration 12 "
        "since 214 s; "
        "ranks 0, 2 waiting in learner of iteration 12 since 210 s"
    )


def test_half_a_heartbeat_is_none(tmp_path):
    (tmp_path / "heartbeat.json").write_text('{"rank": 0, "ti')
    assert where(tmp_path) == ""


def test_clocks_of_roles_count_overlapping_spans_once():
    trace = Timeline()
    trace.shares()
    barrier = threading.Barrier(2)

    def work():
        with trace.span("generate", "generation", role="engine"):
            barrier.wait()
            time.sleep(0.05)

    threads = [threading.Thread(target=work, name=f"t{i}") for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    time.sleep(0.05)
    shares = trace.shares()
    assert 0 < shares["engine"] < 1  # 50 ms of at least 100, though two spans ran
    assert trace.shares()["engine"] == 0
    assert shares["learner"] == 0


def test_the_clock_is_rank_0s():
    class Late(Team):
        def from_first(self, value):
            return [t + 3600.0 for t in value]

    assert clocks.clock_offset(Late()) == pytest.approx(3600, abs=1e-3)


def test_numbers_are_sampled_and_a_broken_probe_ends(tmp_path, caplog):
    trace = Timeline(tmp_path)
    trace.start(Team())
    trace.watch("engine", lambda: {"server 0": 3})
    trace.watch("broken", lambda: {}["x"])
    trace._sample()
    trace.write("load", "weight update", 0.0, 1.0, "server 0", version=3)
    trace.close()
    spans, events = spans_of(tmp_path)
    assert next(e["args"] for e in events if e["ph"] == "C" and e["name"] == "engine: server 0") == {"value": 3}
    assert spans[0]["args"] == {"version": 3, "attempt": 1}
    assert "the counters of 'broken' cannot be read any more" in caplog.text
