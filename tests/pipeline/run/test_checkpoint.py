import json
import logging
import math
import os
import re
from collections import OrderedDict

import numpy as np
import pytest
import torch

from pipeline.core.errors import RunError
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Rewards, TrainReport, Weights
from pipeline.run.checkpoint import FORMAT, Checkpoints, CheckpointSettings, decode, encode, load


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
    assert "Skipping it and using the previous one" in caplog.text
    with pytest.raises(RunError, match="000005"):
        load(newest)
    store.save(5, {"a": encode({"w": torch.zeros(1)}, "a")})  # the repeated iteration replaces the damaged one
    assert store.latest().iteration == 5


@pytest.mark.parametrize(
    ("file", "old", "new", "sentence"),
    [
        ("manifest.json", f'"format": {FORMAT}', f'"format": {FORMAT - 1}', f"checkpoint format {FORMAT}, got "),
        ("manifest.json", f'"format": {FORMAT}', f'"format": {FORMAT + 1}', f"checkpoint format {FORMAT}, got "),
        ("state.json", "payloads:Rewards", "payloads:Prizes", "payload class 'pipeline.core.payloads:Prizes'"),
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
    if file == "state.json":
        manifest = tmp_path / "000005" / "manifest.json"
        entry = json.loads(manifest.read_text())
        entry["files"][file] = {"bytes": changed.stat().st_size}
        manifest.write_text(json.dumps(entry))
    with pytest.raises(RunError, match=re.escape(sentence)):
        store.latest()


def test_a_failed_write_leaves_the_earlier_ones_and_no_rubbish(tmp_path, monkeypatch):
    store = Checkpoints(tmp_path)
    store.save(1, {"a": encode({}, "a")})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pipeline.run.checkpoint.save_file", full)
    with pytest.raises(
        RunError, match=r"000002: cannot be written \(No space left on device\): the disk is full; free some space"
    ):
        store.save(2, {"a": encode({}, "a")})
    assert [p.name for p in tmp_path.iterdir()] == ["000001"]


def test_settings_are_checked():
    with pytest.raises(ValueError, match="expected every ≥ 0 and keep ≥ 1"):
        CheckpointSettings(keep=0)
