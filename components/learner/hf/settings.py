"""Settings of `learner.hf`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from components.learner.settings import LearnerSettings

Recompute = Literal["none", "full"]


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters through peft."""

    rank: int = 0
    """rank r of the adapters; 0 trains all parameters"""
    alpha: float = 64.0
    """adapters are scaled by alpha / rank"""
    target: str = "all-linear"
    """which layers get adapters: "all-linear" (all but the output head), or module names separated by commas"""
    publish: Literal["merged", "adapter"] = "merged"
    """published weights: merged, whole weights that include the adapters; adapter, only the adapters' tensors, which
    are small and which engine.vllm loads directly (other engines merge them)"""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"expected rank ≥ 0 (0 is full fine-tuning), got {self.rank}.")
        if self.publish == "adapter" and not self.rank:
            raise ValueError("publish is 'adapter', but rank is 0, so there is none; set rank, or publish: merged.")


@dataclass(frozen=True, kw_only=True)
class HFSettings(LearnerSettings):
    """Settings of `learner.hf`: those of every learner, and what transformers and peft add."""

    lora: Lora = field(default_factory=Lora)
    """low-rank adapters"""
    recompute: Recompute = "none"
    """activations recomputed in the backward pass: none; full, all but the layers' inputs: least memory, about a third
    more time"""
