"""Settings of `engine.vllm`."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from creditgraph.components.engine.served.settings import ServerSettings, Tolerance

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's max_lora_rank


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """The learner's LoRA adapters; `configs/engine/vllm.yaml` copies both settings from the node `learner`."""

    publish: Literal["merged", "adapter"] = "merged"
    """what the learner publishes; with merged, the engine starts without LoRA and merges any adapter it receives"""
    rank: int = 0
    """largest rank of adapters that are loaded without merging"""

    def __post_init__(self) -> None:
        if not 0 <= self.rank <= _RANKS[-1] and self.publish == "adapter":
            raise ValueError(f"lora.rank: expected 0 to {_RANKS[-1]}, got {self.rank}. Or set lora.publish=merged.")

    @property
    def max_rank(self) -> int:
        """The largest rank for which vLLM is started, one of those it supports; 0: it starts without LoRA."""
        return next(r for r in _RANKS if r >= self.rank) if self.publish == "adapter" and self.rank else 0


@dataclass(frozen=True, kw_only=True)
class VllmTolerance(Tolerance):
    """Adds the tolerance of 8 bits."""

    fp8: float = 3.0
    """with quantization=fp8, where factors keep 4 bits: up to 1.9 in runs of the embedded model, where random weights
    make 9 and one wrong matrix 2 to 11. Finds wrong weights, not every wrong matrix, and no old ones"""


@dataclass(frozen=True, kw_only=True)
class VllmSettings(ServerSettings):
    """Settings of vLLM, in servers or in this process."""

    kv_cache_gb: float = 0.0
    """gigabytes of KV cache; 0: on a GPU the memory that gpu_memory leaves, on a CPU 1 GB"""
    gpu_memory: float = 0.5
    """share of the GPU's memory for weights and KV cache; the learner needs the rest"""
    enforce_eager: bool = False
    """on a GPU, neither compiles nor captures CUDA graphs: starts sooner, samples slower; a CPU never does"""
    exact: bool = False
    """on a GPU, kernels whose rounding does not depend on what else is decoded: equal requests give equal tokens,
    slower; False: a row's seed fixes its noise alone, so a token near a tie, and all after it, may come out otherwise
    when the row is requested again or a run is repeated"""
    arguments: tuple[str, ...] = ()
    """further arguments of vLLM's servers, such as --swap-space=8; they come last, so they override others"""
    lora: AdapterSettings = field(default_factory=AdapterSettings)
    """LoRA adapters as the learner publishes them"""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: layers multiply in 8-bit floating point, with a scale per output channel of a weight and per token; the
    learner's policy is then another one, see docs/engines.md"""
    tolerance: VllmTolerance = field(default_factory=VllmTolerance)
    """largest difference in that check"""
    keep_cache: bool = False
    """a row that continues in a later iteration (`carry.tokens`) finds the keys and values of its tokens so far, which
    older weights computed; False: the present weights compute them again"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_cache and self.lora.max_rank:
            raise ValueError(
                "keep_cache: expected false with a learner that publishes adapters, for each of which vLLM has a cache "
                "of its own, got true. Set that, or learner.lora.publish=merged."
            )
        if self.kv_cache_gb < 0:
            raise ValueError(f"kv_cache_gb: expected at least 0, got {self.kv_cache_gb}.")
        if not 0 < self.gpu_memory <= 1:
            raise ValueError(f"gpu_memory: expected 0 < gpu_memory ≤ 1, got {self.gpu_memory}.")
        if self.lora.max_rank and self.channel.kind != "file":
            raise ValueError(
                "channel.kind: expected 'file' with a learner that publishes adapters, which travel through files, "
                f"got '{self.channel.kind}'. Set that, or learner.lora.publish=merged."
            )

    def tolerance_of(self, *dtypes: torch.dtype) -> float:
        """Of 8 bits, if the engine computes with these."""
        return self.tolerance.fp8 if self.quantization == "fp8" else super().tolerance_of(*dtypes)
