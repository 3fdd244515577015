"""Outcome credit redistributed over segments by the value each one gained (RREDCoT)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from creditgraph.components.advantage.explanations import decimal, lines_of_changed_credit, minus, signed
from creditgraph.components.advantage.group import Outputs
from creditgraph.components.rollouts.segments import check_segments, increments, segment_of_token
from creditgraph.pipeline.core.component import Component, same_rows
from creditgraph.pipeline.core.jagged import Jagged, takes_lists
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Credit, Rewards, Segments, SegmentValues, Trajectories, check_aligned

Head = Literal["clip_floor", "softmax", "signed"]
Per = Literal["token", "segment"]
# Smaller gains, relative to their values, are rounding errors of float32; dividing by smaller sums is arbitrary.
TINY = 1e-6


@takes_lists
def redistributed_rewards(values: Jagged, reward: Tensor) -> Jagged:
    """Reward of each segment, float64: r_k = v(s_{k+1}) − v(s_k) + its part of the residual, so that Σ_k r_k = reward.

    The residual r − (v(end) − v(start)) of each row [N] goes to all segments in equal parts.
    Source: RUDDER (1806.07857) as used by 2606.06475; that the residual is spread is second-hand.
    """
    gain = increments(values.to(torch.float64))
    rest = reward.double() - gain.sum()
    return gain.with_values(gain.values + (rest / gain.lengths.clamp(min=1))[gain.row_ids])


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How gains of value become shares of the credit."""

    head: Head = "clip_floor"
    """clip_floor: losses count as 0, plus a uniform part; softmax of gains / temperature; signed: gain / summed gain"""
    floor: float = 0.1
    """part of the credit spread uniformly over tokens in clip_floor"""
    temperature: float = 0.5
    """temperature of softmax, in units of the trajectory's largest gain or loss"""
    per: Per = "token"
    """equal gains mean equal credit per token, or per segment (long segments then get less per token)"""
    max_factor: float = 10.0
    """largest factor, in size, on a token's credit; shares are drawn towards uniform until it holds"""

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1 or self.temperature <= 0 or not self.max_factor > 1:
            raise ValueError(
                "expected 0 ≤ floor ≤ 1, temperature > 0 and max_factor > 1, got "
                f"{self.floor}, {self.temperature} and {self.max_factor}."
            )


@takes_lists
def segment_shares(
    values: Jagged, sizes: Jagged, returns: Tensor, sign: Tensor | None = None, form: Shares | None = None
) -> Jagged:
    """Share of the credit of each segment, float64, summing to 1 over a row's segments that have trained tokens.

    With gains g_k = sign · (v(s_{k+1}) − v(s_k)), and w_k = max(g_k, 0) for clip_floor, g_k for signed, exp(g_k / (G
    temperature)) for softmax with G the row's largest |g|, and n_k trained tokens of T: per token, share_k = w_k n_k /
    Σ w n, so that equal gains give every token the same; per segment, share_k = w_k / Σ w, which a segment's tokens
    divide among them. clip_floor adds a uniform part: (1 − floor)·share_k + floor·n_k/T.

    A positive factor on a row's values changes nothing. A gain below 1e-6 of the values that it lies between is a
    rounding error and counts as 0. Uniform over tokens, n_k/T, are rows without gains, or whose Σ w is not positive;
    for signed also those whose return, the sum of the redistributed rewards, is below 1e-6 in size. Last, a row's
    shares are drawn towards uniform until no token's factor, share_k T/n_k, is above `max_factor` in size. The
    forms are our reading; the paper's body was not available to us.

    Args:
        values: v at the boundaries of each row [segments + 1].
        sizes: n_k, int64; segments without trained tokens get share 0.
        returns: [N], Σ_k r_k of each row.
        sign: [N], −1 for rows whose losses of value carry the credit; all +1 if None.
        form: settings of the shares; the defaults if None.
    """
    form = form or Shares()
    gain = increments(values.to(torch.float64))
    rows = gain.row_ids
    present = sizes.values > 0
    uniform = sizes.values.double() / sizes.sum().clamp(min=1).double()[rows]
    gain = _without_rounding(gain, values)
    if sign is not None:
        gain = gain.with_values(gain.values * sign.double()[rows])
    if form.head == "clip_floor":
        gain = gain.with_values(gain.values.clamp(min=0.0))
    largest = _row_max(gain.with_values(torch.where(present, gain.values.abs(), 0.0)))
    # Relative to the row, so that the unit of the values does not matter.
    relative = gain.values / torch.where(largest > 0, largest, 1.0)[rows]
    if form.head == "softmax":
        # The largest logit of each row is subtracted, so that exp neither overflows nor vanishes everywhere.
        top = _row_max(gain.with_values(torch.where(present, relative + 1.0, 0.0))) - 1.0
        weight = torch.exp((relative - top[rows]) / form.temperature)
    else:
        weight = relative
    count = sizes.with_values(present.long()).sum().double()[rows]
    raw = torch.where(present, weight * (uniform * count if form.per == "token" else 1.0), 0.0)
    total = gain.with_values(raw).sum()
    usable = (largest > 0) & (total > TINY * gain.with_values(raw.abs()).sum())
    if form.head == "signed":
        usable &= returns.double().abs() >= TINY
    share = torch.where(usable[rows], raw / torch.where(usable, total, 1.0)[rows], uniform)
    if form.head == "clip_floor":
        share = (1.0 - form.floor) * share + form.floor * uniform
    return gain.with_values(_bounded(gain.with_values(share), uniform, form.max_factor))


def _without_rounding(gain: Jagged, values: Jagged) -> Jagged:
    """Gains, with 0 for those that are rounding errors of the two values they lie between."""
    size = values.with_values(values.values.double().abs())
    keep = size.lengths - size.lengths.clamp(max=1)
    before = size.slice_rows(torch.zeros_like(keep), keep)
    after = size.slice_rows(size.lengths.clamp(max=1), size.lengths)
    error = TINY * torch.maximum(before.values, after.values)
    return gain.with_values(torch.where(gain.values.abs() > error, gain.values, 0.0))


def _bounded(share: Jagged, uniform: Tensor, max_factor: float) -> Tensor:
    """Shares drawn towards `uniform` until |share| ≤ max_factor · uniform; their sum stays."""
    # 1 + (f − 1) / e is within ± bound for e ≥ (f − 1) / (bound − 1) when f > 1, and e ≥ (1 − f) / (bound + 1) else.
    away = torch.where(uniform > 0, share.values / torch.where(uniform > 0, uniform, 1.0) - 1.0, 0.0)
    excess = _row_max(share.with_values(torch.where(away > 0, away / (max_factor - 1.0), -away / (max_factor + 1.0))))
    return uniform + (share.values - uniform) / excess.clamp(min=1.0)[share.row_ids]


def _row_max(values: Jagged) -> Tensor:
    """float64 [N]: the largest value of each row, at least 0."""
    return torch.zeros(len(values), dtype=torch.float64).scatter_reduce(0, values.row_ids, values.values, "amax")


class Redistribute(Component):
    """Redistributes a trajectory's credit over its segments: A_{i,t} = T_i σ_{i,t} A_i with Σ_t σ_{i,t} = 1.

    A_i is the input credit, T_i its number of trained tokens, and σ is constant within a segment. With one segment, or
    equal gains of value, σ = 1/T_i and the credit does not change (GRPO). σ comes from the gains v(s_{k+1}) − v(s_k)
    before any residual, so that the unit of the values cancels; where they come with logs, values too small for a
    float32 count too. Two choices are our reading; the paper's body was not available to us. For trajectories with A_i
    < 0, `negative: flipped` turns the gains around (losses of value carry the blame) and `same` does not (gains carry
    it). A segment's gain is that of each of its tokens (`per: token`, as a policy gradient over segments has it) or
    divided among them (`segment`). Column "redistributed" of the credit has each token's r_k, whose sum over segments
    is the reward.
    """

    paper = "2606.06475"
    metrics = (
        Metric("residual", "reward", "mean |reward − sum of the gains| of a trajectory"),
        Metric("factor_max", "ratio", "largest factor, in size, on a token's credit"),
        Metric("bounded_share", "share", "trajectories whose shares `max_factor` drew towards uniform"),
        Metric(
            "uniform_share",
            "share",
            "trajectories whose tokens all keep the outcome's credit, as in GRPO",
            alarm="no response's credit was redistributed, so the method was GRPO. Either a response is one segment "
            "(segments of the segmenter), or its values are equal.",
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Shares):
        """Form of the shares."""

        negative: Literal["same", "flipped"] = "flipped"
        """on trajectories with negative advantage: the same shares, or those of the negative gains"""

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
        # A trajectory counts as punished by the sign of its summed credit.
        sign = torch.ones(len(trajectories), dtype=torch.float64)
        if settings.negative == "flipped":
            sign[credit.advantage.sum() < 0] = -1.0
        returns = rewards.value
        share = segment_shares(values.relative(), sizes, returns, sign, settings)
        # A segment without trained tokens has share 0; the clamp only keeps the division defined.
        factor = share.with_values(share.values * sizes.sum()[share.row_ids] / sizes.values.clamp(min=1))
        advantage = torch.where(
            rewards.valid[tokens.row_ids], credit.advantage.values * factor.values[segment].float(), 0.0
        )
        parts = redistributed_rewards(values.values, returns)
        self._log(factor, sizes, (returns.double() - increments(values.values).sum()).abs())
        columns = {**credit.columns, "redistributed": tokens.with_values(parts.values[segment].float())}
        return Outputs(credit=credit.replace(advantage=tokens.with_values(advantage), columns=columns))

    def _log(self, factor: Jagged, sizes: Jagged, residual: Tensor) -> None:
        present = sizes.values > 0
        largest = _row_max(factor.with_values(factor.values.abs()))
        away = _row_max(factor.with_values(torch.where(present, (factor.values - 1.0).abs(), 0.0)))
        count = max(len(factor), 1)
        self.context.log(
            residual=float(residual.sum()) / count,
            factor_max=float(largest.max()) if len(factor) else 0.0,
            bounded_share=float((largest >= self.config.max_factor * (1.0 - TINY)).sum()) / count,
            uniform_share=float((away < TINY).sum()) / count,
        )

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The gain of each segment and the factor on the credit that arrived, in numbers."""

        def line(before: float, after: float, arrived: float, result: float) -> str:
            # The factor is the quotient of what left and what arrived, whatever form of the shares made it.
            factor = decimal(result / arrived) if arrived else "1"
            gain = f"value {minus(after, before)} = {signed(after - before)}"
            return f"{gain}; {signed(arrived)} × {factor} = {signed(result)}"

        head = f"gain of value; A × its share of the credit ({self.config.head}) over its share of the tokens"
        return lines_of_changed_credit(head, inputs, outputs["credit"], line)
