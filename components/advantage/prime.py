"""Process rewards and outcome, each against the rest of the group, and summed to the end (PRIME)."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from creditgraph.components.advantage.explanations import INVALID, decimal, signed
from creditgraph.components.advantage.gae import whitened
from creditgraph.components.advantage.group import Outputs, training_mask
from creditgraph.components.rollouts.segments import check_segments, increments, segment_of_token
from creditgraph.components.rollouts.turn_rows import returns_to_go
from creditgraph.pipeline.core.component import Component, Count, same_rows
from creditgraph.pipeline.core.jagged import Jagged, takes_lists
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Credit, Rewards, Segments, SegmentValues, Trajectories, check_aligned


@takes_lists
def leave_one_out(reward: Jagged, group: Tensor, counts: Tensor) -> Jagged:
    """n/(n − 1) r − Σ_j m_j/(n − 1) for each reward, m_j the mean reward of row j and n the rows of the group; float64.

    With one reward per row that is its difference from the mean of the others. 0 in rows that do not count, and in
    groups of one.

    Args:
        reward: one row per response.
        group: [N].
        counts: bool [N].
    """
    value = reward.to(torch.float64)
    mean = torch.where(counts, value.sum() / reward.lengths.clamp(min=1), 0.0)
    place = torch.unique(group, return_inverse=True)[1]
    size, total = (
        torch.zeros(len(place), dtype=torch.float64).index_add_(0, place, x.double()) for x in (counts, mean)
    )
    others = size[place] - 1
    scale = torch.where(counts & (others > 0), 1 / others.clamp(min=1), 0.0)[value.row_ids]
    return value.with_values(scale * ((others + 1)[value.row_ids] * value.values - total[place][value.row_ids]))


class Prime(Component):
    """A_k = LOO(outcome) + w Σ_{j ≥ k} LOO(r_j), whitened over the batch; r_j is what the values gain in segment j.

    LOO is `leave_one_out`: the outcome is compared with the mean of the group's others, a process reward with the mean
    of their mean process rewards, both as the release has them. Source: PRIME (2502.01456), second-hand (its release in
    verl's recipes), which weighs both alike (5 and 5); segments of one token. A row with an invalid reward, or with a
    value that is not finite, gets zero credit.
    """

    paper = "2502.01456"
    metrics = (
        Metric("process_size", "reward", "mean |Σ_{j ≥ k} LOO(r_j)| of a segment"),
        Metric("unvalued", "rows", "rows with a value that is not finite, which get no credit"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The share of process rewards."""

        weight: float = 1.0
        """w; 0 is RLOO, whitened"""

    config: Config

    def run(
        self,
        *,
        trajectories: Trajectories,
        segments: Annotated[Segments, same_rows("trajectories")],
        values: Annotated[SegmentValues, same_rows("trajectories")],
        rewards: Annotated[Rewards, same_rows("trajectories")],
    ) -> Outputs:
        """Spreads each segment's advantage over its tokens."""
        check_aligned(trajectories, rewards)
        check_segments(trajectories, segments, values)
        outcome, process, counts = self._parts(trajectories, values, rewards)
        tokens = trajectories.response_tokens
        per_segment = outcome[process.row_ids] + self.config.weight * process.values
        mask = training_mask(tokens, trajectories.inherited)
        kept = mask.with_values(mask.values & counts[tokens.row_ids])
        spread = torch.where(kept.values, per_segment[segment_of_token(segments.ends, tokens)], 0.0)
        advantage = whitened(tokens.with_values(spread), kept, self.context.all_sum)
        size = process.values[counts[process.row_ids]].abs()
        self.context.log(process_size=float(size.mean()) if len(size) else 0.0)
        return Outputs(credit=Credit(uid=trajectories.uid, advantage=advantage, mask=mask))

    def _parts(
        self, trajectories: Trajectories, values: SegmentValues, rewards: Rewards
    ) -> tuple[Tensor, Jagged, Tensor]:
        """LOO of the outcome [N], the sums of that of process rewards per segment, and which rows count."""
        finite = values.values.with_values(~torch.isfinite(values.values.values)).sum() == 0
        for uid in trajectories.uid[~finite].tolist():
            self.context.reject({"uid": uid}, f"{values.origin or 'values'}: a value of the row is not finite")
        self.context.log(unvalued=Count((~finite).sum()))
        counts = rewards.valid & finite
        gains = increments(values.values)
        gains = gains.with_values(torch.where(counts[gains.row_ids], gains.values.double(), 0.0))
        single = Jagged.from_lengths(rewards.value.double(), torch.ones_like(gains.lengths))
        outcome = leave_one_out(single, trajectories.group, counts)
        return outcome.values, returns_to_go(leave_one_out(gains, trajectories.group, counts)), counts

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The outcome's part, and the range of the process rewards' part."""
        outcome, process, counts = self._parts(inputs["trajectories"], inputs["values"], inputs["rewards"])
        lines = []
        for own, sums, ok in zip(outcome.tolist(), process.rows(), counts.tolist(), strict=True):
            span = f"from {signed(float(sums.min()))} to {signed(float(sums.max()))}" if len(sums) else "0"
            said = f"outcome {signed(own)} + {decimal(self.config.weight)}·(process {span}), whitened over the batch"
            lines.append(said if ok else INVALID)
        return lines
