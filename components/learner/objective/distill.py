"""`distill`: the reverse KL divergence to a teacher, on sampled tokens or over the teacher's most likely ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from creditgraph.components.learner.objective.base import CANDIDATE_LOGPROB, LossInputs, Objective, numbered
from creditgraph.components.learner.objective.meters import Meters
from creditgraph.components.learner.objective.ratio import safe_exp
from creditgraph.pipeline.core.metric import Metric

TEACHER_LOGPROB = "teacher_logprob_"
"""columns of the credit, numbered like the candidates: their log-probs under the teacher"""
LEAST_REST = 1e-6  # of the probability outside the candidates; float32 sums are about 1e-7 off


def top_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Σ_v π_v (log π_v − log q_v) over k candidates and all other tokens as one, float32 [n].

    It is at most the whole reverse KL, and equal to it with k the vocabulary.

    Args:
        student, teacher: log π and log q of the candidates, [n, k].
    """
    inside = (student.exp() * (student - teacher)).sum(1)
    rest, teacher_rest = (1 - x.exp().sum(1) for x in (student, teacher))
    rest, teacher_rest = rest.clamp(min=LEAST_REST), teacher_rest.clamp(min=LEAST_REST)
    return inside + rest * (rest.log() - teacher_rest.log())


class Distill(Objective):
    """KL(π_θ ‖ q) at every token of the policy's own responses, q being a teacher.

    - Where the credit has candidates (columns "candidate_i" and "teacher_logprob_i"), the divergence over them, with
      the gradient of every π_v. The rest of the vocabulary counts as one more token (ours).
    - Elsewhere −sg[ρ_t (A_t − log ρ_t)] log π_θ(y_t), with A_t = log q(y_t) − log π_old(y_t) as the credit: the policy
      gradient of −KL, whose expectation over y_t is the exact one. Later steps on the same batch subtract log ρ_t,
      ρ_t = π_θ/π_old, so that the gap is that of the present policy, and are weighed by ρ_t, at most `max_ratio`: below
      it the expectation stays exact. With a credit that adds an outcome to A_t, so does the loss.

    The effect of a token on the divergence at later ones is left out. Source: on-policy distillation (2306.13649, and
    Thinking Machines' notes of 2025 for the form on sampled tokens, which neither subtracts log ρ_t nor bounds ρ_t),
    second-hand. SDPO (2601.20802) bounds ρ_t by 2, and so do its candidates' terms in TRL.
    """

    metrics = (
        Metric("ratio_overflow", "share", "tokens whose log ratio was clamped to keep exp finite"),
        Metric("teacher_kl", "nats", "reverse KL to the teacher per trained token, estimated by what is trained on"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Weights of later steps on the same batch."""

        max_ratio: float = 3.0
        """largest ρ"""
        weigh_candidates: bool = False
        """weigh the divergence over candidates by ρ too, as TRL does; its mean is the same below the bound"""

        def __post_init__(self) -> None:
            if self.max_ratio < 1:
                raise ValueError(f"expected max_ratio ≥ 1, got {self.max_ratio}.")

    config: Config
    needs_credit = False  # where the gap of the sampled token is 0, those of others need not be

    def terms(self, inputs: LossInputs, meters: Meters) -> Tensor:
        """Loss per token."""
        mask = inputs.mask.values
        log_ratio = (inputs.logprobs.values - inputs.old_logprobs.values).detach()
        ratio = safe_exp(log_ratio, mask, meters).clamp(max=self.config.max_ratio)
        gap = inputs.advantage.values - log_ratio
        teacher = numbered(inputs.columns, TEACHER_LOGPROB)
        if teacher is None:
            meters.mean("teacher_kl", -gap, mask)
            return -ratio * gap * inputs.logprobs.values
        student = numbered(inputs.columns, CANDIDATE_LOGPROB)
        # A part without rows has no log-probs of candidates.
        loss = top_divergence(torch.zeros_like(teacher) if student is None else student, teacher)
        meters.mean("teacher_kl", loss.detach(), mask)
        return ratio * loss if self.config.weigh_candidates else loss
