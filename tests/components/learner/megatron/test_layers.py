"""Layers, kernels and 8-bit products that cannot be had are refused, each with its reason."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from creditgraph.components.learner.megatron.learner import MegatronLearner
from creditgraph.components.learner.megatron.settings import Fp8, LayerSettings, ParallelLayout
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


def shape(**changes: int) -> Any:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}
    return SimpleNamespace(**{**sizes, "head_dim": 64, **changes})


@pytest.mark.parametrize(
    ("recipe", "dtype", "tensor", "changes", "text"),
    [
        ("delayed", torch.float32, 1, {}, "expected model.dtype bfloat16, got float32"),
        # 500 / 2 = 250 is no multiple of 16.
        ("tensorwise", torch.bfloat16, 2, {"intermediate_size": 500},
         "expected widths in multiples of 16, got MLP width of a rank 250"),
        # (4 / 2 + 2 · 2 / 2) · 80 = 320 and 2 · 80 = 160.
        ("blockwise", torch.bfloat16, 2, {"head_dim": 80},
         "multiples of 128, got queries, keys and values of a rank 320, attention output of a rank 160"),
        ("blockwise", torch.bfloat16, 2, {}, ""),
    ],
)  # fmt: skip
def test_8_bits_need_dtype_and_widths(
    recipe: Any, dtype: torch.dtype, tensor: int, changes: dict[str, int], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from creditgraph.components.learner.megatron.layers.fp8 import check_fp8
    from creditgraph.components.learner.megatron.layers.parts import Parts

    library = SimpleNamespace()
    for name in ("fp8", "mxfp8", "fp8_block_scaling"):
        setattr(library, f"is_{name}_available", lambda return_reason: (True, ""))
    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace(pytorch=library))
    given = (Fp8(recipe=recipe), Parts(True, object, object, object), dtype, ParallelLayout(tensor_parallel=tensor))
    if not text:
        check_fp8(*given, shape(**changes))
        return
    with pytest.raises(ConfigError, match=rf"learner\.layers\.fp8\.recipe '{recipe}': .*{text}; .*recipe: off"):
        check_fp8(*given, shape(**changes))


def test_8_bits_need_the_library(parts: Any) -> None:
    from creditgraph.components.learner.megatron.layers.fp8 import check_fp8

    with pytest.raises(ConfigError, match=r"expected TransformerEngine's layers \(a GPU, and pip install"):
        check_fp8(Fp8(recipe="delayed"), parts.LOCAL, torch.bfloat16, ParallelLayout(), shape())
    check_fp8(Fp8(), parts.LOCAL, torch.float32, ParallelLayout(), shape())


def test_on_a_gpu_slow_attention_is_refused() -> None:
    from creditgraph.components.learner.megatron.backend import MegatronBackend

    config = SimpleNamespace(params_dtype=torch.float32, kv_channels=64, attention_windows=[None])
    backend: Any = SimpleNamespace(
        context=SimpleNamespace(device="cuda"), model=SimpleNamespace(transformer_config=config)
    )
    with pytest.raises(ConfigError, match=r"dtype is float32 .*learner\.compute\.slow_attention=true"):
        MegatronBackend._choose_kernels(backend, MegatronLearner.Config())


def test_a_kernel_without_its_library_is_refused() -> None:
    from creditgraph.components.learner.megatron.layers.attention import choose_kernel

    given = ((4, 2, 8), [None], 32, torch.float32, CPU, lambda times: times)
    with pytest.raises(ConfigError, match=r"learner\.layers\.attention 'cudnn' needs .* No module named"):
        choose_kernel("cudnn", *given)
    assert choose_kernel("auto", *given) is choose_kernel("torch", *given) is None
