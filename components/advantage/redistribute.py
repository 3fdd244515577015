"""Outcome credit redistributed over segments by the value each one gained (RREDCoT)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from components.advantage.explanations import INVALID, decimal, lines_of_segments, minus, signed
from components.advantage.group import Outputs
from components.rollouts.segments import check_segments, increments, segment_of_token
from pipeline.core.component import Component, same_rows
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Credit, Rewards, Segments, SegmentValues, Trajectories, check_aligned

Residual = Literal["equal", "last"]
Head = Literal["clip_floor", "softmax", "signed"]
Per = Literal["token", "segment"]
# Smaller sums of weights are rounding errors; dividing by them would give arbitrary shares.
TINY = 1e-6


def redistributed_rewards(values: Jagged, reward: Tensor, residual: Residual = "equal") -> Jagged:
    """Reward of each segment, float64: r_k = v(s_{k+1}) − v(s_k) + its part of the residual, so that Σ_k r_k = reward.

    The residual r − (v(end) − v(start)) of each row [N] goes to all segments in equal parts, or to the last one.
    Source: RUDDER (1806.07857) as used by 2606.06475; that the residual is spread is second-hand.
    """
    gain = increments(values.to(torch.float64))
    rest = reward.double() - gain.sum()
    count = gain.lengths
    if residual == "equal":
        return gain.with_values(gain.values + (rest / count.clamp(min=1))[gain.row_ids])
    last = gain.positions == (count - 1)[gain.row_ids]
    return gain.with_values(gain.values + torch.where(last, rest[gain.row_ids], 0.0))


def segment_shares(
    rewards: Jagged,
    sizes: Jagged,
    head: Head = "clip_floor",
    floor: float = 0.1,
    temperature: float = 0.1,
    per: Per = "token",
) -> Jagged:
    """Share of the credit of each segment, float64, summing to 1 over a row's segments that have trained tokens.

    With w_k = max(r_k, 0) for clip_floor, exp(r_k / temperature) for softmax, r_k for signed, and n_k trained tokens of
    T: per token, share_k = w_k n_k / Σ w n, so that equal r_k give every token the same; per segment, share_k = w_k / Σ
    w, which a segment's tokens divide among them. clip_floor adds a uniform part: (1 − floor)·share_k + floor·n_k/T. A
    row whose sum Σ w, with mean weight 1 per segment, is below 1e-6 in size falls back to n_k/T, which is uniform over
    tokens. The published text leaves the form open; these are our reconstructions.

    Args:
        rewards: r_k per segment.
        sizes: n_k, int64; segments without trained tokens get share 0.
        head: the form.
        floor: part of the credit that is spread uniformly, for clip_floor.
        temperature: temperature of softmax, in units of reward.
        per: whether equal rewards give equal credit per token, or per segment.
    """
    present = sizes.values > 0
    rows = rewards.row_ids
    uniform = sizes.values.double() / sizes.sum().clamp(min=1).double()[rows]
    if head == "softmax":
        # The largest logit of each row is subtracted, so that exp cannot overflow.
        logits = (rewards.values.double() / temperature).masked_fill(~present, -torch.inf)
        top = torch.full((len(rewards),), -torch.inf, dtype=torch.float64).scatter_reduce(0, rows, logits, "amax")
        weight = torch.exp(logits - torch.nan_to_num(top, neginf=0.0)[rows])
    else:
        weight = rewards.values.double().clamp(min=0.0) if head == "clip_floor" else rewards.values.double()
    count = sizes.with_values(present.long()).sum().double()[rows]
    raw = torch.where(present, weight * (uniform * count if per == "token" else 1.0), 0.0)
    total = rewards.with_values(raw).sum()[rows]
    share = torch.where(total.abs() < TINY, uniform, raw / torch.where(total.abs() < TINY, 1.0, total))
    if head == "clip_floor":
        share = (1.0 - floor) * share + floor * uniform
    return rewards.with_values(share)


def rewards_are_equal(rewards: Jagged) -> Tensor:
    """bool [N]: rows whose r_k do not differ by more than 1e-6, so that nothing is redistributed."""
    rows = rewards.row_ids
    values = rewards.values.double()
    low = torch.full((len(rewards),), torch.inf, dtype=torch.float64).scatter_reduce(0, rows, values, "amin")
    high = torch.full((len(rewards),), -torch.inf, dtype=torch.float64).scatter_reduce(0, rows, values, "amax")
    return high - low < TINY


class Redistribute(Component):
    """Redistributes a trajectory's credit over its segments: A_{i,t} = T_i σ_{i,t} A_i with Σ_t σ_{i,t} = 1.

    A_i is the input credit, T_i its number of trained tokens, and σ is constant within a segment. With one segment,
    or equal segment rewards r_k, σ = 1/T_i and the credit does not change (GRPO). σ comes from the r_k, whose
    sum is the return. Two choices are open in the published text. For trajectories with A_i < 0, `negative: flipped`
    uses −r_k (losses of value carry the blame) and `same` the same σ (gains carry it). A segment's reward is that of
    each of its tokens (`per: token`, as a policy gradient over segments has it) or divided among them (`segment`).
    Column "redistributed" of the credit has each token's r_k.
    """

    paper = "2606.06475"
    metrics = (
        Metric("residual", "reward", "mean |reward − sum of the gains| of a trajectory"),
        Metric("factor_max", "ratio", "largest factor on a segment's share"),
        Metric("uniform_share", "share", "trajectories whose segments all get the same"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Form of the shares."""

        head: Head = "clip_floor"
        """clip_floor: negative r_k count as 0, plus a uniform part; softmax of r_k / temperature; signed: r_k / Σ r"""
        residual: Residual = "equal"
        """which segments get the difference between return and summed gains: all equally, or the last"""
        floor: float = 0.1
        """part of the credit spread uniformly over tokens in clip_floor"""
        temperature: float = 0.1
        """temperature of softmax, in units of reward"""
        per: Per = "token"
        """equal rewards mean equal credit per token, or per segment (long segments then get less per token)"""
        negative: Literal["same", "flipped"] = "flipped"
        """on trajectories with negative advantage: the same shares, or those of −r_k"""

        def __post_init__(self) -> None:
            if not 0 <= self.floor <= 1 or self.temperature <= 0:
                raise ValueError(
                    f"expected 0 ≤ floor ≤ 1 and temperature > 0, got {self.floor} and {self.temperature}."
                )

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
        """Multiplies each token's credit by T_i σ_{i,t}."""
        check_aligned(trajectories, rewards)
        check_aligned(trajectories, credit)
        check_segments(trajectories, segments, values)
        settings = self.config
        tokens = trajectories.response_tokens
        segment = segment_of_token(segments.ends, tokens)
        trained = torch.zeros(len(segments.ends.values), dtype=torch.int64)
        trained.index_add_(0, segment, credit.mask.values.long())
        sizes = segments.ends.with_values(trained)
        parts = redistributed_rewards(values.values, rewards.value, settings.residual)
        # A trajectory counts as punished by the sign of its summed credit.
        sign = torch.ones(len(trajectories), dtype=torch.float64)
        if settings.negative == "flipped":
            sign[credit.advantage.sum() < 0] = -1.0
        oriented = parts.with_values(parts.values * sign[parts.row_ids])
        share = segment_shares(oriented, sizes, settings.head, settings.floor, settings.temperature, settings.per)
        # A segment without trained tokens has share 0; the clamp only keeps the division defined.
        factor = share.values * sizes.sum()[share.row_ids] / sizes.values.clamp(min=1)
        advantage = torch.where(rewards.valid[tokens.row_ids], credit.advantage.values * factor[segment].float(), 0.0)
        residual = (rewards.value.double() - increments(values.values).sum()).abs()
        self.context.log(
            residual=float(residual.mean()) if len(residual) else 0.0,
            factor_max=float(factor.abs().max()) if len(factor) else 0.0,
            uniform_share=float(rewards_are_equal(oriented).double().mean()) if len(oriented) else 0.0,
        )
        columns = {**credit.columns, "redistributed": tokens.with_values(parts.values[segment].float())}
        return Outputs(credit=credit.replace(advantage=tokens.with_values(advantage), columns=columns))

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The gain of each segment and the factor on the credit that arrived, in numbers."""
        rewards: Rewards = inputs["rewards"]
        arrived: Credit = inputs["credit"]
        values = inputs["values"].values
        ends = inputs["segments"].ends
        last_token = (ends.values + arrived.advantage.offsets[:-1][ends.row_ids] - 1).tolist()
        before = (ends.positions + values.offsets[:-1][ends.row_ids]).tolist()

        def line(place: int) -> str:
            given = float(arrived.advantage.values[last_token[place]])
            result = float(outputs["credit"].advantage.values[last_token[place]])
            after, at = float(values.values[before[place] + 1]), float(values.values[before[place]])
            gain = f"value {minus(after, at)} = {signed(after - at)}"
            # The factor is the quotient of what left and what arrived, whatever form of the shares made it.
            return f"{gain}; {signed(given)} × {decimal(result / given) if given else '1'} = {signed(result)}"

        head = f"gain of value; A × its share of the credit ({self.config.head}) over its share of the tokens"
        texts = lines_of_segments(ends, head, line)
        return [t if ok else INVALID for t, ok in zip(texts, rewards.valid.tolist(), strict=True)]
