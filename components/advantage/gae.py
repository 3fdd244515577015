"""Generalised advantage estimation over segments (GAE; VinePPO, PPO and VAPO are settings of it)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from creditgraph.components.advantage.explanations import INVALID, decimal, lines_of_segments, minus, signed
from creditgraph.components.advantage.group import Outputs, training_mask
from creditgraph.components.rollouts.segments import check_segments, generalised_advantage, segment_of_token, with_final
from creditgraph.pipeline.core.component import Component, Count, identity_sum, same_rows
from creditgraph.pipeline.core.jagged import Jagged, takes_lists
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Credit, Rewards, Segments, SegmentValues, Trajectories, check_aligned


@takes_lists
def adaptive_lambda(steps: Tensor, alpha: float) -> Tensor:
    """λ of each row, float64 [N]: 1 − 1/(α l) for l steps, at least 0 (VAPO, 2504.05118).

    Then the weights λ^t of TD errors add up to about α l, whatever the length. VAPO's l is the response length, because
    its steps are tokens; that it is the number of segments elsewhere, and the bound 0, are our reading.

    >>> adaptive_lambda(torch.tensor([0, 10, 40, 4000]), 0.05).tolist()
    [0.0, 0.0, 0.5, 0.995]
    """
    return (1.0 - 1.0 / (alpha * steps.double().clamp(min=1))).clamp(min=0.0)


@takes_lists
def imitation_weights(mask: Jagged, chosen: Tensor, all_sum: Callable[[Tensor], Tensor] = identity_sum) -> Jagged:
    """Weights of the tokens of the `chosen` rows (bool [N]), float32: tokens of the mask over those of them.

    With aggregate "token_mean", which divides by the tokens of the mask, their weighted sum is then the mean over the
    tokens of the chosen rows.
    """
    kept = mask.values & chosen[mask.row_ids]
    total, of_chosen = all_sum(torch.stack([mask.values.sum(), kept.sum()]).double())
    return mask.with_values(torch.where(kept, total / of_chosen.clamp(min=1), 0.0).float())


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


class GAE(Component):
    """Credits each segment by generalised advantage estimation: A_k = δ_k + γλ A_{k+1}, δ_k = γ v(s_{k+1}) − v(s_k).

    The last v is the reward. Segments are the steps: tokens, thoughts or turns, and values may come from a critic, from
    continuations or from answer likelihoods. λ = 0, γ = 1 is VinePPO (2410.01679), λ = 1 the return minus the value. No
    group is needed. A row with an invalid reward, or with a value that is not finite, gets zero credit.
    """

    paper = "1506.02438"
    metrics = (
        Metric("advantage_size", "reward", "mean absolute advantage of a segment"),
        Metric("zero_share", "share", "segments whose advantage is 0"),
        Metric("lam", "1", "mean λ over rows, with `length_adaptive`"),
        Metric("unvalued", "rows", "rows with a value that is not finite, which get no credit"),
        Metric("warming_up", "1", "1 while all credit is 0, so that a critic is trained first (`warmup`)"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Discount, trace and mask."""

        gamma: float = 1.0
        """γ, discount per segment"""
        lam: float = 0.95
        """λ: 0 is the TD error of a segment, 1 the return minus the value"""
        length_adaptive: float = 0.0
        """α of λ = 1 − 1/(α · segments of the row), in place of `lam` (VAPO: 0.05, segments of one token); 0 is off"""
        warmup: int = 0
        """first iterations with zero credit, in which critics learn the values of a policy that does not change"""
        imitation: float = 0.0
        """weight of the language-model loss on the tokens of correct rows (VAPO's positive-example loss: 0.1), for
        aggregate token_mean; 0 is off"""
        mask_prefix: bool = True
        """exclude inherited prefix tokens from the loss"""
        whiten: bool = False
        """centre and scale advantages over the trained tokens of the batch, as the released VinePPO does"""

        def __post_init__(self) -> None:
            if not 0 <= self.lam <= 1 or not 0 <= self.gamma <= 1:
                raise ValueError(f"expected 0 ≤ lam ≤ 1 and 0 ≤ gamma ≤ 1, got {self.lam} and {self.gamma}.")
            if self.length_adaptive < 0 or self.warmup < 0 or self.imitation < 0:
                raise ValueError(
                    f"expected length_adaptive, warmup and imitation ≥ 0 (0 is off), got {self.length_adaptive}, "
                    f"{self.warmup} and {self.imitation}."
                )

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
        config = self.config
        warming = self.context.iteration < config.warmup
        finite = values.values.with_values(~torch.isfinite(values.values.values)).sum() == 0
        valid = rewards.valid & finite & (not warming)
        for uid in trajectories.uid[~finite].tolist():
            self.context.reject({"uid": uid}, f"{values.origin or 'values'}: a value of the row is not finite")
        per_segment = self._advantage(values.values, rewards.value)
        tokens = trajectories.response_tokens
        per_token = per_segment.values[segment_of_token(segments.ends, tokens)].float()
        mask = training_mask(tokens, trajectories.inherited, config.mask_prefix)
        mask = mask.with_values(mask.values & (not warming))
        trained = mask.with_values(mask.values & valid[tokens.row_ids])
        advantage = tokens.with_values(torch.where(trained.values, per_token, 0.0))
        if config.whiten:
            advantage = whitened(advantage, trained, self.context.all_sum)
        columns = {}
        if config.imitation:
            weights = imitation_weights(mask, rewards.correct & valid, self.context.all_sum)
            columns["imitation"] = weights.with_values(config.imitation * weights.values)
        size = per_segment.values[finite[per_segment.row_ids]].abs()
        self.context.log(
            advantage_size=float(size.mean()) if len(size) else 0.0,
            zero_share=float((size < 1e-8).float().mean()) if len(size) else 0.0,
            unvalued=Count((~finite).sum()),
            warming_up=float(warming),
        )
        return Outputs(credit=Credit(uid=trajectories.uid, advantage=advantage, mask=mask, columns=columns))

    def _lambda(self, values: Jagged) -> float | Tensor:
        alpha = self.config.length_adaptive
        return adaptive_lambda(values.lengths - 1, alpha) if alpha else self.config.lam

    def _advantage(self, values: Jagged, reward: Tensor) -> Jagged:
        lam = self._lambda(values)
        if isinstance(lam, Tensor) and len(lam):
            self.context.log(lam=float(lam.mean()))
        return generalised_advantage(values, reward, self.config.gamma, lam)

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The difference of values of each segment, in numbers."""
        rewards: Rewards = inputs["rewards"]
        credit: Credit = outputs["credit"]
        gamma = self.config.gamma
        values = with_final(inputs["values"].values, rewards.value)
        decay = gamma * torch.as_tensor(self._lambda(values), dtype=torch.float64).expand(len(values))
        advantage = self._advantage(values, rewards.value)
        row = advantage.row_ids.tolist()
        number = advantage.positions.tolist()
        first = values.offsets.tolist()
        last = (advantage.lengths - 1).tolist()
        ends = (inputs["segments"].ends.values + credit.advantage.offsets[:-1][row]).tolist()

        def line(place: int) -> str:
            at = first[row[place]] + number[place]
            ending = number[place] == last[row[place]]
            after = float(values.values[at + 1]) * (1.0 if ending else gamma)
            text = minus(after, float(values.values[at]))
            if decay[row[place]] and not ending:
                text += f" + {decimal(float(decay[row[place]]))}·({signed(float(advantage.values[place + 1]))})"
            text += f" = {signed(float(advantage.values[place]))}"
            # Whitening has one mean and one scale for the batch, so its result is read off a token of the segment.
            scaled = signed(float(credit.advantage.values[ends[place] - 1]))
            return text + (f", centred and scaled over the batch {scaled}" if self.config.whiten else "")

        head = f"A = {'' if gamma == 1 else f'{decimal(gamma)}·'}v(after) − v(before)"
        head += (" + γλ·A(next)" if bool(decay.any()) else "") + ", the last v is the reward"
        texts = lines_of_segments(advantage, head, line)
        finite = inputs["values"].values.with_values(~torch.isfinite(inputs["values"].values.values)).sum() == 0
        if self.context.iteration < self.config.warmup:
            return ["no credit: the critic warms up"] * len(texts)
        kept = zip(texts, rewards.valid.tolist(), finite.tolist(), strict=True)
        return [(t if f else "no credit: a value is not finite") if ok else INVALID for t, ok, f in kept]
