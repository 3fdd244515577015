"""Counterfactual credit: repairable failures earn a part of the reward, on the tokens that a repair changes (IBPO)."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from creditgraph.components.advantage.explanations import decimal, signed
from creditgraph.components.advantage.group import (
    EXACT_ZERO,
    GROUP_METRICS,
    Normalize,
    group_advantage,
    group_explanation,
    group_metrics,
    group_moments,
    training_mask,
    zero_groups,
)
from creditgraph.pipeline.core.component import Component, Count, same_rows
from creditgraph.pipeline.core.errors import extra
from creditgraph.pipeline.core.jagged import Jagged, takes_lists
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Credit, Rewards, Trajectories, check_aligned


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The rows to train on, which are the trajectories and then the revisions of `train_revision`, and their credit."""

    trained: Trajectories
    credit: Annotated[Credit, same_rows("trained")]


@takes_lists
def repair_share(parent: Tensor, correct: Tensor, valid: Tensor, uid: Tensor) -> Tensor:
    """s of each trajectory in `uid` [N]: the share of its revisions that are correct, float64; 0 without a revision.

    Args:
        parent: int64 [M], uid of the trajectory each revision repairs.
        correct: bool [M].
        valid: bool [M]; a revision that could not be verified counts as not repaired.
        uid: int64 [N].
    """
    order = torch.argsort(uid)
    row = order[torch.searchsorted(uid[order], parent)] if len(uid) else parent
    count = torch.zeros(len(uid), dtype=torch.float64).index_add_(0, row, torch.ones(len(parent), dtype=torch.float64))
    repaired = torch.zeros(len(uid), dtype=torch.float64).index_add_(0, row, (correct & valid).double())
    return repaired / count.clamp(min=1)


def shaping_statistics(reward: Tensor, shaped: Tensor, phi: Tensor, correct: Tensor) -> dict[str, float]:
    """Var R, Var R', and the bound 2pE[φ]/Var φ on λ_φ below which shaping lowers the variance of 0/1 rewards R.

    Population variances over [N]. R' = R + λφ with φ = 0 where R = 1 has Var R' − Var R = λ² Var φ − 2λ p E[φ] (our
    derivation). The bound is infinite where Var φ = 0 < p E[φ], and 0 where both vanish.
    """
    if not len(reward):
        return {"reward_var": 0.0, "shaped_reward_var": 0.0, "shaping_bound": 0.0}
    spread = float(phi.double().var(correction=0))
    pull = 2 * float(correct.double().mean()) * float(phi.double().mean())
    return {
        "reward_var": float(reward.double().var(correction=0)),
        "shaped_reward_var": float(shaped.double().var(correction=0)),
        "shaping_bound": pull / spread if spread > 0 else (float("inf") if pull > 0 else 0.0),
    }


class Counterfactual(Component):
    """Adds λ · (share of correct revisions) to the reward of each failure, and credits the tokens that a repair edits.

    R' = R + λφ, with φ_i = ρ s_i for a wrong trajectory and 0 for a correct one (second-hand: notes on the paper). A'
    is R' normalised within the group, and A_{i,t} = A'_i m_{i,t} (our reading). m marks the tokens of a repaired
    trajectory that its successful revision with the fewest edits changes; it is all ones for a correct trajectory and
    for a failure without a successful revision (our reading). Column "gate" holds m for objective `gspo_gated`.

    The corrected trajectory is reinforced: that revision is trained too, on its edited tokens and with the advantage of
    reward 1 in its original's group, and the tokens it replaces are lowered or left (our reading). Switches give the
    reading without it: `train_revision: false` trains no revision. `raise_edits: true` keeps the sign of A', which may
    be positive for a repaired trajectory of a group with few successes and then raises the tokens that were wrong
    (metric `raised_edit_share`).

    Without revisions, and with shaping 0, mask "none" and both switches turned, this is `advantage.group`.
    """

    paper = "2605.16302"
    metrics = (
        *GROUP_METRICS,
        Metric("reward_var", "reward²", "variance of the reward"),
        Metric("shaped_reward_var", "reward²", "variance of the shaped reward"),
        Metric(
            "shaping_bound", "ratio", "2pE[φ]/Var φ: smaller λ_φ lower the variance of 0/1 rewards; may be infinite"
        ),
        Metric("wrong", "rows", "trajectories that are wrong"),
        Metric("revised_share", "share", "wrong trajectories with a revision"),
        Metric("repair_rate", "share", "revisions that are correct, mean over wrong trajectories"),
        Metric("repaired_share", "share", "wrong trajectories with a correct revision"),
        Metric("edited_share", "share", "tokens that the repair changes, mean over repaired trajectories"),
        Metric(
            "unchanged_share",
            "share",
            "repaired trajectories to which the repair only adds, so that no token of theirs is trained",
        ),
        Metric("raised_edit_share", "share", "repaired trajectories with A' > 0, which `raise_edits` raises"),
        Metric("trained_revisions", "rows", "revisions that are trained on"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Shaping, mask, normalisation."""

        shaping: float = 0.6
        """λ_φ, reward of a fully repairable failure; 0 switches shaping off"""
        repair_scale: float = 1.0
        """ρ: 0.5 in the single-reference form (second-hand: notes on the paper), `references: 1` at the reviser"""
        mask: Literal["loss", "credit", "none"] = "loss"
        """unchanged tokens of a repaired failure: leave the loss, or get advantage 0 (credit), or keep theirs (none)"""
        raise_edits: bool = False
        """whether changed tokens of a repaired failure keep an A' > 0; false gives them min(A', 0)"""
        train_revision: bool = True
        """also trains the fewest-edit successful revisions, as positives on their edited tokens"""
        normalize: Normalize = "std"
        """normalisation of the shaped reward within its group, see advantage.group"""
        eps: float = 1e-6
        """added to the standard deviation in `std`"""

        def __post_init__(self) -> None:
            if self.shaping < 0 or not 0 <= self.repair_scale <= 1:
                raise ValueError(
                    f"expected shaping ≥ 0 and 0 ≤ repair_scale ≤ 1, got {self.shaping} and {self.repair_scale}."
                )

    config: Config

    def run(
        self,
        *,
        trajectories: Trajectories,
        rewards: Annotated[Rewards, same_rows("trajectories")],
        revisions: Trajectories,
        revision_rewards: Annotated[Rewards, same_rows("revisions")],
    ) -> Outputs:
        """Shapes, normalises, masks; then adds revisions to train on."""
        check_aligned(trajectories, rewards)
        check_aligned(revisions, revision_rewards)
        trajectories.index_of(revisions.parent)
        settings = self.config
        share = repair_share(revisions.parent, revision_rewards.correct, revision_rewards.valid, trajectories.uid)
        phi = torch.where(rewards.correct | ~rewards.valid, 0.0, settings.repair_scale * share)
        shaped = rewards.replace(value=rewards.value + (settings.shaping * phi).float())
        group = trajectories.group
        advantage = group_advantage(shaped.value, group, rewards.valid, normalize=settings.normalize, eps=settings.eps)
        gate, best, own = fewest_edits(trajectories, rewards, revisions, revision_rewards)
        # Failures with a successful revision that edits something.
        repaired = torch.isin(trajectories.uid, revisions.parent[best])
        lowered = advantage if settings.raise_edits else torch.where(repaired, advantage.clamp(max=0), advantage)
        credit = self._credit(trajectories, lowered, gate)
        valid = rewards.valid
        revised = torch.isin(trajectories.uid, revisions.parent)
        self.context.log(
            **group_metrics(shaped, group, zero_groups(advantage, group)),
            **shaping_statistics(rewards.value[valid], shaped.value[valid], phi[valid], rewards.correct[valid]),
            **_repair_metrics(rewards, revised, repaired, advantage, gate, share),
            trained_revisions=Count(len(best) if settings.train_revision else 0),
        )
        if not settings.train_revision or not len(best):
            return Outputs(trained=trajectories, credit=credit)
        extra, extra_credit = self._positives(trajectories, shaped, revisions.select(best), own)
        return Outputs(trained=Trajectories.concat([trajectories, extra]), credit=Credit.concat([credit, extra_credit]))

    def _credit(self, trajectories: Trajectories, advantage: Tensor, gate: Jagged) -> Credit:
        spread = trajectories.response_tokens.spread(advantage)
        mask = training_mask(trajectories.response_tokens, trajectories.inherited)
        if self.config.mask == "none":
            gate = gate.with_values(torch.ones_like(gate.values))
        if self.config.mask == "loss":
            mask = mask.with_values(mask.values & gate.values)
        spread = spread.with_values(torch.where(gate.values, spread.values, 0.0))
        return Credit(uid=trajectories.uid, advantage=spread, mask=mask, columns={"gate": gate})

    def _positives(
        self, trajectories: Trajectories, shaped: Rewards, chosen: Trajectories, edited: Jagged
    ) -> tuple[Trajectories, Credit]:
        """Revisions with the advantage of reward 1 in their original's group, on edited tokens alone (our reading)."""
        settings = self.config
        parents = trajectories.index_of(chosen.parent)
        # The advantage of a response of reward 1 against the trajectories of its group, to which it does not belong.
        moments = group_moments(shaped.value, trajectories.group, shaped.valid)
        mean, std, count = (moment[parents] for moment in moments)
        scale = {
            "std": std + settings.eps,
            "mean": torch.ones_like(std),
            "std_exact": std.clamp(min=EXACT_ZERO),
            "over_mean": mean.clamp(min=EXACT_ZERO),
        }
        # With one reward in a group there is nothing to compare.
        flat = (std < EXACT_ZERO) | (count < 2)
        advantage = torch.where(flat, 0.0, (1.0 - mean) / scale[settings.normalize]).clamp(min=0.0).float()
        chosen = chosen.replace(group=trajectories.group[parents])
        spread = chosen.response_tokens.spread(advantage)
        spread = spread.with_values(torch.where(edited.values, spread.values, 0.0))
        return chosen, Credit(uid=chosen.uid, advantage=spread, mask=edited, columns={"gate": edited})

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The shaped reward, the formula of its group, and the tokens that the repair changes."""
        trajectories: Trajectories = inputs["trajectories"]
        rewards: Rewards = inputs["rewards"]
        verdicts: Rewards = inputs["revision_rewards"]
        credit: Credit = outputs["credit"]
        settings = self.config
        share = repair_share(inputs["revisions"].parent, verdicts.correct, verdicts.valid, trajectories.uid)
        phi = torch.where(rewards.correct | ~rewards.valid, 0.0, settings.repair_scale * share)
        shaped = rewards.value + (settings.shaping * phi).float()
        formulas = group_explanation(
            shaped,
            trajectories.group,
            rewards.valid,
            normalize=settings.normalize,
            eps=settings.eps,
            name="R",
            several="R of its group",
        )
        place = {uid: i for i, uid in enumerate(trajectories.uid.tolist())}
        texts = []
        for row, uid in enumerate(credit.uid.tolist()):
            trained = credit.advantage.row(row)[credit.mask.row(row) & (credit.advantage.row(row) != 0)]
            tokens = f"credit on {len(trained)} of {len(credit.mask.row(row))} tokens"
            i = place.get(uid, -1)
            if i < 0:
                given = signed(float(trained[0])) if len(trained) else "0"
                text = f"a successful revision, against the group of its original: (1 − mean)/std = {given}"
                texts.append(f"{text}\n{tokens}, those that the revision changes")
                continue
            parts = f"{decimal(float(rewards.value[i]))} + {decimal(settings.shaping)}·{decimal(float(phi[i]))}"
            text = f"R = r + λ φ = {parts} = {decimal(float(shaped[i]))}\n{formulas[i]}" if phi[i] else formulas[i]
            only = ", those that its repair changes" if not bool(credit.columns["gate"].row(row).all()) else ""
            texts.append(f"{text}\n{tokens}{only}")
        return texts


def _repair_metrics(
    rewards: Rewards, revised: Tensor, repaired: Tensor, advantage: Tensor, gate: Jagged, share: Tensor
) -> dict[str, float]:
    wrong = rewards.valid & ~rewards.correct
    num_wrong = max(int(wrong.sum()), 1)
    num_repaired = max(int(repaired.sum()), 1)
    return {
        "wrong": float(wrong.sum()),
        "revised_share": float(revised[wrong].sum()) / num_wrong,
        "repair_rate": float(share[wrong].sum()) / num_wrong,
        "repaired_share": float(repaired.sum()) / num_wrong,
        "edited_share": float(gate.mean()[repaired].sum()) / num_repaired if len(gate) else 0.0,
        "unchanged_share": float((gate.sum()[repaired] == 0).sum()) / num_repaired,
        "raised_edit_share": float((advantage[repaired] > 0).sum()) / num_repaired,
    }


def edited_tokens(first: Sequence[int], second: Sequence[int]) -> tuple[list[bool], list[bool], int]:
    """Tokens of two sequences that a shortest Levenshtein alignment does not match, and the distance.

    Replaced and deleted tokens of `first`, replaced and inserted tokens of `second` are marked; a token that both hold
    is never marked, so a repair that only inserts marks nothing in `first`.

    >>> edited_tokens([1, 2, 3], [1, 5, 3, 4])
    ([False, True, False], [False, True, False, True], 2)
    """
    from rapidfuzz.distance import Levenshtein

    left = [False] * len(first)
    right = [False] * len(second)
    operations = Levenshtein.editops(first, second)
    for step in operations:
        if step.tag != "insert":
            left[step.src_pos] = True
        if step.tag != "delete":
            right[step.dest_pos] = True
    return left, right, len(operations)


def fewest_edits(
    trajectories: Trajectories, rewards: Rewards, revisions: Trajectories, revision_rewards: Rewards
) -> tuple[Jagged, Tensor, Jagged]:
    """Edit mask of every trajectory; rows of the chosen revisions [C]; the edited tokens of each chosen revision.

    For each failure, the successful revision with the smallest Levenshtein distance is chosen, the first one on a tie.
    A revision equal to its original, for which the verifier contradicts itself, is not chosen.
    """
    with extra("train", "the alignment of revisions"):
        from rapidfuzz.distance import Levenshtein

    tokens = trajectories.response_tokens.to_lists()
    revised = revisions.response_tokens
    parent_rows = trajectories.index_of(revisions.parent)
    parents = parent_rows.tolist()
    usable = revision_rewards.correct & revision_rewards.valid & ~rewards.correct[parent_rows]
    nearest: dict[int, tuple[int, int]] = {}
    for row in usable.nonzero(as_tuple=True)[0].tolist():
        best = nearest.get(parents[row], (sys.maxsize, -1))[0]
        # Beyond the cutoff the search stops early; the alignment itself is computed for the chosen revision only.
        distance = Levenshtein.distance(tokens[parents[row]], revised.row(row).tolist(), score_cutoff=best)
        if 0 < distance < best:
            nearest[parents[row]] = (distance, row)
    chosen = [nearest[i][1] for i in sorted(nearest)]
    edits = {parents[row]: edited_tokens(tokens[parents[row]], revised.row(row).tolist()) for row in chosen}
    masks = [edits[i][0] if i in edits else [True] * len(row) for i, row in enumerate(tokens)]
    own = Jagged.from_rows([edits[parents[row]][1] for row in chosen], torch.bool)
    return Jagged.from_rows(masks, torch.bool), torch.tensor(chosen, dtype=torch.int64), own
