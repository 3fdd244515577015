"""Weight files: exact, bounded, atomic, and gone when they should be."""

import errno
import hashlib
import importlib.util
import json
import multiprocessing
import os
import re
import resource
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
import torch

from creditgraph.components.engine.channel import ChannelSettings, FileChannel
from creditgraph.components.engine.folders import remove_abandoned
from creditgraph.components.engine.weight_files import buckets, checksum_of, wait_for
from creditgraph.components.models.weights import read_file
from creditgraph.pipeline.core.errors import CreditgraphError, RunError
from creditgraph.pipeline.core.payloads import Weights


@pytest.fixture
def channel(tmp_path):
    made = []

    def make(dtype=torch.float32, near=False, **settings):
        made.append(FileChannel(ChannelSettings(**{"path": str(tmp_path), **settings}), dtype, near))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert not list(tmp_path.glob("creditgraph-weights-*"))


@pytest.fixture(scope="module")
def fake_vllm():
    """The test server, which computes checksums without torch."""
    spec = importlib.util.spec_from_file_location("fake_vllm", Path(__file__).parent / "served/fake_vllm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weights(version=1, **tensors):
    return Weights(version=version, tensors=tensors)


def read(update):
    return {name: tensor for file in update.files for name, tensor in read_file(file)}


def test_float32_is_exact_and_bfloat16_is_rounded_once(channel):
    exact = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(read(channel().publish(weights(a=exact)))["a"], exact)
    half = read(channel(torch.bfloat16).publish(weights(a=exact, steps=torch.tensor([1, 2]))))
    assert torch.equal(half["a"], exact.to(torch.bfloat16))
    assert half["steps"].dtype == torch.int64


def test_tensors_that_share_memory_travel_whole(channel):
    shared = torch.randn(6, 2)
    files = read(channel().publish(weights(whole=shared, part=shared[:3])))
    assert torch.equal(files["whole"], shared)
    assert torch.equal(files["part"], shared[:3])


def test_buckets_hold_whole_tensors_up_to_the_limit():
    tensors = {
        name: torch.zeros(size, dtype=torch.uint8) for name, size in (("a", 4), ("b", 6), ("c", 1), ("d", 30), ("e", 2))
    }
    # a + b = 10 fits exactly; c would be the eleventh byte; d is bigger than a bucket and alone.
    assert [list(bucket) for bucket in buckets(tensors, 10)] == [["a", "b"], ["c"], ["d"], ["e"]]


def test_files_are_cut_into_buckets(channel):
    update = channel(bucket_mb=1).publish(weights(**{f"t{n}": torch.full((1 << 17,), float(n)) for n in range(5)}))
    assert len(update.files) == 3  # half a MiB each, two per bucket
    assert [float(read(update)[f"t{n}"][0]) for n in range(5)] == [0, 1, 2, 3, 4]


def test_only_the_newest_version_stays(channel):
    files = channel()
    first, second = files.publish(weights(1, a=torch.zeros(2))), files.publish(weights(2, a=torch.ones(2)))
    assert Path(first.files[0]).exists(), "servers may still read it"
    files.retire(2)
    assert not Path(first.files[0]).exists()
    assert Path(second.files[0]).exists()


def test_the_checksum_sees_every_bit_of_every_tensor():
    draw = torch.Generator().manual_seed(0)
    tensors = {f"t{n:02d}": torch.randn(3, 2, generator=draw) for n in range(20)}
    tensors["odd"] = torch.arange(70_001, dtype=torch.int16)[1:]  # two blocks of words, which begin within a word
    base = checksum_of(tensors)
    assert checksum_of(dict(reversed(tensors.items()))) == base
    for name, place, bit in (("t00", 0, 0), ("t07", 5, 31), ("t13", 3, 12), ("t19", 2, 22)):
        flipped = tensors[name].clone()
        flipped.view(torch.int32).reshape(-1)[place] ^= torch.tensor(1 << bit).to(torch.int32)
        assert checksum_of({**tensors, name: flipped}) != base
    swapped = tensors["odd"].clone()
    swapped[:65536], swapped[4464:] = tensors["odd"][4464:], tensors["odd"][:65536]
    for change in (
        {"t19": tensors["t19"].reshape(2, 3)},
        {"t19": tensors["t19"].view(torch.int32)},
        {"t00": tensors["t19"], "t19": tensors["t00"]},
        {"t00": -tensors["t00"]},
        {"odd": swapped},
        {"another": torch.zeros(0)},
    ):
        assert checksum_of({**tensors, **change}) != base


def test_the_checksum_is_the_plain_sum(fake_vllm):
    """By a loop over words in Python's integers, on both sides of a block's end."""
    draw = torch.Generator().manual_seed(1)
    for count in (0, 1, 3, 4, 262_143, 262_144, 262_149):
        raw = torch.randint(0, 256, (count,), generator=draw, dtype=torch.uint8)
        line = f"a torch.uint8 ({count},) {fake_vllm.sum_of_words(raw.numpy().tobytes()):016x}"
        assert checksum_of({"a": raw}) == hashlib.sha256(line.encode()).hexdigest()[:32]


def test_no_other_user_may_enter_the_folder(channel):
    files = channel()
    files.publish(weights(a=torch.zeros(2)))
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700


def in_child(work):
    """Runs `work` in a process of its own, which may end as it likes."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    return child.exitcode


def test_a_full_folder_is_reported(tmp_path):
    """A file-size limit in place of a full disk: both end a write with an error number of their own."""

    def fill():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        channel = FileChannel(ChannelSettings(path=str(tmp_path / "weights")), torch.float32)
        (tmp_path / "weights").mkdir()
        with pytest.raises(RunError) as raised:
            channel.publish(weights(3, a=torch.zeros(1 << 20)))
        (tmp_path / "sentence").write_text(str(raised.value))
        assert not list(channel.folder.iterdir()), "nothing half-written stays"
        channel.close()

    assert in_child(fill) == 0
    sentence = rf"version 3: expected room for two versions of 4\.2 MB, got too little in {tmp_path}/weights \(.*\)\."
    assert re.search(sentence + ".* set engine.channel.path to a folder", (tmp_path / "sentence").read_text())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs: run as root")
def test_a_full_memory_file_system_is_reported(channel, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(small)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        big = weights(a=torch.zeros(1 << 20))
        full = rf"of 4.2 MB, got too little in {small} \(No space left on device\).*engine.channel.path"
        for near in (False, True):
            with pytest.raises(RunError, match=full):
                channel(path=str(small), near=near).publish(big)
        after = channel(path=str(small))
        assert Path(after.publish(weights(2, a=torch.zeros(4))).path).is_relative_to(small), "nothing was left there"
        after.close()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_files_for_near_servers_come_one_by_one_and_are_those_of_a_whole_version(channel):
    sent = {f"t{n}": torch.full((1 << 17,), float(n)) for n in range(5)}
    files = channel(bucket_mb=1, near=True)
    update = files.publish(weights(4, **sent))
    assert len(update.files) == 3
    for n, file in enumerate(update.files):
        wait_for(file, time.monotonic() + 60)
        assert sorted(dict(read_file(file))) == [f"t{i}" for i in range(2 * n, min(5, 2 * n + 2))], (
            "whole when its name appears"
        )
    plain = channel(bucket_mb=1).publish(weights(4, **sent))
    assert update.label() == plain.label()
    arrived = read(update)
    assert all(torch.equal(arrived[name], tensor) for name, tensor in sent.items())
    assert sorted(p.name for p in Path(update.path).iterdir()) == [Path(f).name for f in update.files], (
        "nothing else stays"
    )
    files.close()
    assert not Path(update.path).exists()


def test_a_version_for_near_servers_overwrites_the_last_but_one(channel):
    files = channel(bucket_mb=1, near=True)
    seen = []
    for version in range(1, 6):
        sent = {
            "a": torch.full((3, 5), float(version)),
            "b": torch.full((1 << 18,), 10.0 * version),
            "c": torch.tensor([version]),
        }
        if version == 5:
            sent["a"] = sent["a"].reshape(5, 3)
        update = files.publish(weights(version, **sent))
        update.checksum.result()
        files.retire(version)
        arrived = read(update)
        assert all(torch.equal(arrived[name], tensor) for name, tensor in sent.items())
        seen.append([Path(file).stat().st_ino for file in update.files])
        assert len(list(Path(update.path).parent.iterdir())) <= 2
    again = files.publish(weights(4, a=torch.zeros(3, 5), b=torch.zeros(1 << 18), c=torch.tensor([4])))
    again.checksum.result()
    assert float(read(again)["b"].sum()) == 0.0, "a version that comes once more"
    assert seen[2] == seen[0]
    assert seen[3] == seen[1]


def test_waiting_for_a_file_ends_when_it_does_not_come(channel, monkeypatch):
    files = channel(bucket_mb=1, near=True)
    update = files.publish(weights(1, a=torch.zeros(4)))
    update.checksum.result()
    missing = Path(update.path) / "bucket-00009.safetensors"
    with pytest.raises(CreditgraphError, match=r"bucket-00009\.safetensors: expected it .*, which is late"):
        wait_for(missing, time.monotonic())

    def full(file, tensors):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("creditgraph.components.engine.channel.write_file", full)
    update = files.publish(weights(2, a=torch.zeros(1 << 20)))
    with pytest.raises(
        RunError, match=r"version 2: expected room .* of 4\.2 MB.*set engine\.channel\.path to a folder"
    ):
        update.checksum.result()
    with pytest.raises(
        CreditgraphError, match="could not be written; see the error of the process that publishes weights"
    ):
        wait_for(update.files[0], time.monotonic() + 60)


def test_folders_of_dead_runs_are_removed_and_those_of_living_ones_stay(tmp_path):
    def die():
        FileChannel(ChannelSettings(path=str(tmp_path)), torch.float32).publish(weights(a=torch.zeros(2)))
        os.kill(os.getpid(), signal.SIGKILL)

    living = FileChannel(ChannelSettings(path=str(tmp_path)), torch.float32)
    living.publish(weights(a=torch.zeros(1)))
    assert in_child(die) == -signal.SIGKILL
    assert len(list(tmp_path.glob("creditgraph-weights-*"))) == 2
    remove_abandoned(tmp_path, "creditgraph-weights-")
    assert list(tmp_path.glob("creditgraph-weights-*")) == [living.folder]
    living.close()


def test_settings_are_checked():
    with pytest.raises(ValueError, match="bucket_mb: expected at least 1, got 0"):
        ChannelSettings(bucket_mb=0)
    assert json.dumps(ChannelSettings().path) == '"/dev/shm"'
