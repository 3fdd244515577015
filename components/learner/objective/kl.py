"""Per-token estimates of KL(π_θ ‖ π_ref) from one sampled token (Schulman, "Approximating KL divergence", 2020).

With d = log π_θ − log π_ref:  k1 = d;  k2 = d²/2;  k3 = e^{−d} − 1 + d. k1 and k3 are unbiased in value; k3 is never
negative. As losses they differ: the gradient of k1 has mean zero on-policy (it does not pull at all), k2's is the
unbiased gradient of the KL, k3's is (1 − e^{−d})∇log π_θ, that of the reverse direction.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from creditgraph.components.learner.objective.base import MAX_LOG_RATIO
from creditgraph.pipeline.core.jagged import takes_lists


@dataclass(frozen=True, kw_only=True)
class KL:
    """Penalty that keeps the policy near the frozen initial model."""

    coefficient: float = 0.0
    """weight of the penalty per token [1/nat], times column "kl_weight" of the credit if there is one; 0 switches it
    off and no reference model is loaded"""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """per-token estimate of KL(π_θ ‖ π_ref) from the sampled token; see `kl.py`"""

    def __post_init__(self) -> None:
        if self.coefficient < 0:
            raise ValueError(f"expected coefficient ≥ 0 (0 is off), got {self.coefficient}.")


@takes_lists
def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Elementwise estimate; both inputs of one shape, nats. d is clamped to ±20 inside k3's exponential."""
    d = logprobs - reference
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    return torch.exp(-d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - 1 + d
