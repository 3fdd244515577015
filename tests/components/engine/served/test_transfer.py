"""Weights that servers get from a stream: all at once, without files, and again after a fault."""

import threading
import time

import pytest
import torch

from creditgraph.components.engine.bucket import cut, gpu_id, in_buckets, open_shared, share, size_of
from creditgraph.components.engine.served.servers import check_kind
from creditgraph.components.engine.weight_files import Checksum, checksum_of
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError, DataError


def test_buckets_hold_what_the_stream_yields_and_their_last_has_the_checksum():
    tensors = {"a": torch.randn(3), "ids": torch.arange(4), "b": torch.randn(2, 2), "big": torch.randn(30)}
    checksum = Checksum()
    buckets = list(in_buckets(iter(tensors.items()), 5, torch.bfloat16, 40, checksum))
    # 6 bytes and 32 fit; 8 more do not; 60 are alone.
    assert [list(bucket.tensors) for bucket in buckets] == [["ids", "a"], ["b"], ["big"]]
    sent = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
    assert [bucket.label for bucket in buckets] == [None, None, f"5-{checksum_of(sent)}"]
    for bucket in buckets:
        assert size_of(bucket.forms) == len(bucket.flat)
        shared = open_shared(share(bucket.flat), torch.device("cpu"))
        for name, tensor in cut(shared, bucket.forms):
            assert tensor.dtype == sent[name].dtype
            assert torch.equal(tensor, sent[name])


def test_memory_of_a_gpu_is_shared_by_its_handle(monkeypatch):
    """CUDA by mocks, with torch's own names of the handle's parts."""
    import json

    from torch.multiprocessing import reductions

    monkeypatch.setattr("creditgraph.components.engine.bucket.gpu_id", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: type("S", (), {"synchronize": lambda self: None})()
    )
    given = ("class", "size", "stride", 4, "storage", torch.uint8, 3, b"h", 99, 16, False, b"r", 0, b"e", True)
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (reductions.rebuild_cuda_tensor, given))
    opened = {}

    def rebuild(**parts):
        opened.update(parts)
        return torch.arange(7, dtype=torch.uint8)

    on_gpu = type("OnGpu", (), {"device": torch.device("cuda:3"), "__len__": lambda self: 7})()
    shared = json.loads(json.dumps(share(on_gpu)))
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    assert open_shared(shared, torch.device("cuda:3")).tolist() == list(range(7))
    kept = {"tensor_offset": 4, "storage_handle": b"h", "storage_size_bytes": 99, "storage_offset_bytes": 16}
    kept |= {"ref_counter_handle": b"r", "ref_counter_offset": 0, "event_handle": b"e", "event_sync_required": True}
    assert {name: opened[name] for name in kept} == kept
    assert opened["storage_device"] == 3
    assert opened["tensor_size"] == torch.Size([7])
    with pytest.raises(RuntimeError, match=r"expected weights on GPU GPU-1, .* got some on GPU GPU-3"):
        open_shared(shared, torch.device("cuda:1"))
    assert gpu_id is not None


def test_all_servers_get_one_stream(fleet):
    run = fleet(3)
    streams = []

    def tensors():
        streams.append(1)
        for n in range(12):
            yield f"layer.{n}", torch.full((4, 3), float(n))

    run.stream(1, tensors)
    assert len(streams) == 1
    assert [entry["took"] for entry in run.records() if "took" in entry] == [3] * 12, "four buckets at each of three"
    assert run.states() == ["ready"] * 3
    run.generate(version=1)
    assert list((run.folder / "shm").iterdir()) == []


def test_a_server_that_dies_in_the_stream_gets_another_one(fleet):
    run = fleet(2)
    run.stream(1)
    run.fault(1, "die in update")
    run.stream(2)
    run.until(lambda: run.states() == ["ready"] * 2)
    assert len([entry for entry in run.records() if entry.get("loaded") == 2]) == 2
    run.generate(version=2)


def test_a_server_that_comes_back_while_the_learner_trains_waits_for_the_next_version(fleet):
    run = fleet(2)
    trains = threading.Event()

    def tensors():
        if trains.is_set():
            raise CreditgraphError("weights are being changed")
        for n in range(12):
            yield f"layer.{n}", torch.full((4, 3), float(1 + n))

    transfer = run.stream(1, tensors)
    trains.set()
    run.kill(1)
    run.until(lambda: run.pool.servers[1].starts == 2 and transfer.gone)
    time.sleep(1.5)
    assert run.states() == ["ready", "lost"]
    assert run.pool.servers[1].starts == 2, "a server that responds is not started again for this"
    run.generate(version=1)
    run.stream(2)
    run.until(lambda: run.states() == ["ready"] * 2)


def test_an_error_of_the_stream_is_the_error_of_the_run(fleet):
    run = fleet(2)

    def tensors():
        yield "layer.0", torch.zeros(3)
        raise DataError("weights version 1: expected all 12 weights, but 11 are missing.")

    with pytest.raises(DataError, match="11 are missing"):
        run.stream(1, tensors)


def test_kinds_fit_the_gpus():
    check_kind("file", [["0"], ["1"]], "0", "engine")
    check_kind("broadcast", [["1"], ["2"]], "0", "engine")
    check_kind("ipc", [["0"]], "0", "engine")
    with pytest.raises(ConfigError, match=r"engine.channel.kind: expected servers on other GPUs .* GPU 0, .*kind=ipc"):
        check_kind("broadcast", [["0"], ["1"]], "0", "engine")
    with pytest.raises(ConfigError, match=r"expected servers on GPU 0, the learner's, for 'ipc', got some on 1"):
        check_kind("ipc", [["0", "1"]], "0", "engine")
