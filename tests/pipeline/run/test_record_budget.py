"""Records within a budget: the oldest iterations go, nothing else changes, and no checkpoint misses a listed file."""

import logging

import pytest
import toy_graph as toy

from creditgraph.pipeline.run import checkpoint
from creditgraph.pipeline.run.recorder import RecordSettings
from creditgraph.pipeline.run.recording import recorded_iterations, recorded_sums, removed_records

SMALL = RecordSettings(keep_gb=30e-6)  # a few iterations of the toy graph


def files(path):
    return {f"{file.parent.name}/{file.name}" for file in (path / "record").glob("*/*")}


def test_the_oldest_iterations_go(tmp_path):
    whole, path = tmp_path / "whole", tmp_path / "run"
    toy.train(whole, 12)
    toy.train(path, 12, record=SMALL)
    there = recorded_iterations(path, "score.rewards")
    assert 1 < len(there) < 12
    assert there == list(range(there[0], 12))
    record = path / "record"
    kept = set(recorded_sums(record))
    assert sum((record / file).stat().st_size for file in kept) <= 30_000
    assert kept | set(removed_records(record)) == files(whole)
    assert not kept & set(removed_records(record))
    toy.train(path, 13, record=SMALL)
    assert files(path) <= kept | {f for f in files(path) if f.split("/")[1].startswith("000012")}
    for file in files(path) & files(whole):
        assert (record / file).read_bytes() == (whole / "record" / file).read_bytes()


def test_an_interrupted_run_resumes_without_missing_records(tmp_path, caplog, monkeypatch):
    """Ended between the list of removals and the checkpoint that knows it: the checkpoint before has all its files."""
    path = tmp_path / "run"
    toy.train(path, 7, record=SMALL)

    def broken(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", broken)
    with pytest.raises(KeyboardInterrupt):
        toy.train(path, 12, record=SMALL)
    monkeypatch.undo()
    with caplog.at_level(logging.WARNING, "creditgraph"):
        toy.train(path, 12, record=SMALL)
    assert not [r.getMessage() for r in caplog.records if "checksum" in r.getMessage() or "missing" in r.getMessage()]
    assert set(recorded_sums(path / "record")) <= files(path)


def test_the_newest_iteration_stays_whatever_its_size(tmp_path):
    path = tmp_path / "run"
    toy.train(path, 6, record=RecordSettings(keep_gb=1e-9))
    assert recorded_iterations(path, "score.rewards")[-1] == 5


def test_a_negative_budget_is_refused():
    with pytest.raises(ValueError, match=r"keep_gb -1: expected 0 \(all records are kept\) or more"):
        RecordSettings(keep_gb=-1)
