"""Settings that every learner has."""

from dataclasses import dataclass, field
from typing import Literal

from creditgraph.components.learner.lora import Lora
from creditgraph.components.learner.metrics import Mismatch
from creditgraph.components.learner.objective import ObjectiveSettings
from creditgraph.components.learner.optimizer import OptimizerSettings


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How the device computes; results differ by rounding only."""

    slow_attention: bool = False
    """on a GPU, accept attention without flash kernels (float32, head sizes above 256, old GPUs) and, in learner.hf,
    models that do not support packed sequences, whose rows are then computed one by one without shared prefixes;
    otherwise these are errors. No effect on a CPU, which has no flash kernels"""
    head_chunk: int = 0
    """tokens whose logits exist at a time: more are faster up to a point, and take memory; 0 chooses, on a GPU by
    measurement"""
    head_precision: Literal["auto", "model", "float32"] = "auto"
    """products with a 16-bit output head: model, rounded to the model's dtype; float32, kept, so that log-probs and
    gradients do not depend on the chunk; auto, on a GPU float32 unless measured to cost over 10 % more, elsewhere
    model"""

    def __post_init__(self) -> None:
        if self.head_chunk < 0:
            raise ValueError(f"expected head_chunk ≥ 0 (0 chooses), got {self.head_chunk}.")


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How a model is trained on a rollout batch, whatever its loss."""

    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    """AdamW, clipping, schedule"""
    micro_batch_tokens: int = 16384
    """token budget of one micro-batch, 0 for one micro-batch; lower it if memory runs out, the gradient stays the
    same. A pipeline of P stages needs several times P micro-batches per step to be efficient"""
    minibatches: int = 1
    """optimiser steps per epoch; prompts are split evenly among them, all trajectories of a prompt together"""
    epochs: int = 1
    """passes over the rollout batch"""
    compute: Compute = field(default_factory=Compute)
    """attention and output head on the device"""

    def __post_init__(self) -> None:
        if self.minibatches < 1 or self.epochs < 1 or self.micro_batch_tokens < 0:
            raise ValueError(
                f"expected minibatches ≥ 1, epochs ≥ 1 and micro_batch_tokens ≥ 0, got {self.minibatches}, "
                f"{self.epochs} and {self.micro_batch_tokens}."
            )

    @property
    def steps_per_batch(self) -> int:
        """Optimiser steps planned for one rollout batch."""
        return self.epochs * self.minibatches


@dataclass(frozen=True, kw_only=True)
class LearnerSettings(StepSettings):
    """Settings of every learner."""

    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    """loss per token and aggregation"""
    lora: Lora = field(default_factory=Lora)
    """low-rank adapters"""
    old_logprobs: Literal["engine", "recompute"] = "engine"
    """denominators of the ratios: log-probs reported by the engine, or recomputed by this model before a first step.
    With another precision or kernels the engine's differ by rounding, which ratios of many tokens (`gspo`, traces) add
    up until the clip acts on it; recomputing costs one pass without gradient"""
    skip_zero_rows: bool = True
    """skip rows without any credit in the passes if neither KL nor entropy bonus acts on them; same gradient, but
    entropy, ratio and mismatch metrics then describe only the other rows"""
    share_prefixes: bool = True
    """compute a prompt, or an inherited prefix, once for all rows of a micro-batch that begin with it; same loss and
    gradient. No effect for a model that does not support packed sequences"""
    mismatch: Mismatch = field(default_factory=Mismatch)
    """limits on the difference between log-probs of engine and learner"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective.importance.used and self.old_logprobs != "recompute":
            raise ValueError(
                "objective.importance compares the learner's old log-probs with the engine's, but old_logprobs is "
                "'engine'; set old_logprobs: recompute, or leave importance at its defaults."
            )

    @property
    def keeps_reference(self) -> bool:
        """Whether the initial model must be kept."""
        return self.objective.kl.coefficient > 0
