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
# Places of the other jobs.
QUANTIZED = len(PASSES) + len(FAMILIES)
# Models and layouts that attention kernels are compared on.
ATTENDED = {"plain": ("qwen2", {}), "windows": ("olmo3", {}), "context": ("qwen2", {"context_parallel": 2})}
KERNELS = QUANTIZED + 2
CHOICES, REFUSED, RESUMED = range(KERNELS + len(ATTENDED), KERNELS + len(ATTENDED) + 3)
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
        ("ranks.train", (checkpoint(kind), sizes, *MODEL.rows(), MODEL.CUTS, recompute))
        for kind, sizes, recompute in PASSES
    ]
    jobs += [("te_rank.classes", (checkpoint(kind), {})) for kind in FAMILIES]
    wide = checkpoint("qwen3-wide")
    jobs += [("te_rank.quantized", (wide, {}, *MODEL.rows())), ("te_rank.quantized", (wide, PAIR, *MODEL.rows()))]
    jobs += [("te_rank.kernels", (checkpoint(kind), sizes, *MODEL.rows())) for kind, sizes in ATTENDED.values()]
    jobs += [("te_rank.choices", ()), ("te_rank.refused", (wide,))]
    folder = tmp_path_factory.mktemp("te")
    for distributed in ("off", "on"):
        shards, optimizer = str(folder / distributed), {"distributed_optimizer": distributed}
        jobs += [("training.save_and_step", (checkpoint("tiny"), {**PAIR, **optimizer}, shards))]
        jobs += [("training.resume_and_step", (checkpoint("tiny"), optimizer, shards))]
    for distributed in ("off", "on"):
        unstepped, optimizer = str(folder / f"unstepped-{distributed}"), {"distributed_optimizer": distributed}
        jobs += [("te_rank.resume_unstepped", (checkpoint("tiny"), optimizer, unstepped))]
    jobs += [("te_rank.adam_steps", ())]
    return with_transformer_engine(jobs, folder)


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


RECIPES = {
    "off": ("none", "", 1),
    "delayed": ("TEDelayedScaling", "HYBRID", 16),
    "tensorwise": ("Float8CurrentScaling", "E4M3", 16),
    "blockwise": ("Float8BlockScaling", "E4M3", 128),
    "mxfp8": ("MXFP8BlockScaling", "E4M3", 32),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shares", [1, 2])
def test_matrices_run_in_8_bits_on_whole_tiles_of_tokens(recipe: str, shares: int, answers: list[list[Any]]) -> None:
    job = QUANTIZED + shares - 1
    name, kind, multiple = RECIPES[recipe]
    for of_rank in answers:
        seen, tokens, logprobs = of_rank[job][recipe]
        assert seen == [(name, kind)]
        assert all(n % multiple == 0 for n in tokens)
        # Padding changes nothing: the 8-bit product itself is torch's here.
        torch.testing.assert_close(logprobs, of_rank[job]["off"][2], rtol=0, atol=0.02)


def test_a_recipe_that_the_gpu_cannot_run_is_refused(answers: list[list[Any]]) -> None:
    text = (
        "learner.layers.fp8.recipe 'mxfp8': TransformerEngine says: Device compute capability 10.0 or higher required"
    )
    assert answers[0][REFUSED].startswith(text)
    assert answers[0][REFUSED].endswith("set recipe: off.")


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
@pytest.mark.parametrize("case", ATTENDED)
def test_kernels_compute_all_attention_and_equal_torch(case: str, kernel: str, answers: list[list[Any]]) -> None:
    for of_rank in answers:
        made = of_rank[KERNELS + list(ATTENDED).index(case)]
        for share in (False, True):
            logprobs, gradient, masks = made[kernel, share]
            shares = share or case == "context"
            assert len(masks) == 4  # layers
            assert {mask for mask, _ in masks} == {"padding_causal_bottom_right" if shares else "padding_causal"}
            assert ({window for _, window in masks} == {(-1, 0)}) == (case != "windows")
            assert not made["torch", share][2]
            torch.testing.assert_close(logprobs, made["torch", share][0], rtol=1e-5, atol=1e-5)
            limit = 1e-5 * float(gradient.abs().max())
            torch.testing.assert_close(gradient, made["torch", share][1], rtol=1e-4, atol=limit)


def test_the_kernel_is_the_fastest_or_the_one_that_is_set(answers: list[list[Any]]) -> None:
    made = answers[0][CHOICES]
    assert (made["auto"], made["torch"], made["cudnn"]) == ("torch", "torch", "cudnn")
    assert made["fastest"] == "flash"
    assert made["flash"].startswith(
        "learner.layers.attention 'flash' needs TransformerEngine with that kernel on a GPU, but: "
    )
    assert "No dot product attention backend is available" in made["flash"]
    assert made["flash"].endswith("set learner.layers.attention=auto.")


@pytest.mark.parametrize("distributed", [False, True])
def test_its_optimizer_steps_saves_and_resumes_at_another_layout(distributed: bool, answers: list[list[Any]]) -> None:
    saved, resumed = answers[0][RESUMED + 2 * distributed : RESUMED + 2 * distributed + 2]
    assert answers[0][-1] > 0  # of TransformerEngine's FusedAdam
    assert resumed["version"] == saved["version"] == 3
    assert all(torch.equal(resumed["saved"][name], weight) for name, weight in saved["saved"].items())
    for name, weight in saved["weights"].items():
        assert not torch.equal(weight, saved["saved"][name])
        limit = 1e-6 * float(weight.abs().max())
        torch.testing.assert_close(resumed["weights"][name], weight, rtol=0, atol=limit, msg=name)


def test_a_checkpoint_before_any_step_is_continued(answers: list[list[Any]]) -> None:
    assert answers[0][-3:-1] == [1, 1]
