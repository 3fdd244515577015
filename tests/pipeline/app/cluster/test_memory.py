"""What a configuration takes of each GPU on paper, and what is refused before anything loads."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from creditgraph.components.engine.base import Serving
from creditgraph.components.models.gpus import DEVICES, kind_of
from creditgraph.components.models.shape import SHAPES, Shape, known_shape
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.cluster.memory import (
    Layout,
    Training,
    Work,
    check_memory,
    estimate_memory,
    fsdp_size,
    layout_of,
    rows_per_prompt,
    work_of,
)
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose

H100 = DEVICES["h100"]
TOY = Shape(name="toy", layers=1, hidden=2, heads=1, kv_heads=1, head_dim=2, mlp=4, vocab=8)
WORK = Work(rows=1, length=3, tokens=3, pack=3)
MEGATRON = Training()


def experiment(recipe, *overrides):
    return build_experiment(compose([f"recipe={recipe}", *overrides]), recipe)


def learner(shape, layout, work=WORK, training=MEGATRON):
    return estimate_memory(shape, layout, work, H100, training, Serving()).learner


@pytest.mark.parametrize(
    ("name", "billions"),
    {
        "qwen2.5-7b": 7.62,
        "qwen2.5-32b": 32.8,
        "llama-3.1-8b": 8.03,
        "qwen3-4b": 4.02,
        "qwen3-8b": 8.19,
        "qwen3-30b-a3b-base": 30.5,
        "olmo-3-7b-instruct": 7.30,
        "deepseek-math-7b-instruct": 6.91,
        "qwen2.5-0.5b-instruct": 0.494,
        "deepseek-r1-distill-qwen-1.5b": 1.78,
    }.items(),
)
def test_parameter_counts_are_the_published_ones(name, billions):
    assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_numbers_by_hand():
    # One layer, hidden 2, one head of 2, MLP 4, vocabulary 8, untied: attention 2·2·(2+2) = 16, MLP 3·2·4 = 24,
    # embeddings 2·16.
    assert TOY.parameters == 16 + 24 + 32
    # Per token 2·(16 + 24 + 16), the input embedding being a lookup, and 2·1·10·2 for attention over sequences of 10.
    assert TOY.forward_flops(3, 15, 3) == 3 * (112 + 40)
    # Of one predicted token 2·16 operations of the head, of three 2·40 of the layers; no attention.
    assert TOY.forward_flops(3, 0, 1) == 3 * 80 + 32
    # bf16 weights, fp32 gradients, fp32 weights and two moments; inner tensors 2·(6·2 + 2·(2+2) + 3·4) bytes a token;
    # logits of three tokens, four times in fp32; 90 bytes a token of the batch.
    state = {"weights": 2 * 72, "gradients": 4 * 72, "optimiser": 12 * 72}
    work = {"activations": 2 * (12 + 8 + 12) * 3, "prefix K/V": 0, "head": 4 * 4 * 3 * 8, "batch": 90 * 3}
    assert learner(TOY, Layout(world=1)) == state | work


def test_learner_hf_by_hand():
    own = learner(TOY, Layout(world=2), training=Training(kind="hf", published=True, reference=True))
    # Beside the fp32 sum of gradients a bf16 gradient of each weight; nothing is divided over replicas.
    assert [own[k] / 72 for k in ("weights", "gradients", "optimiser", "reference", "published")] == [2, 6, 12, 2, 2]
    # Norms keep their float32 input and its normalised copy, 2·8·2 bytes more.
    assert own["activations"] == (2 * (12 + 8 + 12) + 32) * 3
    sharded = learner(TOY, Layout(world=2, shard=2), training=Training(kind="hf", reference=True))
    assert [sharded[k] * 2 / 72 for k in ("weights", "gradients", "optimiser", "reference")] == [4, 4, 8, 2]
    assert sharded["gathered"] == 2 * (2 * 40 + 32)  # two layers, embedding and head, whole
    # Adapters of rank 1: queries, keys, values and output 4·(2 + 2), three matrices of 2 × 4.
    assert TOY.lora_parameters(1) == 16 + 18
    lora = learner(TOY, Layout(world=1), training=Training(kind="hf", lora=1, reference=True))
    assert (lora["weights"], lora["gradients"], lora["optimiser"]) == (144, 4 * 34, 12 * 34)
    assert "reference" not in lora  # the model without its adapters


def test_experts_by_hand():
    shape = replace(TOY, experts=4, active=2)
    # Attention 16 and router 2·4, experts 4·24.
    assert shape.parameters == 24 + 96 + 32
    assert shape.forward_flops(3, 15, 3) == 3 * 2 * (24 + 48 + 16) + 4 * 15 * 2
    taken = learner(shape, Layout(world=4, tensor=2, expert=4))
    assert taken["weights"] == 2 * ((24 + 32) / 2 + 96 / 4)
    # The rest is replicated twice, each expert once.
    assert taken["optimiser"] == 12 * ((24 + 32) / 2 / 2 + 96 / 4)


def test_windows_limit_attention():
    shape = replace(TOY, layers=4, window=8, windowed=3)
    # 100 tokens in one sequence: 5,000 pairs in the layer without a window, 100·8 in each of the others.
    assert shape.forward_flops(100, 5000, 0) == 2 * 100 * 4 * 40 + 4 * 2 * (5000 + 3 * 800)


def test_shared_prefixes_copy_keys_and_values():
    shape, work = replace(TOY, layers=5), replace(WORK, paths=4.0)
    # Keys and values of 2 · 2 bf16 numbers, for the four times three tokens of whole paths, in each layer.
    kept = learner(shape, Layout(world=1), work)["prefix K/V"]
    assert kept == 5 * 2 * 2 * 2 * 12
    # Recomputed layers gather them again, one layer at a time.
    assert learner(shape, Layout(world=1, recompute="full"), work)["prefix K/V"] == kept / 5


def test_identities():
    shape, work = SHAPES["qwen2.5-7b"], Work(rows=8, length=4096, tokens=1e6, pack=8192)
    one, many = learner(shape, Layout(world=1), work), learner(shape, Layout(world=8), work)
    assert many["optimiser"] == pytest.approx(one["optimiser"] / 8)
    assert many["weights"] == one["weights"]
    context = learner(shape, Layout(world=8, context=8), work)
    assert context["activations"] == pytest.approx(one["activations"] / 8)
    assert learner(shape, Layout(world=1, recompute="full"), work)["activations"] < one["activations"] / 5


def test_an_engine_by_hand():
    shape = SHAPES["qwen3-4b"]
    row = 2 * 2 * 36 * 8 * 128 * 1500  # keys and values in bf16, 36 layers, 8 heads of 128, 1,500 tokens
    work = Work(rows=64, length=1500, tokens=64 * 1500, pack=8192)

    def engine(**serving):
        return estimate_memory(shape, Layout(world=2), work, H100, MEGATRON, Serving(**serving), 2)

    plain = engine(rows=16)
    assert plain.engine_weights == 2 * shape.parameters
    assert plain.engine_cache == 16 * row
    assert plain.engine_least == plain.engine_weights + 8 * row
    half = engine(rows=16, tensor=2)
    assert (half.engine_weights, half.engine_cache) == (plain.engine_weights / 2, plain.engine_cache / 2)
    share = engine(rows=16, share=0.5)
    assert share.engine_weights + share.engine_cache == 0.5 * 80e9
    assert engine(rows=16, cache_bytes=1e9).engine_cache == 1e9
    # In 8 bits the embedding, which is the output head too, keeps 16.
    assert engine(rows=16, layer_bytes=1.0).engine_weights == shape.parameters + 151_936 * 2560


@pytest.mark.parametrize(
    ("recipe", "rows"),
    [
        ("grpo_qwen3_4b", 8),
        ("dapo_qwen2_5_32b", 16),
        ("srpo_qwen2_5_14b_instruct", 8),
        ("score_qwen2_5_7b_instruct", 8),
        ("spo_tree_r1_distill_qwen_1_5b", 216),
        ("treerl_qwen2_5_14b_instruct", 30),
        ("critique_grpo_qwen3_8b", 8),
    ],
)
def test_rows_per_prompt(recipe, rows):
    made = experiment(recipe)
    assert rows_per_prompt(made.graph["sampler"].config) == rows
    work = work_of(made.graph, made.graph["learner"])
    config = made.graph["sampler"].config
    prompts = getattr(config, "groups", made.graph["prompts"].config.batch)
    assert work.rows == prompts * rows
    assert work.tokens == prompts * (512 + rows * config.max_tokens)


def test_ranks_that_share_one_model():
    shape, full = SHAPES["qwen2.5-7b"], Training(kind="hf")
    # 16 bytes for each of 7.6 billion weights, on GPUs of which 20 GB may be taken.
    assert [fsdp_size(shape, full, world, H100) for world in (1, 4, 8, 32)] == [1, 4, 8, 8]
    # Frozen weights of 15 GB and the adapters fit one.
    assert fsdp_size(shape, replace(full, lora=64), 8, H100) == 1
    config = SimpleNamespace(fsdp_size=0, recompute="full")
    assert layout_of(config, 8, shape, H100, full) == Layout(world=8, shard=8, recompute="full")
    assert layout_of(SimpleNamespace(fsdp_size=2, recompute="none"), 8, shape, H100, full).shard == 2


def test_engines_on_the_same_gpus_and_apart_and_asleep():
    shared = check_memory(experiment("grpo_qwen3_4b"), H100, 8)
    apart = check_memory(experiment("grpo_qwen3_4b"), H100, 8, 4)
    assert shared.memory == pytest.approx(apart.memory + shared.engine_weights + shared.engine_cache)
    asleep = replace(shared, serving=replace(shared.serving, sleeps=True))
    assert asleep.memory < shared.memory
    for sleep, sleeps in (("auto", True), ("never", False)):
        served = experiment("grpo_qwen3_4b", "engine=vllm", f"engine.sleep={sleep}")
        assert check_memory(served, replace(H100, memory=1e12), 8).serving.sleeps == sleeps
    elsewhere = check_memory(experiment("grpo_qwen3_4b", "engine=vllm", "engine.rendezvous=/x"), H100, 8)
    assert elsewhere.memory == apart.memory


def test_a_cache_without_a_size_takes_what_the_learner_leaves():
    shape, work = SHAPES["qwen2.5-0.5b-instruct"], Work(rows=64, length=1500, tokens=64 * 1500, pack=8192)

    def on(memory):
        device = replace(H100, memory=memory)
        return estimate_memory(shape, Layout(world=1), work, device, MEGATRON, Serving(in_process=True, rows=512))

    whole = on(80e9)
    assert whole.engine_cache == 64 * 1500 * shape.kv_bytes
    small = on((sum(whole.learner.values()) + whole.engine_least + 1e8) / 0.9)
    assert small.fits
    assert small.engine_cache < whole.engine_cache
    least = on(5e9)
    assert not least.fits
    assert least.engine_weights + least.engine_cache >= least.engine_least


def test_too_little_memory_names_numbers_and_what_takes_less(capsys):
    command = ["train", "recipe=grpo_qwen3_4b", "--check", "--device", "h100"]
    whole = [*command, "learner.fsdp_size=1", "learner.recompute=none"]
    assert main(whole) == 2
    printed = capsys.readouterr().err
    assert "GPU memory: qwen3-4b, learner.hf (DP 8) on 8 × h100: " in printed
    assert "optimiser 48" in printed  # 4.02 B weights of 12 bytes
    assert "It takes less with learner.recompute=full, more ranks in learner.fsdp_size, " in printed
    assert main([*command, "learner.fsdp_size=8", "learner.recompute=full"]) == 0
    assert "\nmemory: qwen3-4b, learner." in capsys.readouterr().out
    assert main([*whole, "run.check_memory=false"]) == 2  # a check that was asked for
    assert main(["train", "recipe=grpo_qwen3_4b", "--device", "h100"]) == 2
    assert "expected with --check only" in capsys.readouterr().err


def test_fewer_gpus_than_ranks_of_a_replica(capsys):
    layout = ["learner=megatron", "learner.tensor_parallel=8"]
    assert main(["train", "recipe=grpo_qwen3_4b", *layout, "--check", "--device", "h100", "--gpus", "4"]) == 2
    assert "one replica takes 8 processes, but the run has 4" in capsys.readouterr().err


def test_models_that_do_not_fit_and_models_that_are_unknown():
    with pytest.raises(ConfigError, match="or take more GPUs"):
        check_memory(experiment("dapo_qwen2_5_32b"), replace(H100, memory=2e9), 8)
    assert check_memory(experiment("grpo_qwen3_4b", "model.path=someone/unheard-of"), H100, 8) is None


@pytest.fixture
def small_gpu(monkeypatch):
    """One GPU of 24 GB, of a kind that is not in the table; nothing may be allocated on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Small GPU 24GB")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=24e9))


def test_a_run_on_a_small_gpu_ends_before_anything_loads(small_gpu, tmp_path, capsys):
    assert main(["train", "recipe=grpo_qwen3_4b", f"run.root={tmp_path}", "run.name=small"]) == 2
    said = capsys.readouterr().err
    assert "on 1 × Small GPU 24GB: " in said
    assert "of 22 GB per GPU" in said
    assert list(tmp_path.iterdir()) == []


def test_submit_refuses_what_does_not_fit_its_cluster(tmp_path, capsys):
    command = ["submit", "recipe=grpo_qwen3_4b", "cluster=one_node", f"run.root={tmp_path}", "--dry-run"]
    assert main([*command, "cluster.gpu=h100", "learner.fsdp_size=1"]) == 2
    assert "creditgraph submit: GPU memory: qwen3-4b" in capsys.readouterr().err
    assert main(command) == 0
    capsys.readouterr()
    assert main([*command, "cluster.gpu=h1000"]) == 2
    assert "gpu: expected one of h100, h200" in capsys.readouterr().err


def test_kinds_of_gpus_by_their_drivers_names():
    names = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H200": "h200"}
    assert {name: kind_of(name).name for name in names} == names
    assert kind_of("Tesla V100") is None


def test_a_shape_is_read_from_a_configuration(tmp_path):
    values = {
        "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 16, "vocab_size": 32, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    shape = Shape.read(str(tmp_path))
    assert (shape.layers, shape.head_dim, shape.tied) == (2, 4, True)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(ConfigError, match="has no 'num_hidden_layers'; expected a Qwen, Llama or OLMo style"):
        Shape.read(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        Shape.read("no/such")
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    (tmp_path / "config.json").write_text(json.dumps({**values, **experts}))
    assert known_shape(str(tmp_path)) == replace(shape, mlp=4, experts=8, active=2)
    (tmp_path / "config.json").write_text(json.dumps({**values, **experts, "n_shared_experts": 1}))
    with pytest.raises(ConfigError, match="has n_shared_experts, which the formulas do not cover"):
        Shape.read(str(tmp_path))
