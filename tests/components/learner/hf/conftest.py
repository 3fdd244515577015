"""Pools of gloo processes for sharded learners."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # One worker of pytest-xdist runs all tests that share the pools.
    for item in items:
        if item.path == Path(__file__).parent / "test_sharding.py":
            item.add_marker(pytest.mark.xdist_group("sharding"))


@pytest.fixture(scope="session")
def sharded() -> Any:
    """The module sharded.py: functions for the pools."""
    name = "creditgraph_test_sharded"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "sharded.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def pools(sharded: Any) -> Iterator[Callable[[int], Any]]:
    """pools(n) → n gloo processes: `.run(function, *args)` runs a function of sharded.py on each."""
    made: dict[int, Any] = {}

    def of(size: int) -> Any:
        if size not in made:
            made[size] = sharded.beside("pool").Pool(size)
        return made[size]

    yield of
    for pool in made.values():
        pool.close()


@pytest.fixture(scope="session")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """odd_model(tied=…, experts=…) → a random Qwen3 whose tensors divide by no number of ranks; of experts, by two."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    made: dict[tuple[bool, int], str] = {}

    def folder(tied: bool = True, experts: int = 0) -> str:
        if (tied, experts) not in made:
            torch.manual_seed(3)
            sizes = {
                "vocab_size": 43,
                "hidden_size": 20,
                "intermediate_size": 33,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 6,
                "max_position_embeddings": 64,
                "tie_word_embeddings": tied,
                "initializer_range": 0.2,
            }
            # Products over experts need rows of a multiple of 16 bytes.
            mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "hidden_size": 24}
            config = Qwen3MoeConfig(**{**sizes, **mixture}) if experts else Qwen3Config(**sizes)
            path = tmp_path_factory.mktemp("odd")
            AutoModelForCausalLM.from_config(config).save_pretrained(path)
            made[tied, experts] = str(path)
        return made[tied, experts]

    return folder
