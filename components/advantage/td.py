"""Segment advantages from value differences (VinePPO)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from components.advantage.explanations import INVALID, decimal, lines_of_segments, minus, signed
from components.advantage.group import Outputs, training_mask
from components.rollouts.segments import check_segments, increments, segment_of_token, with_final
from pipeline.core.component import Component, identity_sum, same_rows
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Credit, Rewards, Segments, SegmentValues, Trajectories, check_aligned


def td_advantage(values: Jagged, reward: Tensor, lam: float = 0.0) -> Jagged:
    """Advantage of each segment: A_k = δ_k + λ A_{k+1}, δ_k = v(s_{k+1}) − v(s_k), the last v being the `reward` [N].

    λ = 0: A_k = v(s_{k+1}) − v(s_k), which telescopes to r − v(s_0) (VinePPO, 2410.01679). λ = 1: A_k = r − v(s_k). The
    discount γ is 1.

    Args:
        values: float, segments + 1 entries per row; the last one is not used.
        reward: float [N].
        lam: λ in [0, 1].
    """
    delta = increments(with_final(values, reward))
    if lam == 0 or not len(delta.values):
        return delta
    padded = delta.to_padded(0.0).double()
    # From the last segment backwards, for all responses at once; padding after the end is 0.
    for k in range(padded.shape[1] - 2, -1, -1):
        padded[:, k] += lam * padded[:, k + 1]
    return delta.with_values(padded[delta.row_ids, delta.positions].to(delta.values.dtype))


def whitened(advantage: Jagged, mask: Jagged, all_sum: Callable[[Tensor], Tensor] = identity_sum) -> Jagged:
    """(A − mean) / (std + 1e-8), float32, over the trained tokens of the whole batch; 0 elsewhere. The std is unbiased.

    `all_sum` adds up [count, Σ A, Σ (A − mean)²] over replicas.
    """
    kept = torch.where(mask.values, advantage.values.double(), 0.0)
    # Two passes: the variance of E[A²] − E[A]² would lose its digits.
    count, total = all_sum(torch.stack([mask.values.sum().double(), kept.sum()]))
    centred = torch.where(mask.values, kept - total / count.clamp(min=1), 0.0)
    variance = all_sum(centred.square().sum()) / (count - 1).clamp(min=1)
    return advantage.with_values((centred / (variance.sqrt() + 1e-8)).float())


class TDAdvantage(Component):
    """Credits each segment k with the difference of values A_k = v(s_{k+1}) − v(s_k), the last value being the reward.

    No group is needed. An invalid reward gives zero credit to its whole trajectory.
    """

    paper = "2410.01679"
    metrics = (
        Metric("advantage_size", "reward", "mean absolute advantage of a segment"),
        Metric("zero_share", "share", "segments whose advantage is 0"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Trace and mask."""

        lam: float = 0.0
        """λ of generalised advantage estimation over segments: 0 is VinePPO, 1 is r − v(s_k)"""
        mask_prefix: bool = True
        """exclude inherited prefix tokens from the loss"""
        whiten: bool = False
        """centre and scale advantages over the trained tokens of the batch, as the released VinePPO does"""

        def __post_init__(self) -> None:
            if not 0 <= self.lam <= 1:
                raise ValueError(f"expected 0 ≤ lam ≤ 1, got {self.lam}.")

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
        per_segment = td_advantage(values.values, rewards.value, self.config.lam)
        tokens = trajectories.response_tokens
        valid = rewards.valid[tokens.row_ids]
        per_token = per_segment.values[segment_of_token(segments.ends, tokens)].float()
        advantage = tokens.with_values(torch.where(valid, per_token, 0.0))
        mask = training_mask(tokens, trajectories.inherited, self.config.mask_prefix)
        if self.config.whiten:
            advantage = whitened(advantage, mask.with_values(mask.values & valid), self.context.all_sum)
        size = per_segment.values.abs()
        self.context.log(
            advantage_size=float(size.mean()) if len(size) else 0.0,
            zero_share=float((size < 1e-8).float().mean()) if len(size) else 0.0,
        )
        return Outputs(credit=Credit(uid=trajectories.uid, advantage=advantage, mask=mask))

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The difference of values of each segment, in numbers."""
        rewards: Rewards = inputs["rewards"]
        credit: Credit = outputs["credit"]
        lam = self.config.lam
        values = with_final(inputs["values"].values, rewards.value)
        advantage = td_advantage(values, rewards.value, lam)
        row = advantage.row_ids.tolist()
        number = advantage.positions.tolist()
        first = values.offsets.tolist()
        last = (advantage.lengths - 1).tolist()
        ends = (inputs["segments"].ends.values + credit.advantage.offsets[:-1][row]).tolist()

        def line(place: int) -> str:
            at = first[row[place]] + number[place]
            text = minus(float(values.values[at + 1]), float(values.values[at]))
            if lam and number[place] < last[row[place]]:
                text += f" + {decimal(lam)}·({signed(float(advantage.values[place + 1]))})"
            text += f" = {signed(float(advantage.values[place]))}"
            # Whitening has one mean and one scale for the batch, so its result is read off a token of the segment.
            scaled = signed(float(credit.advantage.values[ends[place] - 1]))
            return text + (f", centred and scaled over the batch {scaled}" if self.config.whiten else "")

        head = "A = v(after) − v(before)" + (f" + {decimal(lam)}·A(next)" if lam else "") + ", the last v is the reward"
        texts = lines_of_segments(advantage, head, line)
        return [t if ok else INVALID for t, ok in zip(texts, rewards.valid.tolist(), strict=True)]
