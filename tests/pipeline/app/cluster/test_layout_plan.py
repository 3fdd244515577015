"""The paper model of memory and step time."""

import json
from dataclasses import replace

import pytest

from creditgraph.components.models.gpus import DEVICES
from creditgraph.components.models.shape import SHAPES, Shape, known_shape
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.cluster.layout_plan import Layout, Training, Work, estimate, layouts, plan
from creditgraph.pipeline.core.errors import ConfigError

H100 = DEVICES["h100"]


@pytest.mark.parametrize(
    ("name", "billions"),
    {
        "qwen2.5-7b": 7.62,
        "qwen2.5-32b": 32.8,
        "llama-3.1-8b": 8.03,
        "llama3-70b": 70.6,
        "llama3.1-405b": 406,
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


def test_throughput_is_near_the_published_one(capsys):
    """`--check` prints one row per published figure; each is within a factor of 1.5, or the formulas have to go."""
    assert main(["plan", "--check"]) == 0
    printed = capsys.readouterr().out
    ratios = [float(line.partition("ratio ")[2].split()[0]) for line in printed.splitlines()[1:]]
    assert len(ratios) == 5
    assert all(1 / 1.5 < ratio < 1.5 for ratio in ratios), printed


TOY = Shape(name="toy", layers=1, hidden=2, heads=1, kv_heads=1, head_dim=2, mlp=4, vocab=8)
SLOW = replace(H100, matmul=100.0, matmul_fraction=0.5)


def test_numbers_by_hand():
    # One layer, hidden 2, one head of 2, MLP 4, vocabulary 8, untied: attention 2·2·(2+2) = 16, MLP 3·2·4 = 24,
    # embeddings 2·16.
    assert TOY.parameters == 16 + 24 + 32
    # Per token 2·(16 + 24 + 16), the input embedding being a lookup, and 2·1·10·2 for attention over sequences of 10.
    assert TOY.forward_flops(3, 15, 3) == 3 * (112 + 40)
    # Of one predicted token 2·16 operations of the head, of three 2·40 of the layers; no attention.
    assert TOY.forward_flops(3, 0, 1) == 3 * 80 + 32
    e = estimate(TOY, Layout(world=1), Work(tokens=3, length=10, pack=3), SLOW)
    assert e.times["compute"] == pytest.approx(3 * 456 / 50)
    assert e.seconds == pytest.approx(e.times["compute"])
    # bf16 weights, fp32 gradients, fp32 weights and two moments; inner tensors 2·(6·2 + 2·(2+2) + 3·4) bytes a token;
    # logits of three tokens, four times in fp32; 90 bytes a token of the batch.
    state = {"weights": 2 * 72, "gradients": 4 * 72, "optimiser": 12 * 72}
    work = {"activations": 2 * (12 + 8 + 12) * 3, "prefix K/V": 0, "head": 4 * 4 * 3 * 8, "batch": 90 * 3}
    assert e.bytes == state | work
    assert e.utilisation == pytest.approx(0.5)


def test_learner_hf_by_hand():
    work = Work(tokens=3, length=10, pack=3)
    own = estimate(TOY, Layout(world=2), work, SLOW, Training(kind="hf", published=True, reference=True)).bytes
    # Beside the fp32 sum of gradients a bf16 gradient of each weight; nothing is divided over replicas.
    assert [own[k] / 72 for k in ("weights", "gradients", "optimiser", "reference", "published")] == [2, 6, 12, 2, 2]
    # Norms keep their float32 input and its normalised copy, 2·8·2 bytes more.
    assert own["activations"] == (2 * (12 + 8 + 12) + 32) * 3
    sharded = estimate(TOY, Layout(world=2, shard=2), work, SLOW, Training(kind="hf", reference=True)).bytes
    assert [sharded[k] * 2 / 72 for k in ("weights", "gradients", "optimiser", "reference")] == [4, 4, 8, 2]
    assert sharded["gathered"] == 2 * (2 * 40 + 32)  # two layers, embedding and head, whole
    # Adapters of rank 1: queries, keys, values and output 4·(2 + 2), three matrices of 2 × 4.
    assert TOY.lora_parameters(1) == 16 + 18
    lora = estimate(TOY, Layout(world=1), work, SLOW, Training(kind="hf", lora=1, reference=True))
    assert (lora.bytes["weights"], lora.bytes["gradients"], lora.bytes["optimiser"]) == (144, 4 * 34, 12 * 34)
    assert "reference" not in lora.bytes  # the model without its adapters
    assert lora.times["compute"] == pytest.approx(2 * 456 / 50)  # no gradients of frozen weights


def test_experts_by_hand():
    shape = replace(TOY, experts=4, active=2)
    # Attention 16 and router 2·4, experts 4·24.
    assert shape.parameters == 24 + 96 + 32
    assert shape.forward_flops(3, 15, 3) == 3 * 2 * (24 + 48 + 16) + 4 * 15 * 2
    e = estimate(shape, Layout(world=4, tensor=2, expert=4), Work(tokens=8, pack=4), SLOW)
    assert e.bytes["weights"] == 2 * ((24 + 32) / 2 + 96 / 4)
    # The rest is replicated twice, each expert once.
    assert e.bytes["optimiser"] == 12 * ((24 + 32) / 2 / 2 + 96 / 4)
    assert e.times["EP"] > 0


def test_windows_limit_attention():
    shape = replace(TOY, layers=4, window=8, windowed=3)
    # 100 tokens in one sequence: 5,000 pairs in the layer without a window, 100·8 in each of the others.
    assert shape.forward_flops(100, 5000, 0) == 2 * 100 * 4 * 40 + 4 * 2 * (5000 + 3 * 800)


def test_shared_prefixes_copy_keys_and_values():
    work = Work(tokens=3, length=10, pack=3, paths=4.0)
    shape = replace(TOY, layers=5)
    # Keys and values of 2 · 2 bf16 numbers, for the four times three tokens of whole paths, in each layer.
    kept = estimate(shape, Layout(world=1), work, SLOW).bytes["prefix K/V"]
    assert kept == 5 * 2 * 2 * 2 * 12
    # Recomputed layers gather them again, one layer at a time.
    assert estimate(shape, Layout(world=1, recompute="full"), work, SLOW).bytes["prefix K/V"] == kept / 5


def test_identities():
    shape, work = SHAPES["qwen2.5-7b"], Work(tokens=1e6)
    one = estimate(shape, Layout(world=1), work, H100)
    many = estimate(shape, Layout(world=8), work, H100)
    assert many.times["compute"] == pytest.approx(one.times["compute"] / 8)  # data parallel splits the tokens
    assert many.bytes["optimiser"] == pytest.approx(one.bytes["optimiser"] / 8)  # and the optimiser state
    assert many.bytes["weights"] == one.bytes["weights"]
    context = estimate(shape, Layout(world=8, context=8), work, H100)
    assert context.bytes["activations"] == pytest.approx(one.bytes["activations"] / 8)
    assert context.times["compute"] == pytest.approx(one.times["compute"] / 8)
    piped = estimate(shape, Layout(world=4, pipeline=4), work, H100)
    interleaved = estimate(shape, Layout(world=4, pipeline=4, virtual=7), work, H100)
    assert piped.times["bubble"] > interleaved.times["bubble"] > 0
    full = estimate(shape, Layout(world=1, recompute="full"), work, H100)
    assert full.times["compute"] == pytest.approx(one.times["compute"] * 4 / 3)
    assert full.bytes["activations"] < one.bytes["activations"] / 5


def test_suggestions_fit_and_are_layouts_of_the_machine():
    shape, work = SHAPES["qwen2.5-32b"], Work(tokens=512 * 4096)
    estimates = plan(shape, 64, work, H100)
    assert all(e.memory <= 0.85 * 80e9 for e in estimates)
    assert all(
        e.layout.tensor * e.layout.pipeline * e.layout.data == 64 and shape.layers % e.layout.pipeline == 0
        for e in estimates
    )
    assert estimates[0].seconds <= 1.03 * min(e.seconds for e in estimates)
    assert {x.tensor for x in layouts(SHAPES["qwen2.5-7b"], 8, H100)} == {1, 2, 4}  # 28 heads


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(
        ConfigError, match=r"qwen2\.5-32b on 8 × h100: the smallest layout .* expected at most 68 GB\. Use more"
    ):
        plan(SHAPES["qwen2.5-32b"], 8, Work(tokens=1e6), H100)


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


def test_the_command_prints_the_fastest_layouts_that_fit(capsys):
    assert main(["plan", "qwen2.5-7b", "--gpus", "8", "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("qwen2.5-7b: 7.6")
    assert len(lines) == 3
    assert main(["plan"]) == 2
    assert "plan: expected a model and a positive number of GPUs, or --check" in capsys.readouterr().err
