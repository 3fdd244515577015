"""Credit from the scores of a process reward model: sum, last and minimum form."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from creditgraph.components.advantage.explanations import lines_of_segments, signed
from creditgraph.components.advantage.group import Outputs, training_mask
from creditgraph.components.rollouts.segments import check_segments, segment_of_token, segment_starts
from creditgraph.components.rollouts.turn_rows import mean_of_others
from creditgraph.pipeline.core.component import Component, Count, same_rows
from creditgraph.pipeline.core.jagged import Jagged, takes_lists
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Credit, Rewards, Segments, SegmentValues, Trajectories, check_aligned

Form = Literal["sum", "last", "minimum"]


@takes_lists
def step_rewards(scores: Jagged, form: Form, temperature: float) -> Jagged:
    """Reward of each step, float64, whose sum over the later steps is the return.

    sum: the score. last: the score of the last step, 0 before. minimum: w_k r_k with w = softmax(−r/T) over the steps
    of the row, so that the returns are about the smallest score until its step is over (PURE, 2504.15275); T = 0 gives
    the first of the smallest all the weight.
    """
    values = scores.values.double()
    last = scores.positions == (scores.lengths - 1)[scores.row_ids]
    if form == "sum":
        return scores.with_values(values)
    if form == "last":
        return scores.with_values(torch.where(last, values, 0.0))
    lowest = torch.full((len(scores),), torch.inf, dtype=torch.float64).scatter_reduce(
        0, scores.row_ids, values, "amin"
    )
    gap = values - lowest[scores.row_ids]
    if temperature:
        weight = scores.with_values(torch.exp(-gap / temperature))
    else:
        ties = scores.with_values((gap == 0).double())
        weight = ties.with_values(((ties.cumsum().values == 1) & (gap == 0)).double())
    return scores.with_values(weight.values / weight.sum()[scores.row_ids] * values)


@takes_lists
def sum_of_later(rewards: Jagged) -> Jagged:
    """Σ_{j ≥ k} r_j of each entry."""
    return rewards.with_values(rewards.sum()[rewards.row_ids] - rewards.cumsum().values + rewards.values)


class ProcessAdvantage(Component):
    """Credits segment k with Σ_{j ≥ k} (r'_j − b_j), r' being its score in the chosen form and b a baseline.

    The baseline is the mean reward of the group's other responses per step, or per token times the step's tokens. With
    `outcome`, that times the verified reward minus the mean of the others is added to the last step. Forms, baselines
    and outcome term are those of PURE (2504.15275) as its release has them. A row with a score that is not finite, or
    an invalid reward, gets zero credit and is left out of the baselines.
    """

    paper = "2504.15275"
    metrics = (
        Metric("advantage_size", "reward", "mean absolute advantage of a segment"),
        Metric("unvalued", "rows", "rows with a score that is not finite, which get no credit"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Form, baseline and mask."""

        form: Form = "minimum"
        """how scores become rewards of steps; see `step_rewards`"""
        temperature: float = 0.1
        """T of the minimum form, in units of the score; 0 is the exact minimum"""
        baseline: Literal["token", "step", "none"] = "token"
        """mean reward of the group's other responses, per token or per step"""
        outcome: float = 0.0
        """weight of the verified reward at the last step (PURE: 0.1); needs the input `rewards`"""
        mask_prefix: bool = True
        """exclude inherited prefix tokens from the loss"""

        def __post_init__(self) -> None:
            if self.temperature < 0 or self.outcome < 0:
                raise ValueError(f"expected temperature and outcome ≥ 0, got {self.temperature} and {self.outcome}.")

    config: Config

    def run(
        self,
        *,
        trajectories: Trajectories,
        segments: Annotated[Segments, same_rows("trajectories")],
        values: Annotated[SegmentValues, same_rows("trajectories")],
        rewards: Annotated[Rewards, same_rows("trajectories")] | None = None,
    ) -> Outputs:
        """Spreads each segment's advantage over its tokens."""
        check_segments(trajectories, segments, values)
        if rewards is not None:
            check_aligned(trajectories, rewards)
        elif self.config.outcome:
            raise ValueError(
                f"node '{self.context.node}': outcome is {self.config.outcome:g}, but no rewards are wired; expected "
                "'rewards' among its inputs. Wire them, or set outcome to 0."
            )
        advantage, valid = self._advantage(trajectories, segments, values, rewards)
        tokens = trajectories.response_tokens
        per_token = advantage.values[segment_of_token(segments.ends, tokens)].float()
        mask = training_mask(tokens, trajectories.inherited, self.config.mask_prefix)
        kept = torch.where(mask.values & valid[tokens.row_ids], per_token, 0.0)
        size = advantage.values[valid[advantage.row_ids]].abs()
        unvalued = values.values.with_values(~torch.isfinite(values.values.values)).sum() > 0
        self.context.log(
            advantage_size=float(size.mean()) if len(size) else 0.0,
            unvalued=Count(unvalued.sum()),
        )
        return Outputs(credit=Credit(uid=trajectories.uid, advantage=tokens.with_values(kept), mask=mask))

    def _advantage(
        self, trajectories: Trajectories, segments: Segments, values: SegmentValues, rewards: Rewards | None
    ) -> tuple[Jagged, Tensor]:
        """Advantage of each segment, float64, and the rows that get one."""
        config = self.config
        valid = values.values.with_values(~torch.isfinite(values.values.values)).sum() == 0
        valid = valid if rewards is None else valid & rewards.valid
        first = values.values.lengths.clamp(max=1)
        scores = values.values.slice_rows(first, values.values.lengths)
        reward = step_rewards(scores, config.form, config.temperature)
        sizes = segments.ends.values - segment_starts(segments.ends).values
        if config.baseline == "step":
            mean = reward.sum() / reward.lengths.clamp(min=1)
            base = mean_of_others(mean, torch.ones_like(mean), trajectories.group, valid)[0][reward.row_ids]
        elif config.baseline == "token":
            lengths = trajectories.response_tokens.lengths
            base = mean_of_others(reward.sum(), lengths, trajectories.group, valid)[0][reward.row_ids] * sizes
        else:
            base = torch.zeros_like(reward.values)
        out = reward.values - base
        if rewards is not None and config.outcome:
            value = torch.where(valid, rewards.value.double(), 0.0)
            ahead = value - mean_of_others(value, torch.ones_like(value), trajectories.group, valid)[0]
            last = reward.positions == (reward.lengths - 1)[reward.row_ids]
            out = out + torch.where(last, config.outcome * ahead[reward.row_ids], 0.0)
        # NaN of a row would spread through sums over the batch.
        return sum_of_later(reward.with_values(torch.where(valid[reward.row_ids], out, 0.0))), valid

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The score and the advantage of each segment."""
        values: SegmentValues = inputs["values"]
        advantage, valid = self._advantage(inputs["trajectories"], inputs["segments"], values, inputs.get("rewards"))
        places = (values.values.offsets[:-1][advantage.row_ids] + advantage.positions + 1).tolist()

        def line(place: int) -> str:
            score = float(values.values.values[places[place]])
            return f"score {signed(score)}, A = {signed(float(advantage.values[place]))}"

        head = f"A = later step rewards ({self.config.form} form) − baseline ({self.config.baseline})"
        texts = lines_of_segments(advantage, head, line)
        return [
            t if ok else "no credit: no scores, or no valid reward" for t, ok in zip(texts, valid.tolist(), strict=True)
        ]
