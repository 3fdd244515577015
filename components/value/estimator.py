"""Base of estimators that score references with the policy, and how probabilities of several references are pooled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from creditgraph.components.models.load import context_length
from creditgraph.components.value.bank import AnswerSettings, References, references_of
from creditgraph.components.value.boundaries import COST_METRICS, Boundaries, Outputs, boundaries_of
from creditgraph.pipeline.core.component import Component, Context, Count, same_rows
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Segments, SegmentValues, Trajectories


def log_probability(logprobs: Jagged, scored: Jagged, length_normalise: bool) -> Tensor:
    """Log-probability of each reference, or its mean per token; float64 [B], nats.

    Args:
        logprobs: nats; its rows end with the tokens of the reference and may begin with others.
        scored: bool, tokens of the references [B rows] that count.
        length_normalise: mean instead of sum.
    """
    own = logprobs.to(torch.float64).slice_rows(logprobs.lengths - scored.lengths, logprobs.lengths)
    total = own.with_values(torch.where(scored.values, own.values, 0.0)).sum()
    return total / scored.sum().clamp(min=1) if length_normalise else total


def log_pooled(
    logprob: Tensor, reward: Tensor, place: Tensor, num_places: int, mean: bool, draws: Tensor | None = None
) -> Tensor:
    """log v̂ of each place, float64 [P], −inf for 0: v̂ = Σ p ζ over its references, or their mean.

    Args:
        logprob, reward: float64 [B], log p, or log p/q, and ζ of each reference; ζ below 0 counts as 0.
        place: int64 [B], the place each belongs to; a place without references gets −inf.
        num_places: P.
        mean: mean instead of sum, which is for references that are disjoint events.
        draws: int64 [P], number that the mean divides by, where references with ζ = 0 were left out.
    """
    # The largest p of each place is divided out, so that no product underflows.
    top = torch.full((num_places,), -torch.inf, dtype=torch.float64).scatter_reduce(0, place, logprob, "amax")
    top = torch.where(torch.isinf(top), 0.0, top)
    weighted = torch.exp(logprob - top[place]) * reward.clamp(min=0.0)
    total = torch.zeros(num_places, dtype=torch.float64).index_add_(0, place, weighted)
    if mean:
        count = torch.bincount(place, minlength=num_places) if draws is None else draws
        total = total / count.clamp(min=1)
    return top + torch.log(total)


class AnswerEstimator(Component):
    """Base of estimators that score reference answers with the policy; subclasses define `estimate` or `run`."""

    paper = "2606.06475"
    metrics: ClassVar[tuple[Metric, ...]] = (
        *COST_METRICS,
        Metric(
            "empty_bank_share",
            "share",
            "trajectories without a reference answer to score; their values are 0",
            alarm="no trajectory had a reference answer to score, so all values were 0. Take data with answers or "
            "solutions, or problems that some responses solve.",
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(AnswerSettings):
        """The bank."""

    config: AnswerSettings

    @classmethod
    def references_of(cls, config: Any) -> frozenset[str] | None:
        """Answers of a few tokens; any where it scores the rest of a solution instead (value: continuation)."""
        return None if getattr(config, "value", "") == "continuation" else frozenset({"value", "choice", "boolean"})

    @classmethod
    def shown_responses(cls, config: Any) -> int:
        """The trajectory; a solution, or the rest of one, is scored after it."""
        return 1 if getattr(config, "value", "immediate") == "immediate" else 2

    def setup(self, context: Context) -> None:
        """Reads the model's context length."""
        super().setup(context)
        self.room = context_length(context.model)

    def run(
        self,
        *,
        prompts: Prompts,
        trajectories: Trajectories,
        segments: Annotated[Segments, same_rows("trajectories")],
        policy: Policy,
        rewards: Annotated[Rewards, same_rows("trajectories")] | None = None,
    ) -> Outputs:
        """Estimates the values at all boundaries from the references of each trajectory."""
        bounds = boundaries_of(trajectories, segments, rewards)
        references = references_of(prompts, trajectories, rewards, self.config, solutions=False)
        values, scored_tokens = self.estimate(policy, trajectories, bounds, references)
        self.log_cost(scored_tokens, torch.tensor([not row for row in references], dtype=torch.bool))
        return Outputs(values=SegmentValues(uid=trajectories.uid, values=values))

    def estimate(
        self, policy: Policy, trajectories: Trajectories, bounds: Boundaries, references: References
    ) -> tuple[Jagged, int]:
        """Values at the boundaries, Jagged float32, and the number of tokens that went through the model."""
        raise NotImplementedError

    def log_cost(self, scored_tokens: int, empty: Tensor) -> None:
        """Logs the tokens that went through the model, and the share of trajectories, bool [N], without a reference."""
        self.context.log(
            scored_tokens=Count(scored_tokens),
            sampled_tokens=Count(0),
            empty_bank_share=float(empty.sum()) / max(len(empty), 1),
        )
