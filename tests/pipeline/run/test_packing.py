"""Records of past iterations in archives: the same bytes, found by every reader, whatever interrupts the packing."""

import hashlib
import logging
from pathlib import Path

import pytest
import torch
import toy_graph as toy

from creditgraph.pipeline.app.report.source import read_run
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.run import packing
from creditgraph.pipeline.run.checkpoint import Checkpoints
from creditgraph.pipeline.run.recorder import RecordSettings
from creditgraph.pipeline.run.recording import read_payload, recorded_iterations, recorded_sums, removed_records

ARCHIVES = ["000000-000003.zip", "000004-000007.zip", "000008-000011.zip"]


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(packing, "SEGMENT", 100)


def tree(path):
    """Relative name → SHA-256 of all that is in record/."""
    folder = path / "record"
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def archives(path):
    return sorted(p.name for p in (path / "record").glob("*.zip"))


def test_records_move_unchanged_and_every_reader_finds_them(tmp_path):
    whole, path = tmp_path / "whole", tmp_path / "run"
    toy.train(whole, 13)
    toy.train(path, 13, segment=4)
    assert archives(path) == ARCHIVES
    # Of 13 iterations, the last is loose: one file of each of its outputs.
    assert {int(p.stem) for p in (path / "record").glob("*/*")} == {12}
    assert packing.recorded_files(path / "record") == packing.recorded_files(whole / "record")
    assert recorded_sums(path / "record") == recorded_sums(whole / "record")
    for name, expected in recorded_sums(path / "record").items():
        assert packing.record_checksum(path / "record" / name) == expected
        assert packing.record_size(path / "record" / name) == (whole / "record" / name).stat().st_size
    assert recorded_iterations(path, "score.rewards") == list(range(13))
    file = Path("record/score.rewards/000005.parquet")
    assert torch.equal(read_payload(path / file).value, read_payload(whole / file).value)
    source = read_run(path)
    assert source.iterations("source.batch") == list(range(13))
    assert source.classes["score.rewards"] == "Rewards"
    assert not [note for note in source.notes if "missing" in note]
    with pytest.raises(DataError, match=r"000099\.parquet: no such record; recorded there: 000000\.parquet to 000012"):
        read_payload(path / "record/score.rewards/000099.parquet")


def test_a_run_that_saves_at_its_end_only_packs_meanwhile(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(packing, "pack", lambda folder, last: seen.append(last))
    toy.train(tmp_path / "run", 13, every=0, segment=4)
    assert seen == [-1, 3, 7, 11, 12]


@pytest.mark.parametrize("instant", ["write", "rename", "delete"])
def test_an_interrupted_packing_is_continued(tmp_path, monkeypatch, instant):
    """Ended while an archive is written, before its rename, or with a part of the loose files deleted."""
    whole, path = tmp_path / "whole", tmp_path / "run"
    toy.train(whole, 12, segment=4)
    count = iter(range(100))

    def ends(*args, **kwargs):
        if next(count) == (3 if instant != "rename" else 0):
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    owner, name = {
        "write": (packing.zipfile.ZipFile, "writestr"),
        "rename": (packing.zipfile.ZipFile, "close"),
        "delete": (Path, "unlink"),
    }[instant]
    real = getattr(owner, name)
    rewrite = packing._rewrite

    def rewritten(*args, **kwargs):
        if instant == "delete":
            rewrite(*args, **kwargs)
        monkeypatch.setattr(owner, name, ends)
        if instant != "delete":
            rewrite(*args, **kwargs)

    monkeypatch.setattr(packing, "_rewrite", rewritten)
    with pytest.raises(KeyboardInterrupt):
        toy.train(path, 12, segment=4)
    monkeypatch.undo()
    toy.train(path, 12, segment=4)
    assert tree(path) == tree(whole)
    assert not list((path / "record").rglob(".*"))


def test_a_run_that_falls_back_to_an_older_checkpoint_packs_the_same(tmp_path):
    whole, path = tmp_path / "whole", tmp_path / "run"
    toy.train(whole, 14, segment=4)
    toy.train(path, 9, segment=4)
    newest = Checkpoints(path / "checkpoints").latest().path
    (newest / "tensors.safetensors").write_bytes(b"")
    toy.train(path, 14, segment=4)
    assert tree(path) == tree(whole)


def test_large_records_stay_files(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "LARGE", 1)
    toy.train(tmp_path / "run", 12, segment=4)
    assert archives(tmp_path / "run") == []


def test_records_beyond_the_budget_leave_their_archives(tmp_path):
    path = tmp_path / "run"
    toy.train(path, 13, segment=4, record=RecordSettings(keep_gb=30e-6))
    gone = removed_records(path / "record")
    toy.train(path, 14, segment=4, record=RecordSettings(keep_gb=30e-6))  # what a checkpoint gives up, the next removes
    assert gone
    assert not set(gone) & set(packing.recorded_files(path / "record"))
    assert set(recorded_sums(path / "record")) <= set(packing.recorded_files(path / "record"))
    assert ARCHIVES[0] not in archives(path)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: data.replace(b"PAR1", b"PAR2"), "its checksum differs"),
        (lambda data: data[: len(data) // 2], "missing, although"),
        (lambda data: b"", "missing, although"),
    ],
)
def test_a_damaged_archive_is_noticed_and_left_alone(tmp_path, caplog, damage, sentence):
    path = tmp_path / "run"
    toy.train(path, 9, segment=4)
    archive = path / "record" / ARCHIVES[0]
    archive.write_bytes(damage(archive.read_bytes()))
    damaged = archive.read_bytes()
    with caplog.at_level(logging.WARNING, "creditgraph"):
        toy.train(path, 12, segment=4)
    assert any("score.rewards/000003.parquet" in r.getMessage() and sentence in r.getMessage() for r in caplog.records)
    assert archive.read_bytes() == damaged
    with pytest.raises(DataError):
        read_payload(path / "record/score.rewards/000003.parquet")
