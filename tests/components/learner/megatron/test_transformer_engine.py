"""TransformerEngine's layers, from its real Python sources with the computing parts in plain torch (te_sources.py)."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

PAIR = {"tensor_parallel": 2, "sequence_parallel": True}
FAMILIES = ("qwen2", "qwen3", "llama", "olmo2", "olmo3")
# Layout and recomputation of each pass against transformers; neighbours have one layout.
PASSES = [(kind, PAIR, "none") for kind in FAMILIES] + [("olmo3", {}, "full"), ("qwen2-tied", {}, "none")]
WRAPPER = "megatron.core.extensions.transformer_engine."
NORM = "transformer_engine.pytorch.module.rmsnorm.RMSNorm"


def test_model() -> Any:
    """The module test_model.py: the rows, and transformers' results."""
    spec = importlib.util.spec_from_file_location("megatron_test_model", Path(__file__).parent / "test_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODEL = test_model()
del test_model


@pytest.fixture(scope="module")
def answers(
    with_transformer_engine: Callable[..., Any], checkpoint: Callable[[str], str], tmp_path_factory: Any
) -> list[list[Any]]:
    jobs: list[Any] = [
        ("train", (checkpoint(kind), sizes, *MODEL.rows(), MODEL.CUTS, recompute)) for kind, sizes, recompute in PASSES
    ]
    jobs += [("classes", (checkpoint(kind), {})) for kind in FAMILIES]
    return with_transformer_engine(jobs, tmp_path_factory.mktemp("te"))


@pytest.mark.parametrize("number", range(len(PASSES)), ids=lambda i: f"{PASSES[i][0]}-{PASSES[i][2]}")
def test_every_family_equals_transformers(
    number: int, answers: list[list[Any]], ranks: Any, checkpoint: Callable[[str], str]
) -> None:
    truth = MODEL.reference(ranks, checkpoint(PASSES[number][0]))
    exported = [of_rank[number][0] for of_rank in answers]
    assert exported == [[], []]
    (passes,) = [of_rank[number][1] for of_rank in answers if of_rank[number][1] is not None]
    for logprobs, entropies, gradients in passes:
        torch.testing.assert_close(logprobs, truth[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropies, truth[1], rtol=1e-5, atol=1e-5)
        assert gradients.keys() == truth[2].keys()
        for name, gradient in truth[2].items():
            limit = 1e-5 * float(gradient.abs().max())
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=limit, msg=name)


@pytest.mark.parametrize("kind", FAMILIES)
def test_layers_are_those_of_transformer_engine(kind: str, answers: list[list[Any]]) -> None:
    made = answers[0][len(PASSES) + FAMILIES.index(kind)]
    olmo = kind.startswith("olmo")
    column = WRAPPER + ("TEColumnParallelLinear" if olmo else "TELayerNormColumnParallelLinear")
    assert made["self_attention.linear_qkv"] == made["mlp.linear_fc1"] == column
    assert made["decoder.final_layernorm"] == NORM
    for row in ("self_attention.linear_proj", "mlp.linear_fc2"):
        if olmo:
            assert "NormedRowParallelLinear" in made[row]
            assert made[f"{row}.norm"] == NORM
        else:
            assert made[row] == f"{WRAPPER}TERowParallelLinear"
    assert made["self_attention.core_attention"].endswith("attention.PackedAttention")
    if kind == "qwen3":
        assert made["self_attention.q_layernorm"] == made["self_attention.k_layernorm"] == NORM
