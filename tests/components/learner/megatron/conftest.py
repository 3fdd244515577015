"""The pool of gloo processes and small random checkpoints."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from creditgraph.components.models.load import EMBEDDED

REASON = "needs megatron-core and mbridge: pip install 'creditgraph[megatron]'"


def _beside(name: str) -> Any:
    key = f"creditgraph_test_megatron_{name}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, Path(__file__).parent / f"{name}.py")
        sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
    return sys.modules[key]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # One worker of pytest-xdist runs all tests that share the pool.
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.xdist_group("megatron"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    """Four gloo processes for all files: `pool.run(function, *args)` runs a function of a file on each rank."""
    pytest.importorskip("megatron.core", reason=REASON)
    pytest.importorskip("mbridge", reason=REASON)
    pool = _beside("pool").Pool(4)
    yield pool
    pool.close()


@pytest.fixture
def processes() -> Iterator[Callable[[int], Any]]:
    """processes(n) → such a pool of n ranks without process groups, for functions that start whole runs."""
    pytest.importorskip("megatron.core", reason=REASON)
    made: list[Any] = []

    def make(size: int) -> Any:
        made.append(_beside("pool").Pool(size, grouped=False))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.fixture(scope="session")
def ranks() -> Any:
    """The module ranks.py: functions for the pool."""
    pytest.importorskip("megatron.core", reason=REASON)
    return _beside("ranks")


@pytest.fixture(scope="session")
def with_transformer_engine() -> Callable[..., Any]:
    """with_transformer_engine(jobs, folder) → results by rank, with TransformerEngine's sources; see te_sources.py."""
    pytest.importorskip("megatron.core", reason=REASON)
    return _beside("te_sources").run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """checkpoint(kind) → folder of a small random model: "tiny", "qwen2" (untied, padded vocabulary, one key-value
    head), "qwen2-tied", "qwen3" (its own head size), "qwen3-wide" (one layer, whole tiles of 128), "llama" (scaled
    rotary angles), "olmo2" and "olmo3" (post-norm; sliding windows, YaRN)."""
    made: dict[str, str] = {}

    def folder(kind: str) -> str:
        if kind not in made:
            made[kind] = str(EMBEDDED["tiny"]) if kind == "tiny" else _write(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


def _write(kind: str, path: Path) -> str:
    import transformers

    shared = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "vocab_size": 64,
        "tie_word_embeddings": False,
    }
    scaled = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0}
    experts = {
        "head_dim": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
    }
    shapes = {
        "qwen2": lambda: transformers.Qwen2Config(**{**shared, "vocab_size": 51, "num_key_value_heads": 1}),
        "qwen2-tied": lambda: transformers.Qwen2Config(**{**shared, "tie_word_embeddings": True}),
        "qwen3": lambda: transformers.Qwen3Config(**shared, head_dim=12),
        "qwen3-wide": lambda: transformers.Qwen3Config(
            **{**shared, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}, head_dim=64
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**shared, **experts, norm_topk_prob=True),
        "qwen3_moe-42": lambda: transformers.Qwen3MoeConfig(
            **{**shared, "vocab_size": 42}, **experts, norm_topk_prob=True
        ),
        "qwen3_moe-raw": lambda: transformers.Qwen3MoeConfig(**shared, **experts, norm_topk_prob=False),
        "olmo2": lambda: transformers.Olmo2Config(**shared, pad_token_id=None, eos_token_id=0),
        "olmo3": lambda: transformers.Olmo3Config(
            **{**shared, "max_position_embeddings": 32},
            pad_token_id=None,
            eos_token_id=0,
            sliding_window=6,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        ),
        "llama": lambda: transformers.LlamaConfig(
            **shared, rope_parameters={**scaled, "original_max_position_embeddings": 16}
        ),
    }
    # A model type without a shape above gets the shared one.
    config = shapes[kind]() if kind in shapes else transformers.AutoConfig.for_model(kind, **shared)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return str(path)
