"""Fields of megatron-core that settings pass through, checked against the installed library; what GPUs switch on."""

import dataclasses
import importlib.util
from typing import Any

import pytest

from creditgraph.components.learner.megatron.learner import MegatronLearner
from creditgraph.components.learner.megatron.settings import (
    FUSIONS,
    OWN_DDP,
    OWN_TRANSFORMER,
    _owner,
    fusions,
    missing_fusions,
)
from creditgraph.pipeline.core.settings import build_config


def problems(**settings: Any) -> list[str]:
    return build_config(MegatronLearner.Config, settings, "learner")[1]


def test_free_fields_are_taken_with_their_types() -> None:
    given = {"transformer": {"apply_rope_fusion": True, "moe_z_loss_coeff": 1}, "ddp": {"bucket_size": 1000}}
    config, found = build_config(MegatronLearner.Config, given, "learner")
    assert not found
    assert config.transformer == {"apply_rope_fusion": True, "moe_z_loss_coeff": 1.0}
    assert config.ddp == {"bucket_size": 1000}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"transformer": {"apply_rope_fusoin": True}},
            "learner.transformer.apply_rope_fusoin: unknown setting. Did you mean 'apply_rope_fusion'?",
        ),
        (
            {"transformer": {"apply_rope_fusion": 3}},
            "learner.transformer.apply_rope_fusion: expected bool, got 3 (int).",
        ),
        (
            {"transformer": {"hidden_size": 8}},
            "learner.transformer.hidden_size: the model's config.json determines it; remove it.",
        ),
        (
            {"transformer": {"recompute_method": "block"}},
            "learner.transformer.recompute_method: learner.recompute determines it; remove it.",
        ),
        (
            {"transformer": {"tensor_model_parallel_size": 2}},
            "learner.transformer.tensor_model_parallel_size: the sizes of the layout, such as "
            "learner.tensor_parallel determines it; remove it.",
        ),
        (
            {"ddp": {"use_distributed_optimizer": True}},
            "learner.ddp.use_distributed_optimizer: learner.distributed_optimizer determines it; remove it.",
        ),
        (
            {"ddp": {"overlap_param_gather": True}},
            "learner.ddp.overlap_param_gather: gathers the weights that the distributed optimizer shards; set "
            "learner.distributed_optimizer=on.",
        ),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], text: str) -> None:
    assert problems(**settings) == [text]


def test_every_pattern_of_an_own_field_is_one_of_the_library() -> None:
    transformer = pytest.importorskip("megatron.core.transformer.transformer_config").TransformerConfig
    ddp = pytest.importorskip("megatron.core.distributed").DistributedDataParallelConfig
    for own, config in ((OWN_TRANSFORMER, transformer), (OWN_DDP, ddp)):
        names = [f.name for f in dataclasses.fields(config)]
        for pattern in " ".join(own.values()).split():
            assert any(_owner(name, {"x": pattern}) for name in names), pattern
    assert set(FUSIONS) <= {f.name for f in dataclasses.fields(transformer)}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "olmo2", "olmo3"])
def test_no_setting_overwrites_what_the_bridge_sets(pool: Any, ranks: Any, checkpoint: Any, kind: str) -> None:
    layout = {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2, "sequence_parallel": True}
    passed = pool.run(ranks.config_fields, checkpoint(kind), layout)[0]
    free = {name for name in passed if not _owner(name, OWN_TRANSFORMER)}
    # Ours by default, but a user may decide otherwise.
    assert free == {*FUSIONS}


def test_a_gpu_has_the_fast_paths_of_the_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch", "transformer_engine"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
    assert set(fusions("cpu").values()) == {False}
    on = {"gradient_accumulation_fusion": False, "apply_rope_fusion": True, "bias_activation_fusion": True}
    assert fusions("cuda:3") == on
    assert missing_fusions() == {"gradient_accumulation_fusion": "build NVIDIA Apex with --cpp_ext --cuda_ext"}


def test_one_queue_where_ranks_share_matrices_or_tokens() -> None:
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    for layout, expected in (({}, {}), ({"tensor_parallel": 2}, wanted), ({"context_parallel": 2}, wanted)):
        assert MegatronLearner.environment(MegatronLearner.Config(**layout)) == expected
