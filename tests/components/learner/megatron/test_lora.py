"""Adapters of learner.megatron against learner.hf with peft: the same layers, values and steps in any layout."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from creditgraph.components.learner.lora import Lora
from creditgraph.pipeline.core.errors import ConfigError

TP2, PP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
LAYOUTS: list[dict[str, Any]] = [
    {**TP2, **PP2},
    {**TP2, **PP2, "virtual_pipeline": 2, "sequence_parallel": True, "recompute": "full"},
    {**TP2, "distributed_optimizer": "on"},
    {"context_parallel": 2, "recompute": "full"},
]


def beside(name: str) -> Any:
    key = f"creditgraph_test_megatron_{name}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, Path(__file__).parent / f"{name}.py")
        sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
    return sys.modules[key]


def settings(lora: Lora) -> dict[str, Any]:
    """Several steps per batch, with a reference: the model without its adapters."""
    training = beside("training")
    optimizer = training.OptimizerSettings(lr=2e-2, eps=1e-3, grad_clip=0.1, weight_decay=0.1)
    return {**training.CASES["ppo_clip"], "optimizer": optimizer, "lora": lora}


def trained(learner: Any) -> dict[str, Any]:
    training = beside("training")
    metrics, _ = training.two_runs(learner)
    published = learner.weights()
    return {
        "metrics": metrics,
        "logprobs": training.logprobs_of(learner),
        "published": published.tensors,
        "adapter": published.adapter and (published.adapter.rank, published.adapter.alpha, published.adapter.targets),
        "gradients": None,
    }


def train(folder: str, layouts: list[dict[str, Any]], lora: Lora, dtype: str = "float32") -> list[dict[str, Any]]:
    return [trained(beside("training").megatron_learner(folder, x, settings(lora), dtype)) for x in layouts]


def compare(actual: dict[str, Any], expected: dict[str, Any], place: str) -> None:
    for a, b in zip(actual["metrics"], expected["metrics"], strict=True):
        cut = {"forward_tokens", "shared_tokens", "unique_tokens", "imbalance_before", "imbalance_after"}
        a, b = ({k: v for k, v in x.items() if k not in cut} for x in (a, b))
        assert a == pytest.approx(b, rel=1e-5, abs=2e-6), place
    assert float((actual["logprobs"] - expected["logprobs"]).abs().max()) < 3e-5, place
    assert actual["adapter"] == expected["adapter"], place
    assert actual["published"].keys() == expected["published"].keys(), place
    for name, tensor in expected["published"].items():
        difference = float((actual["published"][name] - tensor).abs().max() / tensor.abs().max())
        assert difference < 1e-5, (place, name, difference)


@pytest.fixture(scope="module")
def hf() -> Any:
    made: dict[Any, Any] = {}

    def reference(folder: str, lora: Lora) -> dict[str, Any]:
        if (folder, lora) not in made:
            made[folder, lora] = trained(beside("training").hf_learner(folder, settings(lora)))
        return made[folder, lora]

    return reference


@pytest.mark.parametrize(
    ("kind", "lora", "layouts"),
    [
        ("qwen3", Lora(rank=4, alpha=8.0), LAYOUTS),
        ("qwen3", Lora(rank=3, alpha=6.0, target="q_proj, v_proj,up_proj", publish="adapter"), LAYOUTS[:2]),
        ("qwen2-tied", Lora(rank=2, alpha=4.0, publish="adapter"), [PP2]),
        ("olmo2", Lora(rank=2, alpha=4.0), LAYOUTS[:1]),
    ],
)
def test_equal_to_peft(
    pool: Any, checkpoint: Any, hf: Any, kind: str, lora: Lora, layouts: list[dict[str, Any]]
) -> None:
    folder = checkpoint(kind)
    expected = hf(folder, lora)
    before = beside("training").hf_learner(folder, settings(lora)).weights().tensors
    moved = [float((before[n] - t).abs().max() / t.abs().max()) for n, t in expected["published"].items()]
    assert max(moved) > 0.05  # else nothing was compared
    for place, (layout, result) in enumerate(zip(layouts, pool.run(train, folder, layouts, lora)[0], strict=True)):
        compare(result, expected, f"{place}: {layout}")


def save_and_step(folder: str, layout: dict[str, Any], target: str, lora: Lora) -> dict[str, Any]:
    training = beside("training")
    learner = training.megatron_learner(folder, layout, settings(lora))
    for seed in range(2):
        training.step(learner, seed)
    learner.save_shards(Path(target)).finish()
    return {"saved": learner.backend.export_adapters(), **training.step(learner, 2)}


def resume_and_step(folder: str, layout: dict[str, Any], target: str, lora: Lora) -> dict[str, Any]:
    training = beside("training")
    learner = training.megatron_learner(folder, layout, settings(lora))
    learner.load_shards(Path(target))
    return {"saved": learner.backend.export_adapters(), **training.step(learner, 2)}


@pytest.mark.parametrize("distributed", ["off", "on"])
def test_a_checkpoint_of_adapters_is_continued_by_another_layout(
    pool: Any, checkpoint: Any, tmp_path: Path, distributed: str
) -> None:
    lora = Lora(rank=4, alpha=8.0)
    folder, target, more = checkpoint("qwen3"), str(tmp_path / "shards"), {"distributed_optimizer": distributed}
    expected = pool.run(save_and_step, folder, {**TP2, **more}, target, lora)[0]
    listed = (Path(target) / ".metadata").read_bytes()
    assert b"adapters.linear_fc1" in listed
    assert b"word_embeddings" not in listed  # the frozen weights are in the model's folder
    actual = pool.run(resume_and_step, folder, {**PP2, **more}, target, lora)[0]
    for module, pair in expected["saved"].items():
        assert all(torch.equal(a, b) for a, b in zip(actual["saved"][module], pair, strict=True)), module
    assert actual["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=2e-6)
    for name, tensor in expected["weights"].items():
        assert float((actual["weights"][name] - tensor).abs().max() / tensor.abs().max()) < 1e-6, name


def refused(folder: str, layout: dict[str, Any], lora: Lora) -> str:
    try:
        beside("training").megatron_learner(folder, layout, {"lora": lora})
    except ConfigError as error:
        return str(error)
    return ""


def test_targets_and_layouts_that_do_not_fit(pool: Any, checkpoint: Any) -> None:
    text = pool.run(refused, checkpoint("qwen3"), {}, Lora(rank=2, target="q_proj,lm_head"))[0]
    assert "(down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj), got 'lm_head'" in text
    # One key-value head, on two ranks.
    text = pool.run(refused, checkpoint("qwen2"), TP2, Lora(rank=2))[0]
    assert "tensor_parallel 2 cuts 1 key-value heads" in text
