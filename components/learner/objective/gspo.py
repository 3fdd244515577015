"""`gspo` and `gspo_gated`: one ratio per trajectory, at each of its trained tokens."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from creditgraph.components.learner.objective.base import LossInputs, Objective
from creditgraph.components.learner.objective.meters import Meters
from creditgraph.components.learner.objective.ratio import RATIO_METRICS, Clip, clipped_loss, mean_log_ratio, safe_exp

GATE = "gate"


class GSPO(Objective):
    """−min(s A, clip(s) A) with the ratio of the sequence, s = exp(mean_t l_t), l_t = log π_θ(y_t) − log π_old(y_t).

    The mean is over trained tokens. Source: GSPO (2507.18071), clip 3e-4/4e-4, four mini-batches, no KL.
    """

    metrics = RATIO_METRICS

    @dataclass(frozen=True, kw_only=True)
    class Config(Clip):
        """Bounds of the ratio, and whose advantage scales a token's gradient."""

        clip_low: float = 3e-4
        """ratios below 1 − clip_low lose their gradient where the advantage is negative"""
        clip_high: float = 4e-4
        """ratios above 1 + clip_high lose their gradient where the advantage is positive"""
        form: Literal["sequence", "token"] = "sequence"
        """token: GSPO-token, s_t = sg[s]·π_θ(y_t)/sg[π_θ(y_t)], the same value with a gradient that each token's own
        advantage scales"""

    config: Config

    def gate(self, inputs: LossInputs) -> Tensor:
        """bool [total]: the tokens over which the log ratio is averaged."""
        return inputs.mask.values

    def terms(self, inputs: LossInputs, meters: Meters) -> Tensor:
        """Loss per token; equal over a row if its advantage is."""
        log_ratio = inputs.logprobs.values - inputs.old_logprobs.values
        mean = mean_log_ratio(inputs.logprobs.with_values(log_ratio), self.gate(inputs))
        if self.config.form == "token":
            mean = mean.detach() + log_ratio - log_ratio.detach()
        ratio = safe_exp(mean, inputs.mask.values, meters)
        return clipped_loss(ratio, inputs.advantage.values, inputs.mask.values, self.config, meters)


class GatedGSPO(GSPO):
    """`gspo` with the mean over gated tokens only, s = exp(Σ g l / Σ g).

    g is column "gate" of the credit, times the mask. Without the column this is `gspo`. A row whose gate is empty has
    ratio 1 and no gradient. Source: 2605.05226, used with IBPO (2605.16302).
    """

    def gate(self, inputs: LossInputs) -> Tensor:
        """Trained tokens where column "gate" is not 0."""
        gate = inputs.columns.get(GATE)
        return inputs.mask.values if gate is None else inputs.mask.values & (gate.values != 0)
