import hashlib
import json
import logging
import math
import os
import re
from collections import OrderedDict

import numpy as np
import pytest
import torch

from creditgraph.pipeline.core.encoding import decode, encode
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Rewards, TrainReport, Weights
from creditgraph.pipeline.run.checkpoint import (
    FORMAT,
    Checkpoints,
    CheckpointSettings,
    check_shards,
    load,
    manifest_checksum,
    sum_shards,
)


def sign(folder, **changes):
    """Writes checksums that fit the files and the manifest, as another version would."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    for name, entry in (manifest["files"] if "files" not in changes else {}).items():
        raw = (folder / name).read_bytes()
        entry.update(bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())
    manifest = manifest | {"sha256": manifest_checksum(manifest)} | changes
    (folder / "manifest.json").write_text(json.dumps(manifest))


def through(tmp_path, state):
    store = Checkpoints(tmp_path / "checkpoints")
    store.save(0, {"a": encode(state, "a")})
    return store.latest().groups["a"]


def test_nested_states_come_back_with_types(tmp_path):
    state = {
        "n": None, "b": True, "i": 1 << 100, "f": 0.1, "inf": -math.inf, "s": "é\ud800",
        "l": [1, [2.0]], "t": (1, ("x",)),
        3: {"deep": [()]},
        "o": OrderedDict(z=1, a=2), "bytes": b"\x00\xff", "array": np.arange(3, dtype=np.uint32),
        "number": np.float32(1.5), "empty": {},
    }  # fmt: skip
    back = through(tmp_path, state)
    assert back.pop("array").tolist() == state.pop("array").tolist()
    assert type(back["number"]) is np.float32
    assert back == state
    assert list(back["o"]) == ["z", "a"]
    assert math.isnan(through(tmp_path, {"x": math.nan})["x"])


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.uint8, torch.bool],
)
def test_tensors_keep_dtype_shape_and_bits(tmp_path, dtype):
    tensors = {
        "m": torch.arange(6).reshape(2, 3).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "none": torch.zeros(0, 4, dtype=dtype),
    }
    back = through(tmp_path, {**tensors, "cut": tensors["m"].T[1:]})
    for name, tensor in {**tensors, "cut": tensors["m"].T[1:]}.items():
        assert back[name].dtype == dtype
        assert torch.equal(back[name], tensor)


def test_one_tensor_in_two_places_stays_one(tmp_path):
    shared = torch.arange(4.0)
    back = through(tmp_path, {"a": shared, "b": [shared], "view": shared.view(2, 2), "part": shared[1:]})
    assert back["a"] is back["b"][0]
    assert back["view"].data_ptr() != back["a"].data_ptr()
    assert torch.equal(back["part"], shared[1:])
    assert sum(f.stat().st_size for f in (tmp_path / "checkpoints/000000").glob("*.safetensors")) < 600


def test_copy_takes_a_snapshot():
    weights = torch.zeros(2)
    snapshot, live = encode({"w": weights}, "x", copy=True), encode({"w": weights}, "x", copy=False)
    weights.add_(1)
    assert decode(snapshot)["w"].tolist() == [0, 0]
    assert decode(live)["w"].tolist() == [1, 1]


def test_payloads_in_flight_come_back(tmp_path):
    weights = Weights(version=7, tensors={"w": torch.ones(2, dtype=torch.bfloat16)})
    object.__setattr__(weights, "origin", "learner.weights")
    flags = torch.tensor([True])
    rewards = Rewards(uid=torch.tensor([3]), value=torch.tensor([0.5]), correct=flags, valid=flags, detail=["x"])
    state = {
        ("learner", "weights", -1): weights,
        ("r", "r", 0): rewards,
        ("l", "report", 0): TrainReport(metrics={"a": 1.0}, seconds={}),
    }
    back = through(tmp_path, {**state, "j": Jagged.from_rows([[1], []])})
    assert back["learner", "weights", -1].origin == "learner.weights"
    assert back["learner", "weights", -1].tensors["w"].dtype == torch.bfloat16
    assert back["r", "r", 0].detail == ["x"]
    assert back["l", "report", 0].metrics == {"a": 1.0}
    assert back["j"].to_lists() == [[1], []]


def test_what_cannot_be_stored_is_named_with_its_place():
    with pytest.raises(
        RunError,
        match=r"learner: state_dict\(\)\['a'\]\[1\]: a builtins\.set cannot be checkpointed; expected tensors",
    ):
        encode({"a": [1, {2}]}, "learner: state_dict()")
    with pytest.raises(RunError, match=r"dense real tensor"):
        encode(torch.zeros(2, dtype=torch.complex64), "x")


def test_only_the_newest_are_kept_and_unfinished_ones_ignored(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    for iteration in (1, 9, 10, 11):
        store.save(iteration, {"a": encode({"i": iteration}, "a")})
    (tmp_path / ".tmp-000012").mkdir()
    (tmp_path / "notes").mkdir()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["000010", "000011"]
    assert store.latest().iteration == 11
    store.clean()
    assert not (tmp_path / ".tmp-000012").exists()
    assert Checkpoints(tmp_path / "none").latest() is None


@pytest.mark.parametrize("damage", ["truncate", "flip", "no manifest", "no state", "half manifest"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, caplog, damage):
    store = Checkpoints(tmp_path)
    for iteration in (4, 5):
        store.save(iteration, {"a": encode({"w": torch.full((50,), float(iteration))}, "a")})
    newest = tmp_path / "000005"
    tensors = newest / "tensors.safetensors"
    if damage == "truncate":
        os.truncate(tensors, 100)
    elif damage == "flip":
        raw = bytearray(tensors.read_bytes())
        raw[-1] ^= 1
        tensors.write_bytes(raw)
    elif damage == "half manifest":
        os.truncate(newest / "manifest.json", 30)
    else:
        (newest / ("manifest.json" if damage == "no manifest" else "state.json")).unlink()
    with caplog.at_level(logging.WARNING, "creditgraph"):
        result = store.latest()
    assert result.iteration == 4
    assert result.groups["a"]["w"][0] == 4
    assert "000005" in caplog.text
    assert "It is skipped; the previous one is tried." in caplog.text
    with pytest.raises(RunError, match="000005"):
        load(newest)
    store.save(5, {"a": encode({"w": torch.zeros(1)}, "a")})  # the repeated iteration replaces the damaged one
    assert store.latest().iteration == 5


@pytest.mark.parametrize(
    ("file", "old", "new", "sentence"),
    [
        ("manifest.json", f'"format": {FORMAT}', f'"format": {FORMAT - 1}', f"checkpoint format {FORMAT}, got "),
        ("manifest.json", f'"format": {FORMAT}', f'"format": {FORMAT + 1}', f"checkpoint format {FORMAT}, got "),
        (
            "state.json",
            "payloads:Rewards",
            "payloads:Prizes",
            "payload class 'creditgraph.pipeline.core.payloads:Prizes'",
        ),
    ],
)
def test_another_version_s_checkpoint_ends_the_run_and_does_not_start_it_again(tmp_path, file, old, new, sentence):
    flags = torch.tensor([True])
    rewards = Rewards(uid=torch.tensor([3]), value=torch.tensor([0.5]), correct=flags, valid=flags, detail=["x"])
    store = Checkpoints(tmp_path)
    for iteration in (4, 5):
        store.save(iteration, {"a": encode({"r": rewards}, "a")})
    changed = tmp_path / "000005" / file
    text = changed.read_text()
    assert old in text
    changed.write_text(text.replace(old, new))
    sign(tmp_path / "000005")
    with pytest.raises(RunError, match=re.escape(sentence)):
        store.latest()


@pytest.fixture
def pair(tmp_path):
    store = Checkpoints(tmp_path)
    for iteration in (5, 7):
        store.save(iteration, {"a": encode({"w": torch.full((50,), float(iteration))}, "a")})
    return store


@pytest.mark.slow
def test_no_bit_of_a_manifest_can_be_flipped(pair):
    file = pair.path / "000007" / "manifest.json"
    raw = file.read_bytes()
    parsed = json.loads(raw)
    silent = 0
    for bit in range(len(raw) * 8):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        try:
            load(file.parent)
        except RunError:
            continue
        assert json.loads(changed) == parsed  # white space became other white space
        silent += 1
    assert silent < len(raw) / 4


@pytest.mark.parametrize(
    "content",
    [
        "[]", "null", '"x"', "7", "", "{}", "[" * 100_000, '{"a":' * 100_000, "\x00" * 50,
        {"files": None}, {"files": []}, {"files": {}}, {"files": {"state.json": 3}}, {"iteration": "seven"},
        {"iteration": None}, {"iteration": 7.0}, {"iteration": True}, {"iteration": 5}, {"format": "3"}, {"logs": None},
        {"files": {"../000005/state.json": {"bytes": 1, "sha256": "0"}}}, {"sha256": None}, {"sha256": "0" * 64},
    ],
)  # fmt: skip
@pytest.mark.parametrize("signed", [True, False])
def test_an_ill_typed_manifest_is_damage_and_the_older_checkpoint_is_used(pair, caplog, content, signed):
    folder = pair.path / "000007"
    file = folder / "manifest.json"
    if isinstance(content, str):
        file.write_text(content)
    elif signed:
        sign(folder, **content)
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | content))
    with caplog.at_level(logging.WARNING, "creditgraph"):
        assert pair.latest(rename=True).iteration == 5
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]
    assert "set aside as damaged-000007; the previous one is tried." in caplog.text
    assert sorted(p.name for p in pair.path.iterdir()) == ["000005", "damaged-000007"]


def test_damaged_ones_never_take_the_place_of_new_ones(pair, caplog):
    for name in ("000005", "000007"):
        os.truncate(pair.path / name / "tensors.safetensors", 10)
    assert pair.latest() is None  # a reader renames nothing
    assert sorted(p.name for p in pair.path.iterdir()) == ["000005", "000007"]
    with caplog.at_level(logging.WARNING, "creditgraph"):
        assert pair.latest(rename=True) is None
    assert "no valid checkpoint is left; a run that continues here starts from its first iteration." in caplog.text
    for iteration in (1, 2, 3):
        pair.save(iteration, {"a": encode({}, "a")})
    pair.clean()
    assert pair.latest().iteration == 3
    assert sorted(p.name for p in pair.path.iterdir()) == ["000002", "000003", "damaged-000005", "damaged-000007"]
    (pair.path / "000009").write_text("a file")
    (pair.path / "damaged-000009").mkdir()
    assert pair.latest(rename=True).iteration == 3
    assert (pair.path / "damaged-000009-2").is_file()


def test_the_checkpoint_of_another_iteration_is_damage(pair):
    (pair.path / "000007").rename(pair.path / "000009")
    with pytest.raises(RunError, match=r"expected iteration 9, as the folder is named, got 7"):
        load(pair.path / "000009")


def test_shards_have_checksums_from_all_ranks(tmp_path):
    def shards(folder):
        for rank in range(3):
            (folder / f"{rank}.pt").write_bytes(bytes([rank]) * 100)
        for rank in range(2):
            sum_shards(folder, rank, 2)

    path = Checkpoints(tmp_path).save(3, {"a": encode({}, "a")}, shards)
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "shards", "state.json", "tensors.safetensors"]
    for rank in range(2):
        check_shards(path, rank, 2)
    (path / "shards" / "1.pt").write_bytes(b"\1" * 99 + b"\0")
    check_shards(path, 0, 2)
    with pytest.raises(RunError, match=r"shards/1\.pt: its checksum differs from the manifest"):
        check_shards(path, 1, 2)


def test_a_failed_write_leaves_the_earlier_ones_and_no_rubbish(tmp_path, monkeypatch):
    store = Checkpoints(tmp_path)
    store.save(1, {"a": encode({}, "a")})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("creditgraph.pipeline.run.checkpoint.save_file", full)
    with pytest.raises(
        RunError, match=r"000002: cannot be written \(No space left on device\): the disk is full; free some space"
    ):
        store.save(2, {"a": encode({}, "a")})
    assert [p.name for p in tmp_path.iterdir()] == ["000001"]


def test_settings_are_checked():
    with pytest.raises(ValueError, match="expected every ≥ 0 and keep ≥ 1"):
        CheckpointSettings(keep=0)
