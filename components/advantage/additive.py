"""Outcome advantage plus value gained in each segment (GRPO-VPS)."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch

from creditgraph.components.advantage.explanations import decimal, lines_of_changed_credit, minus, signed
from creditgraph.components.advantage.group import Outputs
from creditgraph.components.rollouts.segments import check_segments, increments, segment_of_token
from creditgraph.pipeline.core.component import Component, same_rows
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Credit, Rewards, Segments, SegmentValues, Trajectories, check_aligned


class AdditiveAdvantage(Component):
    """Adds to the credit of each token what its segment k gained: A_{i,t} = A_i + α (v(s_{k+1}) − v(s_k)).

    The paper's A_i is r_i − mean: wire `advantage.group` with `normalize: mean`. α = 0 leaves that credit unchanged. An
    invalid reward gives zero credit to its whole trajectory.
    """

    paper = "2604.20659"
    metrics = (Metric("gain_size", "reward", "mean absolute gain of a segment"),)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Weight of the gains."""

        alpha: float = 1.2
        """α, weight of a segment's gain in value (a probability) relative to the outcome advantage"""

    config: Config

    def run(
        self,
        *,
        trajectories: Trajectories,
        segments: Annotated[Segments, same_rows("trajectories")],
        values: Annotated[SegmentValues, same_rows("trajectories")],
        rewards: Annotated[Rewards, same_rows("trajectories")],
        credit: Annotated[Credit, same_rows("trajectories")],
    ) -> Outputs:
        """Adds each segment's gain to the credit of its tokens."""
        check_aligned(trajectories, rewards)
        check_aligned(trajectories, credit)
        check_segments(trajectories, segments, values)
        tokens = trajectories.response_tokens
        gain = increments(values.values).values
        added = self.config.alpha * gain[segment_of_token(segments.ends, tokens)].float()
        # The gain of a trajectory without a verdict is no evidence either.
        total = torch.where(rewards.valid[tokens.row_ids], credit.advantage.values + added, 0.0)
        self.context.log(gain_size=float(gain.abs().mean()) if len(gain) else 0.0)
        return Outputs(credit=credit.replace(advantage=tokens.with_values(total)))

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The gain of each segment, in numbers, beside the credit that arrived."""

        def line(before: float, after: float, arrived: float, result: float) -> str:
            return f"{decimal(arrived)} + {decimal(self.config.alpha)}·({minus(after, before)}) = {signed(result)}"

        return lines_of_changed_credit("A + α (v(after) − v(before))", inputs, outputs["credit"], line)
