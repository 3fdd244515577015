"""What a loss is called with, and what it returns."""

from dataclasses import dataclass
from typing import Any


@dataclass
class LossInputs:
    """One sample."""

    trainer_logprobs: Any
    inference_logprobs: Any
    ref_logprobs: Any
    advantages: Any
    loss_mask: Any
    loss_weights: Any = None


@dataclass
class LossOutputs:
    """Its loss."""

    loss: Any
    metrics: dict[str, Any]
