"""Low-rank adapters: their settings, initial values and published names, the same for every learner."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from creditgraph.pipeline.core.payloads import Adapter
from creditgraph.pipeline.core.streams import Stream

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters: each adapted matrix W [out, in] becomes W + B·A · alpha / rank; only A and B are trained."""

    rank: int = 0
    """rank r of the adapters; 0 trains all parameters"""
    alpha: float = 64.0
    """adapters are scaled by alpha / rank"""
    target: str = ALL_LINEAR
    """which layers get adapters: "all-linear" (all but the output head), or module names separated by commas"""
    publish: Literal["merged", "adapter"] = "merged"
    """published weights: merged, whole weights that include the adapters; adapter, only the adapters' tensors, which
    are small and which engine.vllm loads directly (other engines merge them)"""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"expected rank ≥ 0 (0 is full fine-tuning), got {self.rank}.")
        if self.publish == "adapter" and not self.rank:
            raise ValueError("publish is 'adapter', but rank is 0, so there is none; set rank, or publish: merged.")

    @property
    def names(self) -> list[str]:
        """The names of `target`; none for all linear layers."""
        return [] if self.target == ALL_LINEAR else [name.strip() for name in self.target.split(",")]

    def adapts(self, module: str) -> bool:
        """Whether `target` covers a linear layer of the transformer's layers, by its Hugging Face name."""
        return not self.names or any(module == name or module.endswith(f".{name}") for name in self.names)

    def published(self, modules: Iterable[str]) -> Adapter:
        """The description of the adapters of `modules`."""
        targets = {module.rpartition(".")[2] for module in modules}
        return Adapter(rank=self.rank, alpha=float(self.alpha), targets=tuple(sorted(targets)))


def initial_a(seed: int, module: str, rank: int, width: int) -> Tensor:
    """A [rank, width] at the start, float32: uniform in ±1/√width, as peft draws it; B is 0.

    It depends on the layer's name alone, not on the order of layers or on how they are sharded.
    """
    bound = width**-0.5
    draws = Stream(seed, "lora", module).generator().uniform(-bound, bound, (rank, width))
    return torch.from_numpy(draws.astype(np.float32))
