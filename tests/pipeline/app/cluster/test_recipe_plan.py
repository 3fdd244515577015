"""The plan of a composed configuration, what it refuses before anything loads, and the table that it makes."""

import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import creditgraph.pipeline.app.cluster.recipe_plan as recipe_plan_module
from creditgraph.components.models.gpus import DEVICES, kind_of
from creditgraph.components.models.shape import SHAPES
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.cluster.engine_plan import Decoding, Serving, estimate_engine
from creditgraph.pipeline.app.cluster.layout_plan import Layout, Training
from creditgraph.pipeline.app.cluster.recipe_plan import (
    check_memory,
    fsdp_size,
    layout_of,
    nearest,
    recipe_plan,
    rows_per_prompt,
    work_of,
)
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.run.compose.choices import CONFIG_DIR, list_choices
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose

H100 = DEVICES["h100"]
FULL_SIZE = [
    name
    for name, file in list_choices("recipe", [CONFIG_DIR]).items()
    if not name.startswith("toy_") and name != "your_own"
]


def experiment(recipe, *overrides):
    return build_experiment(compose([f"recipe={recipe}", *overrides]), recipe)


@pytest.mark.parametrize("recipe", FULL_SIZE)
def test_the_nearest_plan_composes_and_is_the_plan_of_what_it_composes(recipe):
    near = nearest(experiment(recipe), H100, 8)
    if near is None:
        # learner.megatron shards experts only with a setting, and plans are of graphs with one trained model.
        assert "a3b" in recipe or "vapo" in recipe
        return
    assert near.fits
    made = recipe_plan(experiment(recipe, *near.overrides), H100, near.learner.layout.world, near.engine_gpus)
    assert made is not None
    assert made.learner == near.learner
    assert made.memory == pytest.approx(near.memory)
    assert made.seconds == pytest.approx(near.seconds)


def test_an_engine_by_hand():
    shape = SHAPES["qwen3-4b"]
    row = 2 * 2 * 36 * 8 * 128 * 1500  # keys and values in bf16, 36 layers, 8 heads of 128, 1,500 tokens
    decoding = Decoding(rows=64, prompt=500, response=1000)
    e = estimate_engine(shape, Serving(rows=16), decoding, 2, H100)
    assert e.weights == 2 * shape.parameters
    assert e.cache == 16 * row
    assert e.least == e.weights + 8 * row
    # Two copies have 32 rows each, in two waves of 16; each step reads the weights and half of each row's responses.
    step = (e.weights + 16 * row * 1000 / 1500) / (3.35e12 * 0.75)
    assert e.seconds == pytest.approx(2 * 1000 * step)
    half = estimate_engine(shape, Serving(rows=16, tensor=2), decoding, 2, H100)
    assert (half.weights, half.cache) == (e.weights / 2, e.cache / 2)
    share = estimate_engine(shape, Serving(rows=16, share=0.5), decoding, 2, H100)
    assert share.memory == 0.5 * 80e9
    few = estimate_engine(shape, Serving(rows=16, cache_tokens=4500), decoding, 2, H100)
    assert few.cache == 3 * row
    assert few.seconds > e.seconds


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
    work, decoding = work_of(made.graph, made.graph["learner"])
    config = made.graph["sampler"].config
    prompts = getattr(config, "groups", made.graph["prompts"].config.batch)
    assert decoding.rows == prompts * rows
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
    shared = recipe_plan(experiment("grpo_qwen3_4b"), H100, 8)
    apart = recipe_plan(experiment("grpo_qwen3_4b"), H100, 8, 4)
    assert shared.memory == pytest.approx(apart.memory + shared.engine.memory)
    asleep = replace(shared, serving=replace(shared.serving, sleeps=True))
    assert asleep.memory == max(shared.learner.memory, asleep.memory) < shared.memory
    for sleep, sleeps in (("auto", True), ("never", False)):
        served = experiment("grpo_qwen3_4b", "engine=vllm", f"engine.sleep={sleep}")
        assert recipe_plan(served, H100, 8).serving.sleeps == sleeps
    elsewhere = recipe_plan(experiment("grpo_qwen3_4b", "engine=vllm", "engine.rendezvous=/x"), H100, 8)
    assert elsewhere.memory == apart.memory


def test_a_cache_without_a_size_takes_what_the_learner_leaves(monkeypatch):
    made = experiment("grpo_qwen2_5_0_5b_instruct")
    whole = recipe_plan(made, H100, 1)
    engine = made.graph["engine"]
    monkeypatch.setattr(recipe_plan_module, "serving_of", lambda node: Serving(in_process=True, rows=512))
    assert engine.use == "engine.local"
    # Of 24 GB the learner leaves less than all rows need; on 80 GB they have all they need.
    small = recipe_plan(made, replace(H100, memory=whole.learner.memory / 0.9 + 4e9), 1)
    assert small.fits
    assert small.engine.cache < whole.engine.cache
    least = recipe_plan(made, replace(H100, memory=20e9), 1)
    assert not least.fits
    assert least.engine.memory >= least.engine.least


def test_too_little_memory_names_numbers_and_the_nearest_layout_that_fits(capsys):
    command = ["train", "recipe=grpo_qwen3_4b", "--check", "--device", "h100"]
    whole = [*command, "learner.fsdp_size=1"]
    assert main(whole) == 2
    said = capsys.readouterr().err
    assert "GPU memory: qwen3-4b, learner.hf (DP 8, recompute) on 8 × h100: " in said
    assert "optimiser 48" in said  # 4.02 B weights of 12 bytes
    assert ". The nearest that fits: qwen3-4b, learner." in said
    settings = said.partition("; set ")[2].partition(". ")[0].split()
    assert main([*command, *settings]) == 0
    assert "\nplan: qwen3-4b, learner." in capsys.readouterr().out
    assert main([*whole, "run.check_memory=false"]) == 2  # a check that was asked for
    assert main(["train", "recipe=grpo_qwen3_4b", "--device", "h100"]) == 2
    assert "expected with --check only" in capsys.readouterr().err


def test_fewer_gpus_than_ranks_of_a_replica(capsys):
    layout = ["learner=megatron", "learner.tensor_parallel=8"]
    assert main(["train", "recipe=grpo_qwen3_4b", *layout, "--check", "--device", "h100", "--gpus", "4"]) == 2
    assert "one replica takes 8 processes, but the run has 4" in capsys.readouterr().err


def test_nothing_fits(monkeypatch):
    with pytest.raises(ConfigError, match="None of up to 512 such GPUs fits; choose a smaller model"):
        check_memory(experiment("dapo_qwen2_5_32b"), replace(H100, memory=2e9), 8)
    assert recipe_plan(experiment("grpo_qwen3_4b", "model.path=someone/unheard-of"), H100, 8) is None


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
    assert " s per iteration" not in said  # the rates of this GPU are not known
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


def test_the_table_has_every_full_size_recipe_once(monkeypatch):
    monkeypatch.syspath_prepend(str(CONFIG_DIR.parent / "tools"))
    table = importlib.import_module("plan_table").plan_table(CONFIG_DIR)
    sys.modules.pop("plan_table")
    for name in FULL_SIZE:
        assert table.count(f"`{name}`") == 1, name
