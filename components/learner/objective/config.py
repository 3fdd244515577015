"""Settings of the objective, the same for every learner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeline.core.errors import did_you_mean


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
            raise ValueError(f"kl.coefficient is {self.coefficient}; wanted 0 (off) or more.")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Eligibility trace of kind "trace"; formulas in `trace.py`."""

    decay: float = 0.99
    """d = γλ, per token; 0 is the token objective"""
    style: Literal["recent", "both", "weight_floor"] = "recent"
    """how past tokens weigh"""
    floor: float = 0.0
    """smallest weight, of style "weight_floor" only"""
    clip: Literal["traced", "current", "inside", "normalised", "eps_weight"] = "traced"
    """what the clip acts on: "traced" is GRPO-λ, "current" is P-trace (and S-trace)"""
    history: Literal["differentiated", "stop_gradient"] = "differentiated"
    """whether past tokens get a gradient through later ratios"""
    normalise: bool = False
    """divide the loss by the mean gradient scale of the batch, so that learning rates compare with the token
    objective's"""
    min_advantage: float | None = None
    """lower bound of advantages (GRPO-λ uses −0.1); null is none"""

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ValueError(f"trace.decay is {self.decay}; wanted γλ between 0 and 1.")
        if not 0 <= self.floor <= 1 or (self.floor > 0) != (self.style == "weight_floor"):
            raise ValueError(
                f"trace.floor is {self.floor} with style '{self.style}'; wanted above 0 and at most 1 for "
                "'weight_floor', 0 for the others."
            )


@dataclass(frozen=True, kw_only=True)
class EntropyMask:
    """Keeps tokens of high sampling entropy; see `entropy_mask.py`."""

    keep: float = 1.0
    """share of trained tokens kept; 1 switches the mask off, 0.2 is the 80/20 rule"""
    scope: Literal["batch", "sequence", "group"] = "batch"
    """over which tokens the threshold is taken"""
    where: Literal["trace", "trace_and_loss", "loss"] = "trace"
    """S-trace masks the history ("trace"), 80/20 the loss"""
    denominator: Literal["all", "kept"] = "all"
    """whether a masked loss is averaged over all trained tokens, or over the kept ones"""

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"entropy_mask.keep is {self.keep}; wanted a share above 0 and at most 1 (1 keeps all).")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Loss per token and how tokens are averaged."""

    kind: str = "token"
    """a name in `components.learner.objective.KINDS`, or "package.module:NAME" of a `Kind` from outside"""
    clip_low: float = 0.2
    """ratios below 1 − clip_low lose their gradient where the advantage is negative"""
    clip_high: float = 0.2
    """ratios above 1 + clip_high lose their gradient where the advantage is positive"""
    dual_clip: float = 0.0
    """for negative advantages the loss stops growing beyond this ratio (3 is usual); 0 is off"""
    sequence_form: Literal["sequence", "token"] = "sequence"
    """of kinds "sequence" and "gated_sequence": "token" lets each token's own advantage scale its gradient
    (GSPO-token)"""
    trace: Trace = field(default_factory=Trace)
    """settings of kind "trace" alone"""
    entropy_mask: EntropyMask = field(default_factory=EntropyMask)
    """mask of low-entropy tokens, on traces, on the loss of any kind, or both"""
    kl: KL = field(default_factory=KL)
    """penalty against the initial model"""
    entropy_bonus: float = 0.0
    """weight of the current policy's entropy, added to what is maximised [1/nat]"""
    importance_cap: float = 0.0
    """C of the truncated importance weight min(π_old^learner / π^engine, C); 0 is off. Needs recomputed old log-probs"""
    aggregate: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"] = "token_mean"
    """how token terms become one number; see `aggregate.py`"""
    constant_length: int = 0
    """L_max of aggregate "constant" [tokens]"""
    drop_empty: bool = False
    """rows without a trained token leave the count of rows B (DAPO's dynamic sampling with rows masked out)"""

    def __post_init__(self) -> None:
        from components.learner.objective import KINDS

        if self.kind not in KINDS and ":" not in self.kind:
            raise ValueError(f"kind '{self.kind}' is not an objective.{did_you_mean(self.kind, KINDS)}")
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ValueError(
                f"clip_low {self.clip_low}, clip_high {self.clip_high}; wanted 0 ≤ clip_low ≤ 1 and clip_high ≥ 0."
            )
        if self.dual_clip and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip is {self.dual_clip}; wanted 0 (off) or a ratio above 1 + clip_high = {1 + self.clip_high}."
            )
        mask = self.entropy_mask
        if self.kind == "trace" and mask.keep < 1 and (mask.where, mask.denominator) == ("loss", "kept"):
            raise ValueError(
                "entropy_mask.where 'loss' with denominator 'kept' takes masked tokens out of the credit mask, which "
                "also masks the trace; "
                "set where: trace_and_loss, or denominator: all."
            )
        if self.importance_cap < 0:
            raise ValueError(f"importance_cap is {self.importance_cap}; wanted 0 (off) or a positive weight such as 2.")
        if (self.aggregate == "constant") != (self.constant_length > 0):
            raise ValueError(
                f"aggregate '{self.aggregate}' with constant_length {self.constant_length}: 'constant' divides by "
                "B·constant_length and "
                "needs it above 0 (the response budget); the others do not use it, leave it at 0."
            )
