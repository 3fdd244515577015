"""The classes of matrices and norms, by library; a family's specification is made of them."""

import importlib.util
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from creditgraph.components.learner.megatron.attention import RMSNorm
from creditgraph.components.learner.megatron.settings import LayerSettings
from creditgraph.pipeline.core.errors import ConfigError


@dataclass(frozen=True)
class Parts:
    """Classes of one library.

    Attributes:
        transformer_engine: whether they are TransformerEngine's, whose column-parallel matrices include the norm before
            them in families with norms there.
        column, row: matrices sharded over tensor-parallel ranks by output and by input.
        norm: RMS norm.
    """

    transformer_engine: bool
    column: type[Any]
    row: type[Any]
    norm: type[Any]

    @cached_property
    def normed_row(self) -> type[Any]:
        """A row-parallel matrix followed by a norm, of families with norms after attention and MLP."""
        return _normed(self.row, self.norm)


def _normed(row: Any, norm: Any) -> type[Any]:
    class NormedRowParallelLinear(row):  # type: ignore[misc]
        """A matrix product followed by an RMS norm of its whole result."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.norm = norm(config, output_size, config.layernorm_epsilon)
            # Adapters are added to the product, before the norm, by a hook in front of this one.
            self.register_forward_hook(_with_norm)

    return NormedRowParallelLinear


def _with_norm(linear: Any, args: Any, result: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    out, bias = result
    return linear.norm(out), bias


LOCAL = Parts(False, ColumnParallelLinear, RowParallelLinear, RMSNorm)


def transformer_engine_parts() -> Parts:
    """megatron-core's wrappers of TransformerEngine's modules."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear

    return Parts(True, TEColumnParallelLinear, TERowParallelLinear, TENorm)


def chosen_parts(settings: LayerSettings, device: torch.device) -> Parts:
    """The parts that the settings choose; ConfigError for TransformerEngine without it or without a GPU."""
    installed = importlib.util.find_spec("transformer_engine") is not None
    usable = installed and device.type == "cuda"
    if settings.library == "transformer_engine" and not usable:
        lacks = "transformer-engine is not installed" if not installed else f"the device is '{device}'"
        raise ConfigError(
            f"learner.layers.library 'transformer_engine' needs that package and a GPU, but {lacks}; "
            "pip install 'creditgraph[transformer-engine]' on a machine with a GPU, or set "
            "learner.layers.library=local."
        )
    return transformer_engine_parts() if usable and settings.library != "local" else LOCAL
