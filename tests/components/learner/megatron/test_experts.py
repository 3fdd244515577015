"""Qwen3-MoE: learner.megatron against learner.hf on the same batches, checkpoints, and layouts that do not fit."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from components.learner.megatron.settings import ParallelLayout
from pipeline.core.errors import ConfigError


def module(name: str) -> Any:
    key = f"creditgraph_test_megatron_{name}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, Path(__file__).parent / f"{name}.py")
        sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
    return sys.modules[key]


training, learners = module("training"), module("test_learner")
SP2 = {"tensor_parallel": 2, "sequence_parallel": True}
# Of four ranks; what a layout leaves over are replicas, whose numbers of micro-batches differ.
LAYOUTS: list[dict[str, Any]] = [
    {"expert_parallel": 2},
    {"expert_parallel": 4, "distributed_optimizer": "on"},
    {"expert_parallel": 2, "pipeline_parallel": 2},
    {"expert_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
    {"expert_parallel": 2, **SP2},
    {"expert_parallel": 4, **SP2, "distributed_optimizer": "on"},
    {"expert_parallel": 2, **SP2, "pipeline_parallel": 2, "recompute": "full"},
    {"expert_parallel": 4, **SP2, "context_parallel": 2},
    {**SP2},
]


@pytest.mark.slow
def test_equal_to_learner_hf(pool: Any, checkpoint: Callable[[str], str]) -> None:
    cases = {name: training.CASES[name] for name in ("ppo_clip", "gspo")}
    folder = checkpoint("qwen3_moe-42")
    expected = training.train_hf(folder, cases)
    answers = pool.run(training.train_layouts, folder, LAYOUTS, cases)
    for place, layout in enumerate(LAYOUTS):
        for case in cases:
            result, name = answers[0][place][case], f"{layout}, {case}"
            assert all(other[place][case]["metrics"] == result["metrics"] for other in answers), name
            learners.compare(result, expected[case], name)


# --- checkpoints ---


@pytest.mark.slow
@pytest.mark.parametrize("distributed", ["off", "on"])
def test_a_checkpoint_is_continued_at_another_layout(
    pool: Any, checkpoint: Callable[[str], str], tmp_path: Path, distributed: str
) -> None:
    folder, target, more = checkpoint("qwen3_moe-42"), str(tmp_path / "shards"), {"distributed_optimizer": distributed}
    expected = pool.run(training.save_and_step, folder, {"expert_parallel": 2, **SP2, **more}, target)[0]
    same = {"expert_parallel": 2, **SP2}
    others = [{"expert_parallel": 4}, {"expert_parallel": 2, "pipeline_parallel": 2}, {**SP2}]
    for layout in (same, *others):
        actual = pool.run(training.resume_and_step, folder, {**layout, **more}, target)[0]
        assert all(torch.equal(actual["saved"][n], w) for n, w in expected["saved"].items()), layout
        assert learners.relative(actual["weights"], expected["weights"]) < 1e-6, layout
