"""Layers and attention that cannot be had are refused, each with its reason."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from creditgraph.components.learner.megatron.learner import MegatronLearner
from creditgraph.components.learner.megatron.settings import LayerSettings
from creditgraph.pipeline.core.errors import ConfigError

REASON = "needs megatron-core and mbridge: pip install 'creditgraph[megatron]'"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def libraries() -> None:
    pytest.importorskip("megatron.core", reason=REASON)
    pytest.importorskip("mbridge", reason=REASON)


@pytest.fixture
def parts() -> Any:
    from creditgraph.components.learner.megatron.layers import parts

    return parts


@pytest.mark.parametrize(
    ("installed", "device", "text"),
    [
        (False, "cuda", r"but transformer-engine is not installed; .* learner\.layers\.library=local"),
        (True, "cpu", "but the device is 'cpu'"),
    ],
)
def test_transformer_engine_needs_its_package_and_a_gpu(
    installed: bool, device: str, text: str, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda name: object() if installed else None)
    with pytest.raises(ConfigError, match=text):
        parts.chosen_parts(LayerSettings(library="transformer_engine"), torch.device(device))


def test_where_it_is_not_layers_are_those_of_megatron_core(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts.chosen_parts(LayerSettings(), torch.device("cuda")) == parts.LOCAL
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda name: object())
    assert parts.chosen_parts(LayerSettings(), CPU) == parts.LOCAL
    assert parts.chosen_parts(LayerSettings(library="local"), torch.device("cuda")) == parts.LOCAL


def test_on_a_gpu_slow_attention_is_refused() -> None:
    from creditgraph.components.learner.megatron.backend import MegatronBackend

    config = SimpleNamespace(params_dtype=torch.float32, kv_channels=64, attention_windows=[None])
    backend: Any = SimpleNamespace(
        context=SimpleNamespace(device="cuda"), model=SimpleNamespace(transformer_config=config)
    )
    with pytest.raises(ConfigError, match=r"dtype is float32 .*learner\.compute\.slow_attention=true"):
        MegatronBackend._check_attention(backend, MegatronLearner.Config())
