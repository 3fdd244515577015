"""Models against transformers: log-probs, entropies and gradients over layouts, weights in and out."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from creditgraph.components.learner.megatron.settings import ParallelLayout
from creditgraph.components.models.experts import unstack
from creditgraph.pipeline.core.errors import ConfigError, DataError
from creditgraph.pipeline.core.jagged import Jagged

CLOSE = 1e-5
TP2 = {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS = {
    "1x1": {},
    "2x1": {"tensor_parallel": 2},
    "1x2": {"pipeline_parallel": 2},
    "2x2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "shared key-value heads": {"tensor_parallel": 4},
    "sequence and stages": {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2},
    "interleaved": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "context, tensor and sequence": {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
    "context": {"context_parallel": 4},
    "context and stages": {"context_parallel": 2, "pipeline_parallel": 2},
}
EXPERTS = {
    "over replicas": {"expert_parallel": 2},
    "one expert per rank": {"expert_parallel": 4},
    "over replicas, with stages": {"expert_parallel": 2, "pipeline_parallel": 2},
    "over tensor ranks": {"expert_parallel": 2, **TP2},
    "over tensor ranks and replicas": {"expert_parallel": 4, **TP2},
    "over tensor ranks, with chunks": {"expert_parallel": 2, **TP2, "pipeline_parallel": 2, "virtual_pipeline": 2},
    "over context ranks": {"expert_parallel": 2, "context_parallel": 2},
    "over tensor and context ranks": {"expert_parallel": 4, "context_parallel": 2, **TP2},
    "whole": {**TP2},
}
# Neighbours in this list have one layout, so that process groups are made once for them.
CASES = [("tiny", "2x2"), ("qwen2-tied", "2x2"), ("olmo3", "context")]
CASES += [("qwen3", layout) for layout in LAYOUTS if layout != "2x2"]
CUTS = [torch.tensor([0, 1, 2, 3]), torch.tensor([4, 5, 6]), torch.tensor([7, 8]), torch.tensor([9])]


def rows() -> tuple[Jagged, Jagged]:
    """Rows in trees: three prompts, of which some responses begin alike, and a lone one."""
    g = torch.Generator().manual_seed(0)

    def draw(n: int) -> list[int]:
        return torch.randint(1, 40, (n,), generator=g).tolist()  # transformers gives a padding token no gradient

    prompts, responses = [], []
    for size, count in ((5, 4), (7, 3), (2, 2), (4, 1)):
        prompt, stem = draw(size), draw(4)
        for i in range(count):
            prompts.append(prompt)
            responses.append((stem if i % 2 else stem[:2]) + draw(3 + i))
    return Jagged.from_rows(prompts, torch.int64), Jagged.from_rows(responses, torch.int64)


def reference(ranks: Any, path: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The same by transformers, one row at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts, responses = rows()
    logprobs, entropies = [], []
    for cut in CUTS:
        parts = []
        for i in cut.tolist():
            whole = torch.cat([prompts.row(i), responses.row(i)])
            logits = model(whole[None, :-1]).logits[0, len(prompts.row(i)) - 1 :]
            log_p = (logits / 0.8).log_softmax(-1)
            parts.append((log_p.gather(1, responses.row(i)[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)))
        joined = [torch.cat([p[i] for p in parts]) for i in range(2)]
        ranks.objective(*joined).backward()
        logprobs.append(joined[0].detach())
        entropies.append(joined[1].detach())
    gradients = dict(unstack({name: p.grad for name, p in model.named_parameters()}))
    return torch.cat(logprobs), torch.cat(entropies), gradients


@pytest.fixture(scope="module")
def truth(ranks: Any, checkpoint: Callable[[str], str]) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in made:
            made[kind] = reference(ranks, checkpoint(kind))
        return made[kind]

    return get


def compare(answers: Any, truth: Any) -> None:
    """Exports are exact on all ranks; one rank of the last stage has what is compared."""
    assert [bad for bad, _ in answers] == [[]] * 4
    (passes,) = [p for _, p in answers if p is not None]
    for logprobs, entropies, gradients in passes:
        torch.testing.assert_close(logprobs, truth[0], rtol=CLOSE, atol=CLOSE)
        torch.testing.assert_close(entropies, truth[1], rtol=CLOSE, atol=CLOSE)
        assert gradients.keys() == truth[2].keys()
        for name, gradient in truth[2].items():
            torch.testing.assert_close(
                gradients[name], gradient, rtol=CLOSE, atol=CLOSE * float(gradient.abs().max()), msg=name
            )


def test_shared_prefixes_are_not_copied_into_what_a_pass_keeps(pool: Any, ranks: Any, checkpoint: Any) -> None:
    before, after = (pool.run(ranks.kept_bytes, checkpoint("llama"), LAYOUTS["2x1"], n)[0] for n in (1 << 40, 0))
    # Four layers; keys and values of eight paths of 42 tokens; one of two heads of 8 numbers on this rank; float32.
    copies = 4 * 2 * 8 * 42 * 8 * 4
    assert before - after > 0.9 * copies  # what else is kept differs by a little


def test_every_family_equals_transformers(
    pool: Any, ranks: Any, checkpoint: Callable[[str], str], truth: Callable[[str], Any]
) -> None:
    # Not a parameter: importing the families takes seconds in every process that collects tests.
    from creditgraph.components.learner.megatron.families import FAMILIES

    for kind in FAMILIES:
        layout = LAYOUTS["sequence and stages" if kind == "qwen3_moe" else "2x2"]
        compare(pool.run(ranks.train, checkpoint(kind), layout, *rows(), CUTS), truth(kind))


@pytest.mark.parametrize(
    ("kind", "layout"), [("qwen3_moe-raw", "over replicas"), *(("qwen3_moe", layout) for layout in EXPERTS)]
)
def test_experts_equal_transformers(
    kind: str, layout: str, pool: Any, ranks: Any, checkpoint: Callable[[str], str], truth: Callable[[str], Any]
) -> None:
    compare(pool.run(ranks.train, checkpoint(kind), EXPERTS[layout], *rows(), CUTS), truth(kind))


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_equals_transformers_packed_and_shared_and_exports_the_same_bits(
    kind: str, layout: str, pool: Any, ranks: Any, checkpoint: Callable[[str], str], truth: Callable[[str], Any]
) -> None:
    compare(pool.run(ranks.train, checkpoint(kind), LAYOUTS[layout], *rows(), CUTS), truth(kind))


@pytest.mark.parametrize("layout", ["1x2", "interleaved"])
def test_a_tensor_stays_until_it_is_sent(pool: Any, ranks: Any, checkpoint: Callable[[str], str], layout: str) -> None:
    for sent, freed in pool.run(ranks.freed_while_sent, checkpoint("qwen3"), LAYOUTS[layout], *rows(), CUTS):
        assert sent > 0
        assert freed == 0


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_change_nothing(
    recompute: str, pool: Any, ranks: Any, checkpoint: Callable[[str], str], truth: Callable[[str], Any]
) -> None:
    sizes = LAYOUTS["sequence and stages"]
    compare(pool.run(ranks.train, checkpoint("llama"), sizes, *rows(), CUTS, recompute), truth("llama"))


def test_weights_stream_in_and_out(pool: Any, ranks: Any, checkpoint: Callable[[str], str]) -> None:
    # Of 47 tensors: queries, keys and values wait for each other, gates and up projections too, and one or two are on
    # their way.
    for held_in, held_out in pool.run(ranks.most_held, checkpoint("qwen3"), LAYOUTS["2x2"]):
        assert held_in <= 6
        assert held_out <= 6


def test_bfloat16_is_near_and_exports_its_own_bits(
    pool: Any, ranks: Any, checkpoint: Callable[[str], str], truth: Callable[[str], Any]
) -> None:
    sizes = LAYOUTS["sequence and stages"]
    answers = pool.run(ranks.train, checkpoint("llama"), sizes, *rows(), CUTS, "none", torch.bfloat16)
    assert [bad for bad, _ in answers] == [[]] * 4
    (passes,) = [p for _, p in answers if p is not None]
    for logprobs, entropies, _ in passes:
        assert float((logprobs - truth("llama")[0]).abs().max()) < 0.2
        assert float((entropies - truth("llama")[1]).abs().max()) < 0.1


def test_any_layout_to_any_other(pool: Any, ranks: Any, checkpoint: Callable[[str], str]) -> None:
    steps = [LAYOUTS[name] for name in ("1x1", "2x1", "1x2", "2x2", "interleaved", "2x1")]
    assert pool.run(ranks.chain, checkpoint("qwen2"), steps) == [[]] * 4


def config_of(**changes: Any) -> Any:
    from transformers import Qwen2Config

    shape = {
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "num_hidden_layers": 28,
        "hidden_size": 48,
        "intermediate_size": 96,
    }
    return Qwen2Config(**{**shape, **changes})


@pytest.mark.parametrize(
    ("sizes", "changes", "text"),
    [
        ({"tensor_parallel": 8}, {},
         r"tensor_parallel 8 does not fit 12 attention heads, 2 key-value heads and MLPs of 96; .* These work: "
         r"1, 2, 4, 6, 12"),
        ({"tensor_parallel": 5}, {"num_key_value_heads": 3}, r"3 key-value heads .* These work: 1, 3, 6, 12"),
        ({"pipeline_parallel": 4, "virtual_pipeline": 8}, {},
         "pipeline_parallel 4 × virtual_pipeline 8 = 32 stages, but the model has 28 layers; expected at most 28"),
        ({}, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu' for qwen2. Use learner.hf"),
        ({}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
         "rope_type 'dynamic' is not supported; expected one of default, linear, llama3, yarn"),
        ({"tensor_parallel": 8, "pipeline_parallel": 29}, {},
         r"learner\.megatron, model 'some/model': tensor_parallel 8 does not fit .*; pipeline_parallel 29 stages"),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_fit_is_refused_with_all_reasons(sizes: Any, changes: Any, text: str) -> None:
    from creditgraph.components.learner.megatron.parallel import check_layout

    with pytest.raises(ConfigError, match=text):
        check_layout(ParallelLayout(**sizes), config_of(**changes), "some/model")


def test_a_layout_that_fits_passes() -> None:
    from creditgraph.components.learner.megatron.parallel import check_layout

    layout = ParallelLayout(tensor_parallel=4, pipeline_parallel=3, virtual_pipeline=2, sequence_parallel=True)
    check_layout(layout, config_of(vocab_size=51), "some/model")


def test_an_unsupported_model_names_those_that_work() -> None:
    from transformers import GPT2Config

    from creditgraph.components.learner.megatron.families import FAMILIES
    from creditgraph.components.learner.megatron.parallel import check_layout

    text = f"model type 'gpt2' is not supported; expected one of {', '.join(FAMILIES)}. Use learner.hf"
    with pytest.raises(ConfigError, match=text):
        check_layout(ParallelLayout(), GPT2Config(), "some/model")


def test_key_norms_over_all_heads_need_whole_heads() -> None:
    from transformers import Olmo2Config

    from creditgraph.components.learner.megatron.parallel import check_layout

    config = Olmo2Config(
        num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=2, hidden_size=32, intermediate_size=64
    )
    text = r"tensor_parallel 4 does not fit 8 attention heads, 2 key-value heads .* These work: 1, 2"
    with pytest.raises(ConfigError, match=text):
        check_layout(ParallelLayout(tensor_parallel=4), config, "some/model")


def broken(kind: str, checkpoint: Callable[[str], str], folder: Path) -> str:
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint("qwen3"), folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "missing":
        del tensors["model.layers.3.mlp.up_proj.weight"], tensors["model.norm.weight"]
        save_file(tensors, file)
    elif kind == "surplus":
        save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}, file)
    elif kind == "another":
        shutil.copy(Path(checkpoint("qwen2")) / "model.safetensors", file)
    elif kind == "shape":
        save_file({**tensors, "model.layers.1.self_attn.k_proj.weight": torch.zeros(3, 32)}, file)
    else:
        file.unlink()
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("truncated", "model.safetensors: cannot be read .* Write or copy it again"),
        ("missing", r"expected all \d+ weights, but 2 are missing, first 'model.layers.3.mlp.up_proj.weight'"),
        ("surplus", "got 1 others, first 'model.layers.0.self_attn.q_proj.bias', and 0 are missing"),
        ("another", r"got \d+ others, first 'model.layers.0.self_attn.k_proj.bias', and \d+ are missing"),
        ("shape", r"expected shape \(24, 32\) for 'model.layers.1.self_attn.k_proj.weight', got \(3, 32\)"),
        ("none", r"expected a folder in Hugging Face layout, got no \*.safetensors file"),
    ],
)
def test_a_broken_checkpoint_is_reported_on_every_rank(
    kind: str, text: str, pool: Any, ranks: Any, checkpoint: Callable[[str], str], tmp_path: Path
) -> None:
    errors = pool.run(
        ranks.loading_error, broken(kind, checkpoint, tmp_path), {"tensor_parallel": 2, "pipeline_parallel": 2}
    )
    assert len(errors) == 4
    for error in errors:
        with pytest.raises(DataError, match=text):
            raise error


def test_the_vocabulary_is_padded_for_the_ranks_and_reported_at_its_size(
    pool: Any, ranks: Any, checkpoint: Callable[[str], str]
) -> None:
    assert pool.run(ranks.vocabulary, checkpoint("qwen2"), {"tensor_parallel": 4}) == [(51, 64, 16)] * 4
