"""Damage to a run directory is noticed on resume, by replays and by reports; nothing is trained on wrong values."""

import hashlib
import json
import logging

import pytest
import toy_graph as toy

from creditgraph.pipeline.app.report.source import read_run
from creditgraph.pipeline.core.errors import DataError, RunError
from creditgraph.pipeline.run.checkpoint import manifest_checksum
from creditgraph.pipeline.run.recording import read_payload


def change_state(folder, change):
    """Changes the JSON of a checkpoint's states and writes checksums that fit."""
    file = folder / "state.json"
    trees = json.loads(file.read_text())
    change(trees)
    file.write_text(json.dumps(trees))
    manifest = json.loads((folder / "manifest.json").read_text())
    raw = file.read_bytes()
    manifest["files"]["state.json"] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sha256": manifest_checksum(manifest)}))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda trees: trees["values"]["v"].pop(),
            "learner.weights of iteration 8, which a wire '@2' of this graph reads",
        ),
        (lambda trees: trees.pop("node.learner"), "state of node 'learner'"),
    ],
)
def test_a_checkpoint_without_what_the_graph_reads_ends_the_run(tmp_path, change, what):
    path = tmp_path / "run"
    assert toy.train(path, 9, delay=2).status == "finished"
    before = (path / "metrics.jsonl").read_bytes()
    folder = path / "checkpoints" / "000008"
    change_state(folder, change)
    with pytest.raises(RunError) as caught:
        toy.train(path, 11, delay=2)
    assert str(caught.value) == (
        f"checkpoint after iteration 8: expected the {what}, but it is not there. Continue with the graph that "
        "wrote the checkpoint, or choose another run.name."
    )
    assert (path / "metrics.jsonl").read_bytes() == before
    assert folder.is_dir()


def test_damaged_shards_fall_back_to_the_checkpoint_before(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(toy, "Learn", toy.ShardedLearn)
    whole, path = tmp_path / "whole", tmp_path / "run"
    toy.train(whole, 11, delay=2, overlap=False)
    assert toy.train(path, 9, delay=2).status == "finished"
    (shard,) = (path / "checkpoints" / "000008" / "shards").rglob("*.pt")
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    with caplog.at_level(logging.WARNING, "creditgraph"):
        assert toy.train(path, 11, delay=2).status == "finished"
    assert "shards/learner/rank0.pt: its checksum differs from the manifest" in caplog.text
    assert (path / "checkpoints" / "damaged-000008").is_dir()
    same = [p / "checkpoints" / "000010" / "manifest.json" for p in (whole, path)]
    assert [json.loads(p.read_text())["files"]["tensors.safetensors"] for p in same] == [
        json.loads(same[0].read_text())["files"]["tensors.safetensors"]
    ] * 2
    assert (path / "checkpoints/000010/shards/learner/rank0.pt").read_bytes() == (
        whole / "checkpoints/000010/shards/learner/rank0.pt"
    ).read_bytes()


def damage_record(path, how):
    file = path / "record" / "score.rewards" / "000003.parquet"
    if how == "delete":
        file.unlink()
    elif how == "swap":
        file.write_bytes(file.with_name("000004.parquet").read_bytes())
    else:
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 3] ^= 4
        file.write_bytes(raw)
    return file


@pytest.mark.parametrize("how", ["flip", "delete", "swap"])
def test_damaged_records_are_noticed_on_resume_and_when_read(tmp_path, caplog, how):
    path = tmp_path / "run"
    toy.train(path, 9, delay=2)
    file = damage_record(path, how)
    sentence = "missing, although" if how == "delete" else "so it is damaged. Restore it from a copy, or remove it."
    with pytest.raises(DataError, match=f"000003.parquet: .*{sentence}"):
        read_payload(file)
    source = read_run(path)
    assert source.read("score.rewards", 3) is None
    assert any("score.rewards/000003.parquet" in note and len(note) < 200 for note in source.notes)
    with caplog.at_level(logging.WARNING, "creditgraph"):
        toy.train(path, 11, delay=2)
    assert [sentence in r.getMessage() for r in caplog.records] == [True]


def test_a_lost_list_of_records_is_noticed(tmp_path, caplog):
    path = tmp_path / "run"
    toy.train(path, 9, delay=2)
    rows = [json.loads(line) for line in (path / "record" / "checksums.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == sorted(row["iteration"] for row in rows)
    assert len(rows) == len(list((path / "record").glob("*/*")))
    (path / "record" / "checksums.jsonl").unlink()
    toy.train(path, 11, delay=2)
    assert "checksums.jsonl: damaged since the checkpoint" in caplog.text
    assert "records are not listed in checksums.jsonl (first " in caplog.text
