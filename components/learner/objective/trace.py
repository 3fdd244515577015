"""`trace`: eligibility traces over the tokens of a response, log R_t = Σ_{k≤t} w(t,k) l_k, with w falling in t − k.

Weights (d = γλ per token; k, t count from 1 at the first trained token of a trajectory):

    recent         d^{t−k}                    GRPO-λ (2510.00194), second-hand (public ports)
    both           max(d^{t−k}, d^{k−1})      GRPO-λ, second-hand (public ports), reported better than recent

Where the clip acts (`clip`), in terms J_t of token t:

    traced         min(R A, clip(R) A)                            GRPO-λ, second-hand (public ports)
    current        e_t·min(ρ_t A, clip(ρ_t) A),                   P-trace (2605.05965), our reading, see below
                   e_t = exp(Σ_{k<t} w l_k)
    inside         R_t A with every l_k clipped to                our own, as V-trace does it
                   [log(1−ε_lo), log(1+ε_hi)] first

P-trace and S-trace are our reading; the paper's body was not available to us. Ours is one reading of "partial
trust-region preservation": the trust region holds on the current ratio, history enters as a decayed importance weight.
λ = 0 gives `ppo_clip` in every placement but `inside`. S-trace uses m^H_t·l_t instead of l_t in the history, m^H the
mask of high entropy. A·d^{T−t}, decay from the end, is a different method.

Gradient of history. The derivative of Σ_t J_t of `current` with respect to l_k, for ρ_k inside the clip, is

    C_k = e_k ρ_k A_k + Σ_{t>k} w(t,k) J_t,     at ratio 1:  C_k = A_k + Σ_{t>k} w(t,k) A_t.

The clip acts on the first term only, and e_t grows like a product of ratios: a clipped token would still move through
every later J_t. So `current` has gates, which keep what makes the trace and add the trust region:

    C_k = 1[k inside for A_k]·ē_k ρ_k A_k + Σ_{t>k} w(t,k)·1[k inside for A_t]·ē_t clip(ρ_t) A_t,
    k inside for A:  ρ_k ≤ 1 + ε_hi if A > 0,  ρ_k ≥ 1 − ε_lo if A < 0;     ē_t = min(e_t, max_weight).

Each push on token k obeys PPO's rule: none drives a ratio further out of the clip. So a token outside the clip gets no
gradient at all where advantages have one sign in a row. At ratio 1, and wherever all ratios are inside the clip and
e_t ≤ max_weight, both forms have the same gradient. To the token's own term the trace adds at most
max_weight·(1 + ε_hi)·Σ_{t>k} w(t,k)|A_t|. The value is Σ_t ē_t min(ρ_t A, clip(ρ_t) A): gates act on gradients alone.

Distance: tokens inside a response that are not trained on (an inserted text, say) take no part in a trace but count in
t − k, so that they let it decay.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from creditgraph.components.learner.objective.base import LossInputs, Objective
from creditgraph.components.learner.objective.decay import Style, trace_sum
from creditgraph.components.learner.objective.entropy_mask import IN_LOSS, IN_TRACE
from creditgraph.components.learner.objective.meters import AllSum, Meters
from creditgraph.components.learner.objective.ratio import (
    RATIO_METRICS,
    Clip,
    clip_flags,
    clip_meters,
    ratio_meters,
    safe_exp,
    surrogate,
)
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric

SCALE = "trace_scale"
"""column: C_k / A on-policy, the factor by which the trace scales ∇log π(y_k)"""
START = "trace_start"
"""column: place of the row's first trained token, the same number in the whole row"""


class Trace(Objective):
    """Ratio of a token and, with decaying weight, of the tokens before it: GRPO-λ, P-trace, S-trace.

    The formulas are at the top of this file.
    """

    has_trace = True
    metrics = (
        *RATIO_METRICS,
        Metric("gradient_scale", "ratio", "trace objectives: mean factor on the gradient of a trained token"),
        Metric("trace_weight", "ratio", "trace objectives: mean weight Π ratio^w of the tokens before, as bounded"),
        Metric("trace_weight_max", "ratio", "trace objectives: largest of these weights before they are bounded"),
        Metric("trace_weight_capped", "share", "trace objectives: trained tokens whose weight `max_weight` bounded"),
        Metric(
            "clipped_terms",
            "share",
            "trace objectives: trained tokens whose own term clipping stopped; later terms may still move them",
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Clip):
        """Weights of past tokens, and placement of the clip."""

        decay: float = 0.99
        """d = γλ, per token; 0 is `ppo_clip`"""
        style: Style = "recent"
        """weights of past tokens, see the top of `trace.py`"""
        clip: Literal["traced", "current", "inside"] = "traced"
        """what the clip acts on: "traced" is GRPO-λ, "current" is P-trace (and S-trace)"""
        max_weight: float = 2.0
        """largest weight e_t of the tokens before, with clip "current" """
        min_advantage: float | None = None
        """lower bound of advantages (GRPO-λ uses −0.1); null is none"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if not 0 <= self.decay <= 1:
                raise ValueError(f"expected decay = γλ with 0 ≤ decay ≤ 1, got {self.decay}.")
            if not self.max_weight >= 1:
                raise ValueError(f"expected max_weight ≥ 1, the weight on-policy, got {self.max_weight}.")

    config: Config

    def prepare(self, inputs: LossInputs, all_sum: AllSum) -> LossInputs:
        """Adds the columns above, SCALE from the gradient at log ratios of 0."""
        mask = inputs.mask
        if self.config.style == "both":
            inputs = inputs.with_columns(**{START: mask.spread(_first_trained(mask))})
        with torch.enable_grad():
            leaf = torch.zeros_like(inputs.old_logprobs.values).requires_grad_()
            log_ratio = mask.with_values(torch.where(mask.values, leaf, 0.0))
            if self.config.clip == "current":
                # The entropy mask does not act on the current ratio.
                total = self._sum(log_ratio, inputs, past_only=True) + log_ratio.values
            else:
                total = self._sum(log_ratio, inputs)
            (scale,) = torch.autograd.grad(torch.where(mask.values, total, 0.0).sum(), leaf)
        scale = torch.where(mask.values, scale, 0.0)
        return inputs.with_columns(**{SCALE: mask.with_values(scale)})

    def terms(self, inputs: LossInputs, meters: Meters) -> Tensor:
        """Loss per token."""
        mask = inputs.mask.values
        advantage = torch.where(mask, inputs.advantage.values, 0.0)
        if self.config.min_advantage is not None:
            advantage = advantage.clamp(min=self.config.min_advantage)
        # The column is 0 where masked.
        meters.add("gradient_scale", inputs.columns[SCALE].values.sum(), torch.count_nonzero(mask))
        # where, not a product: a masked token may hold inf or NaN.
        log_ratio = torch.where(mask, inputs.logprobs.values - inputs.old_logprobs.values, 0.0)
        with torch.enable_grad():  # the metrics of clipping are read from the gradient
            log_ratio = log_ratio if log_ratio.requires_grad else log_ratio.requires_grad_()
            loss, flags = self._placed(inputs.logprobs.with_values(log_ratio), advantage, inputs, meters)
            stopped = _without_gradient(loss, log_ratio, inputs)
        clip_meters({name: flag & stopped for name, flag in flags.items()}, mask, meters)
        meters.share("clipped_terms", torch.stack(list(flags.values())).any(0), mask)
        return loss

    def _placed(
        self, log_ratio: Jagged, advantage: Tensor, inputs: LossInputs, meters: Meters
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss with its clip where `clip` says, and the terms that clipping stopped; log ratios are 0 if masked."""
        config = self.config
        mask = inputs.mask.values
        if config.clip == "inside":
            low = math.log(max(1 - config.clip_low, 1e-8))
            high = math.log(1 + config.clip_high)
            clipped = log_ratio.with_values(log_ratio.values.clamp(low, high))
            ratio = safe_exp(self._sum(clipped, inputs), mask, meters)
            ratio_meters(ratio, mask, meters)
            flags = {"clip_fraction_low": log_ratio.values < low, "clip_fraction_high": log_ratio.values > high}
            return -ratio * advantage, flags
        traced = self._sum(log_ratio, inputs) if config.clip == "traced" else log_ratio.values
        ratio = safe_exp(traced, mask, meters)
        ratio_meters(ratio, mask, meters)
        flags = clip_flags(ratio, advantage, config)
        loss = surrogate(ratio, advantage, config)
        if config.clip == "current":
            loss = self._weighted(loss, log_ratio, ratio.detach(), advantage, inputs, meters)
        return loss, flags

    def _weighted(
        self, loss: Tensor, log_ratio: Jagged, ratio: Tensor, advantage: Tensor, inputs: LossInputs, meters: Meters
    ) -> Tensor:
        """The clipped loss of each token times the weight ē_t of the tokens before it, and the gated terms."""
        config = self.config
        mask = inputs.mask.values
        past = self._sum(log_ratio.with_values(log_ratio.values.detach()), inputs, past_only=True)
        weight = safe_exp(past, mask, meters)
        meters.maximum("trace_weight_max", weight, mask)
        meters.share("trace_weight_capped", weight > config.max_weight, mask)
        weight = weight.clamp(max=config.max_weight)
        meters.mean("trace_weight", weight, mask)
        push = weight * ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage
        rising = self._push(log_ratio, ratio <= 1 + config.clip_high, push.clamp(min=0), inputs)
        falling = self._push(log_ratio, ratio >= 1 - config.clip_low, push.clamp(max=0), inputs)
        return loss * weight - rising - falling

    def _push(self, log_ratio: Jagged, inside: Tensor, push: Tensor, inputs: LossInputs) -> Tensor:
        """Terms of value 0 whose gradient at a token k inside is Σ_{t>k} w(t,k) push_t, and 0 at the others."""
        values = log_ratio.values
        gated = log_ratio.with_values(torch.where(inside, values, values.detach()))
        past = self._sum(gated, inputs, past_only=True)
        return push * (past - past.detach())

    def _sum(self, log_ratio: Jagged, inputs: LossInputs, past_only: bool = False) -> Tensor:
        """Σ_{k≤t} w(t,k) l_k, or Σ_{k<t}, of log ratios that are zero outside the mask; linear in them."""
        x = log_ratio
        if (kept := inputs.columns.get(IN_TRACE)) is not None:
            # A product, not where: on a CPU, branches on scattered tokens cost more than the rest of the trace.
            x = x.with_values(x.values * kept.values)
        column = inputs.columns.get(START)
        start = None
        if column is not None and len(x.values):
            begin = x.offsets[:-1].clamp(max=len(x.values) - 1)
            start = torch.where(x.lengths > 0, column.values[begin], 0)
        return trace_sum(x, self.config, start, past_only).values


def _without_gradient(loss: Tensor, log_ratio: Tensor, inputs: LossInputs) -> Tensor:
    """bool [total]: tokens whose log-prob no term of the loss moves, though at ratio 1 some would."""
    counted = inputs.columns.get(IN_LOSS, inputs.mask).values & inputs.mask.values
    (moves,) = torch.autograd.grad(torch.where(counted, loss, 0.0).sum(), log_ratio, retain_graph=True)
    return (moves == 0) & (inputs.columns[SCALE].values > 0)


def _first_trained(mask: Jagged) -> Tensor:
    """int64 [rows]: index of the first trained token, 0 in a row without one."""
    later = mask.positions.masked_fill(~mask.values, 1 << 40).double()
    first = torch.segment_reduce(later, "min", offsets=mask.offsets, initial=float(1 << 40))
    return torch.where(first >= 1 << 40, 0, first.long())
