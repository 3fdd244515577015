"""Qwen3-MoE: learner.megatron against learner.hf on the same batches, checkpoints, and layouts that do not fit."""

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from creditgraph.components.learner.megatron.learner import MegatronLearner
from creditgraph.components.learner.megatron.settings import ParallelLayout
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.run.compose.choices import CONFIG_DIR
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose


def module(name: str) -> Any:
    key = f"creditgraph_test_megatron_{name}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, Path(__file__).parent / f"{name}.py")
        sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
    return sys.modules[key]


training, learners = module("training"), module("test_learner")
CASES = {**{name: training.CASES[name] for name in ("ppo_clip", "gspo")}, training.REPLAY: training.CASES["ppo_clip"]}
SP2 = {"tensor_parallel": 2, "sequence_parallel": True}
# Of four ranks; what a layout leaves over are replicas, whose numbers of micro-batches differ.
LAYOUTS: list[dict[str, Any]] = [
    {"expert_parallel": 2},
    {"expert_parallel": 4, "distributed_optimizer": "on"},
    {"expert_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
    {"expert_parallel": 4, **SP2, "distributed_optimizer": "on"},
    {"expert_parallel": 2, **SP2, "pipeline_parallel": 2, "recompute": "full"},
    {"expert_parallel": 4, **SP2, "context_parallel": 2},
]


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[[str], str]) -> Any:
    return training.train_hf(checkpoint("qwen3_moe-42"), CASES)


def compare(pool: Any, folder: str, layouts: list[dict[str, Any]], case: str, expected: Any) -> None:
    answers = pool.run(training.train_layouts, folder, layouts, {case: CASES[case]})
    for place, layout in enumerate(layouts):
        result, name = answers[0][place][case], f"{layout}, {case}"
        assert all(other[place][case]["metrics"] == result["metrics"] for other in answers), name
        learners.compare(result, expected[case], name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "layouts"),
    [
        ("ppo_clip", LAYOUTS),
        ("replay", [LAYOUTS[2], *LAYOUTS[4:]]),  # stages that alternate, recomputed passes, tokens that ranks share
        ("gspo", [{"expert_parallel": 2, **SP2}, SP2]),
    ],
)
def test_equal_to_learner_hf(
    pool: Any, checkpoint: Callable[[str], str], case: str, layouts: list[dict[str, Any]], expected: Any
) -> None:
    compare(pool, checkpoint("qwen3_moe-42"), layouts, case, expected)


def test_two_ranks_equal_learner_hf(checkpoint: Callable[[str], str], expected: Any) -> None:
    pool = module("pool").Pool(2)
    try:
        layouts: list[dict[str, Any]] = [{}, SP2, {"context_parallel": 2}]
        compare(pool, checkpoint("qwen3_moe-42"), [{"expert_parallel": 2, **x} for x in layouts], "gspo", expected)
        replayed = [{"expert_parallel": 2, **SP2, "recompute": "full"}]
        compare(pool, checkpoint("qwen3_moe-42"), replayed, "replay", expected)
    finally:
        pool.close()


def test_given_experts_change_the_gradient(expected: Any) -> None:
    one, other = (expected[case]["metrics"][0]["grad_norm"] for case in ("replay", "ppo_clip"))
    assert abs(one - other) > 1e-3


# --- checkpoints ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distributed", "layouts"),
    [
        ("off", [{"expert_parallel": 2, **SP2}, {"expert_parallel": 2, "pipeline_parallel": 2}]),
        ("on", [{"expert_parallel": 4}, SP2]),
    ],
)
def test_a_checkpoint_is_continued_at_another_layout(
    pool: Any, checkpoint: Callable[[str], str], tmp_path: Path, distributed: str, layouts: list[dict[str, Any]]
) -> None:
    folder, target, more = checkpoint("qwen3_moe-42"), str(tmp_path / "shards"), {"distributed_optimizer": distributed}
    expected = pool.run(training.save_and_step, folder, {"expert_parallel": 2, **SP2, **more}, target)[0]
    for layout in layouts:
        actual = pool.run(training.resume_and_step, folder, {**layout, **more}, target)[0]
        assert all(torch.equal(actual["saved"][n], w) for n, w in expected["saved"].items()), layout
        assert learners.relative(actual["weights"], expected["weights"]) < 1e-6, layout


# --- layouts ---


def config_of(**changes: Any) -> Any:
    from transformers import Qwen3MoeConfig

    # Of Qwen3-30B-A3B.
    shape = {
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(**{**shape, **changes})


def check(config: Any, **sizes: Any) -> None:
    from creditgraph.components.learner.megatron.parallel import check_layout

    check_layout(ParallelLayout(**sizes), config, "some/model")


@pytest.mark.parametrize(
    ("sizes", "changes", "text"),
    [
        ({"expert_parallel": 3}, {},
         "expert_parallel 3 does not divide 128 experts. These work: 1, 2, 4, 8, 16, 32, 64, 128"),
        ({"tensor_parallel": 4}, {}, "tensor_parallel 4 of a model with experts needs sequence_parallel: true"),
        ({"tensor_parallel": 64, "sequence_parallel": True}, {},
         "tensor_parallel 64 does not fit 32 attention heads and 4 key-value heads; it must divide the first, and "
         "divide or be a multiple of the second. These work: 1, 2, 4, 8, 16, 32"),
        ({}, {"num_experts_per_tok": 1}, "num_experts_per_tok 1 with norm_topk_prob, .* not supported. Use learner.hf"),
        ({**SP2}, {"mlp_only_layers": [0], "intermediate_size": 6143},
         "MLPs of 6143; .* These work: 1"),
        ({"expert_parallel": 2}, {"mlp_only_layers": list(range(48))},
         "expert_parallel 2 shards experts, but this qwen3_moe has none; set expert_parallel: 1"),
    ],
)  # fmt: skip
def test_a_layout_of_experts_that_does_not_fit_is_refused(sizes: Any, changes: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check(config_of(**changes), **sizes)


def test_the_recipe_composes_with_the_layout_in_its_comment() -> None:
    text = (CONFIG_DIR / "recipe" / "gspo_qwen3_30b_a3b.yaml").read_text()
    overrides = re.findall(r"learner[.\w]*=\w+", text)
    assert overrides[0] == "learner=megatron"
    experiment = build_experiment(compose(["recipe=gspo_qwen3_30b_a3b", *overrides]), "gspo_qwen3_30b_a3b")
    learner = experiment.graph["learner"].config
    assert (learner.tensor_parallel, learner.sequence_parallel, learner.expert_parallel) == (4, True, 8)
    assert MegatronLearner.ranks_per_replica(learner) == 4
    from creditgraph.components.learner.megatron.parallel import check_layout

    check_layout(learner, config_of(), experiment.model.path)


def test_other_layouts_of_its_model_fit() -> None:
    check(config_of(), expert_parallel=16)
    check(config_of(), context_parallel=2, **SP2, pipeline_parallel=2, expert_parallel=4)


@pytest.mark.parametrize(
    "sizes", [{"tensor_parallel": 4, "expert_parallel": 6}, {"context_parallel": 3, "expert_parallel": 2}]
)
def test_experts_cover_a_share_of_a_replica_or_whole_replicas(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"expert_parallel \d does not fit tensor_parallel \d × context_parallel \d"):
        ParallelLayout(**sizes)


def test_experts_over_more_replicas_than_there_are(pool: Any, ranks: Any, checkpoint: Callable[[str], str]) -> None:
    sizes = {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2, "expert_parallel": 4}
    text = (
        "expert_parallel 4 shards experts over 2 replicas, but the run has 1; expected a multiple of 2. Start another "
        "number of ranks, or set expert_parallel."
    )
    for error in pool.run(ranks.layout_error, sizes):
        assert text in error


def test_learner_hf_packs_rows_of_a_model_with_experts(checkpoint: Callable[[str], str]) -> None:
    learner = training.hf_learner(checkpoint("qwen3_moe-42"), training.CASES["reinforce"])
    assert learner.model.packs
    trajectories, credit = training.make_batch(0)
    assert learner.run(trajectories=trajectories, credit=credit).report.metrics["shared_tokens"] > 0
