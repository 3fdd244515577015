"""The paper model of memory and step time."""

import json
from dataclasses import replace

import pytest

from pipeline.app.cli import main
from pipeline.app.cluster.layout_plan import DEVICES, SHAPES, Layout, Shape, Work, estimate, layouts, plan
from pipeline.core.errors import ConfigError

H100 = DEVICES["h100"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen2.5-7b", 7.62), ("qwen2.5-32b", 32.8), ("llama3-8b", 8.03), ("llama3-70b", 70.6), ("llama3.1-405b", 406)],
)
def test_parameter_counts_are_the_published_ones(name, billions):
    assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_throughput_is_near_the_published_one(capsys):
    """`--check` prints one row per published figure; each is within a factor of 1.5, or the formulas have to go."""
    assert main(["plan", "--check"]) == 0
    printed = capsys.readouterr().out
    ratios = [float(line.partition("ratio ")[2].split()[0]) for line in printed.splitlines()[1:]]
    assert len(ratios) == 3
    assert all(1 / 1.5 < ratio < 1.5 for ratio in ratios), printed


def test_numbers_by_hand():
    # One layer, hidden 2, one head of 2, MLP 4, vocabulary 8, untied: attention 2·2·(2+2) = 16, MLP 3·2·4 = 24,
    # embeddings 2·16.
    shape = Shape(name="toy", layers=1, hidden=2, heads=1, kv_heads=1, head_dim=2, mlp=4, vocab=8)
    assert shape.parameters == 16 + 24 + 32
    # Per token 2·(16 + 24 + 16), the input embedding being a lookup, and 2·1·10·2 for attention over sequences of 10.
    assert shape.forward_flops(tokens=3, length=10) == 3 * (112 + 40)
    device = replace(H100, matmul=100.0, matmul_fraction=0.5)
    e = estimate(shape, Layout(world=1), Work(tokens=3, length=10, pack=3), device)
    assert e.compute == pytest.approx(3 * 456 / 50)
    assert e.seconds == pytest.approx(e.compute)
    assert e.weights == 72 * 6
    assert e.optimizer == 72 * 12
    # Inner tensors 2·(6·2 + 2·(2+2) + 3·4) bytes a token.
    assert e.activations == 2 * (12 + 8 + 12) * 3
    assert e.utilisation == pytest.approx(0.5)


def test_identities():
    shape, work = SHAPES["qwen2.5-7b"], Work(tokens=1e6)
    one = estimate(shape, Layout(world=1), work, H100)
    many = estimate(shape, Layout(world=8), work, H100)
    assert many.compute == pytest.approx(one.compute / 8)  # data parallel splits the tokens
    assert many.optimizer == pytest.approx(one.optimizer / 8)  # and the optimiser state
    assert many.weights == one.weights
    piped = estimate(shape, Layout(world=4, pipeline=4), work, H100)
    assert piped.bubble > estimate(shape, Layout(world=4, pipeline=4, virtual=7), work, H100).bubble > 0
    full = estimate(shape, Layout(world=1, recompute="full"), work, H100)
    assert full.compute == pytest.approx(one.compute * 4 / 3)
    assert full.activations < one.activations / 5


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
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_experts": 8}))
    with pytest.raises(ConfigError, match="is a mixture of experts; expected a dense model"):
        Shape.read(str(tmp_path))


def test_the_command_prints_the_fastest_layouts_that_fit(capsys):
    assert main(["plan", "qwen2.5-7b", "--gpus", "8", "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("qwen2.5-7b: 7.6")
    assert len(lines) == 3
    assert main(["plan"]) == 2
    assert "plan: expected a model and a positive number of GPUs, or --check" in capsys.readouterr().err
