"""`value.implicit`: process rewards of a language model that learns outcomes online (PRIME)."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from creditgraph.components.learner.hf.model import LearnerModel
from creditgraph.components.learner.hf.settings import HFSettings
from creditgraph.components.learner.hf.sharding import Sharding
from creditgraph.components.learner.hf.side_model import SIDE_METRICS, SideModel, SideSettings
from creditgraph.components.learner.objective import LossInputs, Meters, Objective, ObjectiveSettings
from creditgraph.components.learner.step import RolloutTraining
from creditgraph.components.rollouts.segments import check_segments, segment_of_token
from creditgraph.pipeline.core.component import same_rows
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Credit, Rewards, Segments, SegmentValues, Trajectories, check_aligned


class OutcomeEntropy(Objective):
    """−y log σ(s) − (1 − y) log σ(−s) of each response, s = β Σ_t (log π_φ − log π_ref), shared equally by its tokens.

    π_φ is `logprobs`, π_ref `old_logprobs`, and y, the same on all tokens of a response, the `advantage`.
    """

    needs_credit: ClassVar[bool] = False  # an outcome of 0 is a target too

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Scale of the rewards."""

        beta: float = 0.05
        """β"""

    config: Config

    def terms(self, inputs: LossInputs, meters: Meters) -> Tensor:
        """Loss per token; its sum over a response is the cross entropy."""
        mask = inputs.mask
        change = torch.where(mask.values, inputs.logprobs.values - inputs.old_logprobs.values, 0.0)
        score = self.config.beta * mask.with_values(change).sum()
        count = mask.sum().clamp(min=1)
        outcome = mask.with_values(torch.where(mask.values, inputs.advantage.values, 0.0)).sum() / count
        loss = F.binary_cross_entropy_with_logits(score, outcome, reduction="none") / count
        return mask.spread(loss).values


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """At each boundary the sum of the process rewards before it: 0 at the start of a response."""

    values: Annotated[SegmentValues, same_rows("trajectories")]


class ImplicitReward(SideModel):
    """Rewards each token with r_t = β (log π_φ(y_t) − log π_ref(y_t)), φ being trained on outcomes alone.

    φ begins as the policy's initial model, which stays the reference, and learns by cross entropy to tell right
    responses from wrong ones by Σ r. The rewards are those of φ before this iteration's steps, so that no response is
    judged by a model that has learned its outcome. Inherited tokens have r = 0 and are not trained on; rows with an
    invalid reward are not either.

    Source: PRIME (2502.01456), second-hand (its release in verl's recipes): β = .05 and the cross entropy; its default
    updates φ before it judges, which is left out. IPVRM (2604.13197), which learns values in the same way, is known to
    us by name.
    """

    paper = "2502.01456"
    metrics = (
        Metric("reward_mean", "reward", "Σ r of a response, mean"),
        Metric("accuracy", "share", "responses whose Σ r has the sign of their outcome, before the update"),
        Metric("nonfinite", "rows", "rows with a log-prob that is not finite; they are not trained on"),
        Metric("loss", "nats", "cross entropy of a response, mean over optimiser steps"),
        *SIDE_METRICS,
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SideSettings):
        """Scale of the rewards, and optimiser."""

        beta: float = 0.05
        """β"""

        def loss(self) -> ObjectiveSettings:
            """The cross entropy, mean over responses."""
            use = f"{__name__}:OutcomeEntropy"
            return ObjectiveSettings(use=use, config={"beta": self.beta}, aggregate="seq_mean_token_sum")

    config: Config

    def wrapped(self, model: Any, settings: HFSettings, shards: tuple[Sharding, str] | None) -> LearnerModel:
        """With a frozen copy of its initial weights."""
        return LearnerModel(
            model,
            recompute=settings.recompute,
            keep_reference=True,
            slow_attention=settings.compute.slow_attention,
            shards=shards,
        )

    def run(
        self,
        *,
        trajectories: Trajectories,
        segments: Annotated[Segments, same_rows("trajectories")],
        rewards: Annotated[Rewards, same_rows("trajectories")],
    ) -> Outputs:
        """Gives the rewards, then trains; all ranks call it, each with the rows of its replica."""
        check_aligned(trajectories, rewards)
        check_segments(trajectories, segments)
        self.context.slots.begin()
        settings, tokens = self.config.training(), trajectories.response_tokens
        mask = tokens.positions >= trajectories.inherited[tokens.row_ids]
        outcome = tokens.spread(rewards.correct).values.float()
        targets = Credit(uid=trajectories.uid, advantage=tokens.with_values(outcome), mask=tokens.with_values(mask))
        judging = RolloutTraining(settings, self.context, self.backend, trajectories, targets, self.version)
        with judging.clock("rewards"):
            own, reference = judging.score(reference=False), judging.score(reference=True)
        reward = torch.where(mask, self.config.beta * (own.values - reference.values), 0.0)
        finite = tokens.with_values(~torch.isfinite(reward)).sum() == 0
        kept = (finite & rewards.valid)[tokens.row_ids]
        targets = targets.replace(mask=tokens.with_values(mask & kept))
        rows = trajectories.replace(
            engine_logprobs=reference,
            policy_version=torch.full_like(trajectories.policy_version, -1),
            token_versions=None,
            routed_experts=None,
        )
        fit = RolloutTraining(settings, self.context, self.backend, rows, targets, self.version)
        result = fit.run()
        self.version += 1
        self.trained_tokens += result.tokens
        total = tokens.with_values(reward).sum()
        right = (total > 0) == rewards.correct
        counted = finite & rewards.valid
        sums = [counted.sum(), total[counted].sum(), (right & counted).sum(), (~finite).sum()]
        count, mean, share, lost = self.context.all_sum(torch.stack([s.double() for s in sums])).tolist()
        names = {"steps": "updates", "skipped_nonfinite": "skipped_updates"}
        found = {names.get(n, n): result.metrics[n] for n in (*names, "loss", "grad_norm", "lr") if n in result.metrics}
        found |= {f"seconds_{phase}": seconds for phase, seconds in (judging.seconds | fit.seconds).items()}
        self.context.log(reward_mean=mean / max(count, 1), accuracy=share / max(count, 1), nonfinite=lost, **found)
        return Outputs(
            values=SegmentValues(uid=trajectories.uid, values=sums_before(tokens.with_values(reward), segments))
        )


def sums_before(reward: Jagged, segments: Segments) -> Jagged:
    """At each boundary, the start first, the sum of the rewards [tokens] before it; float32."""
    ends = segments.ends
    place = segment_of_token(ends, reward)
    each = torch.zeros(len(ends.values), dtype=torch.float64).index_add_(0, place, reward.values.double())
    totals = ends.with_values(each)
    begin = Jagged.from_lengths(torch.zeros(len(ends), dtype=torch.float64), torch.ones_like(ends.lengths))
    values = begin.join(totals)
    padded = values.to_padded(0.0).cumsum(1)
    return values.with_values(padded[values.row_ids, values.positions].float())
