"""Outcome credit redistributed over segments by the value each one gained (RREDCoT)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from components.advantage.segments import check_segments, increments, segment_of_token
from pipeline.component import Component, same_rows
from pipeline.jagged import Jagged
from pipeline.payloads import Credit, Rewards, Segments, SegmentValues, Trajectories, check_aligned

Residual = Literal["equal", "last"]
Head = Literal["clip_floor", "softmax", "signed"]
TINY = 1e-6


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The given credit, redistributed; `columns["redistributed"]` has each token's segment reward r_k."""

    credit: Annotated[Credit, same_rows("trajectories")]


def redistributed_rewards(values: Jagged, reward: Tensor, residual: Residual = "equal") -> Jagged:
    """Reward of each segment, float64: r_k = v(s_{k+1}) − v(s_k) plus its part of the residual, so that Σ_k r_k = `reward` [N].

    The residual r − (v(end) − v(start)) goes to all segments in equal parts, or to the last one. Source: RUDDER (1806.07857) as used
    by 2606.06475; that the residual is spread is second-hand.
    """
    gain = increments(values.to(torch.float64))
    rest, count = reward.double() - gain.sum(), gain.lengths
    if residual == "equal":
        return gain.with_values(gain.values + (rest / count.clamp(min=1))[gain.row_ids])
    last = gain.positions == (count - 1)[gain.row_ids]
    return gain.with_values(gain.values + torch.where(last, rest[gain.row_ids], 0.0))


def segment_shares(rewards: Jagged, sizes: Jagged, head: Head = "clip_floor", floor: float = 0.1, temperature: float = 0.1) -> Jagged:
    """Share of the credit of each segment, float64, summing to 1 over a row's segments that have trained tokens.

    clip_floor: (1 − floor)·max(r_k, 0)/Σ + floor·n_k/T. softmax: exp(r_k / temperature)/Σ. signed: r_k/Σ, which may be negative or above 1.
    A row whose sum is below 1e-6 in size falls back to n_k/T, which is uniform over tokens. The published text leaves the form open;
    these are reconstructions.

    Args:
        rewards: r_k per segment.
        sizes: n_k, int64: trained tokens per segment; segments without any get share 0.
        head: the form.
        floor: part of the credit that is spread uniformly, for clip_floor.
        temperature: of softmax, in units of reward.
    """
    present, rows = sizes.values > 0, rewards.row_ids
    uniform = sizes.values.double() / sizes.sum().clamp(min=1).double()[rows]
    if head == "softmax":
        logits = rewards.values.double() / temperature
        top = torch.full((len(rewards),), -torch.inf, dtype=torch.float64).scatter_reduce(
            0, rows, logits.masked_fill(~present, -torch.inf), "amax"
        )
        raw = torch.where(present, torch.exp(logits - torch.nan_to_num(top, neginf=0.0)[rows]), 0.0)
    else:
        kept = rewards.values.double().clamp(min=0.0) if head == "clip_floor" else rewards.values.double()
        raw = torch.where(present, kept, 0.0)
    total = rewards.with_values(raw).sum()[rows]
    share = torch.where(total.abs() < TINY, uniform, raw / torch.where(total.abs() < TINY, 1.0, total))
    if head == "clip_floor":
        share = (1.0 - floor) * share + floor * uniform
    return rewards.with_values(share)


class Redistribute(Component):
    """A_{i,t} = T_i σ_{i,t} A_i with Σ_t σ_{i,t} = 1 and σ constant within a segment; A_i is the credit that is wired in.

    T_i counts trained tokens. With one segment, or equal gains per token, σ = 1/T_i and the credit stays as it is (GRPO). σ comes from
    the redistributed rewards r_k, whose sum is the return. For trajectories with A_i < 0, `negative: same` uses the same σ (so gains carry
    the blame) and `flipped` uses −r_k (losses of value carry it); the published text does not say.
    """

    paper = "2606.06475"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Form of the shares."""

        head: Head = "clip_floor"
        """clip_floor: losses count as 0, with a uniform floor; softmax: of r_k / temperature; signed: r_k over their sum"""
        residual: Residual = "equal"
        """where the difference between return and summed gains goes: to all segments equally, or to the last"""
        floor: float = 0.1
        """part of the credit spread uniformly over tokens in clip_floor"""
        temperature: float = 0.1
        """of softmax, in units of reward"""
        negative: Literal["same", "flipped"] = "same"
        """on trajectories with negative advantage: the same shares, or those of −r_k"""

        def __post_init__(self) -> None:
            if not 0 <= self.floor <= 1 or self.temperature <= 0:
                raise ValueError(f"floor is {self.floor}, temperature {self.temperature}; wanted floor from 0 to 1, temperature above 0.")

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
        settings, tokens = self.config, trajectories.response_tokens
        segment = segment_of_token(segments.ends, tokens)
        trained = torch.zeros(len(segments.ends.values), dtype=torch.int64).index_add_(0, segment, credit.mask.values.long())
        sizes = segments.ends.with_values(trained)
        parts = redistributed_rewards(values.values, rewards.value, settings.residual)
        sign = torch.ones(len(trajectories), dtype=torch.float64)
        if settings.negative == "flipped":
            sign[credit.advantage.sum() < 0] = -1.0
        oriented = parts.with_values(parts.values * sign[parts.row_ids])
        share = segment_shares(oriented, sizes, settings.head, settings.floor, settings.temperature)
        factor = share.values * sizes.sum()[share.row_ids] / sizes.values.clamp(min=1)
        advantage = torch.where(rewards.valid[tokens.row_ids], credit.advantage.values * factor[segment].float(), 0.0)
        residual = (rewards.value.double() - increments(values.values).sum()).abs()
        self.context.log(
            residual=float(residual.mean()) if len(residual) else 0.0,
            factor_max=float(factor.abs().max()) if len(factor) else 0.0,
        )
        columns = {**credit.columns, "redistributed": tokens.with_values(parts.values[segment].float())}
        return Outputs(credit=credit.replace(advantage=tokens.with_values(advantage), columns=columns))
