"""Counterfactual comparison: the policy revises its wrong chains beside sibling chains of the same problem (IBPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from components.localizer.self_localizer import question_of
from components.rewards.outcome import finite_rewards
from components.rollouts.requests import LENGTH_METRICS, SamplingSettings, keyed_seeds, length_metrics
from components.rollouts.second_turn import second_turn, unended
from components.rollouts.thoughts import thought_texts
from components.text.templates import revise_prompt
from pipeline.core.component import Component, same_rows
from pipeline.core.metric import Metric
from pipeline.core.payloads import Batch, Policy, Prompts, Rewards, Trajectories, Verifier, check_aligned
from pipeline.core.streams import keys_within

NOT_ENDED = "the revision did not end within its budget"


@dataclass(frozen=True, eq=False, kw_only=True)
class References(Batch):
    """What each revision was shown.

    Attributes:
        reference: int64 [N], uid of the sibling.
        correct: bool [N], whether the sibling is right.
    """

    reference: Tensor
    correct: Tensor


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """One row per (wrong trajectory, reference), trajectory by trajectory, correct references first."""

    revisions: Trajectories
    rewards: Annotated[Rewards, same_rows("revisions")]
    references: Annotated[References, same_rows("revisions")]


def pair_up(
    group: Tensor, correct: Tensor, valid: Tensor, most: int, only_correct: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows of (wrong trajectory, reference) pairs, int64 [P] each.

    Every wrong trajectory gets up to `most` siblings of its group: correct ones first, then wrong ones. Both kinds are
    taken cyclically from the row after it, so that a group's wrong trajectories do not all see the same sibling.
    Invalid rows are neither revised nor shown.

    >>> wrong, shown = pair_up(torch.tensor([1, 1, 1, 2]), torch.tensor([True, False, False, False]), torch.ones(4, dtype=torch.bool), 2)
    >>> wrong.tolist(), shown.tolist()
    ([1, 1, 2, 2], [0, 2, 0, 1])
    """
    members: dict[int, list[int]] = {}
    for row, (key, usable) in enumerate(zip(group.tolist(), valid.tolist(), strict=True)):
        if usable:
            members.setdefault(key, []).append(row)
    right = correct.tolist()
    pairs = []
    for rows in members.values():
        for place, row in enumerate(rows):
            if right[row]:
                continue
            siblings = rows[place + 1 :] + rows[:place]
            ordered = [r for r in siblings if right[r]] + [r for r in siblings if not right[r] and not only_correct]
            pairs += [(row, r) for r in ordered[:most]]
    # Trajectory order, whatever the order of groups; the sort is stable, so references keep theirs.
    pairs.sort(key=lambda pair: pair[0])
    table = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    return table[:, 0].contiguous(), table[:, 1].contiguous()


class Compare(Component):
    """Pairs each wrong trajectory y with sibling references, and lets the policy write a revision ŷ from (x; y, y_ref) per reference [S].

    The revision's `parent` is y, its `prompt_uid` the original problem, its `prompt_tokens` the revision prompt. Use
    the sampler's mode and limits, so that y and ŷ end alike. Defined cases: a wrong trajectory without a sibling gets
    no revision; without a correct sibling it is shown wrong ones [R], or none under `only_correct`; a revision that
    does not end counts as wrong whatever it holds; one that could not be judged stays invalid. All are counted.
    """

    paper = "2605.16302"
    metrics = (
        *LENGTH_METRICS,
        Metric("revisions", "rows", "revisions sampled"),
        Metric("unrevised_share", "share", "wrong trajectories without a revision"),
        Metric("no_correct_sibling_share", "share", "wrong trajectories of groups without a right one"),
        Metric("correct_reference_share", "share", "revisions that were shown a right reference"),
        Metric("unended_share", "share", "revisions without an end"),
        Metric("invalid", "rows", "revisions without a usable verdict"),
        Metric("repaired_share", "share", "revisions that are right"),
        Metric("repaired_by_correct", "share", "the same among those shown a right reference"),
        Metric("repaired_by_wrong", "share", "the same among those shown a wrong one"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SamplingSettings):
        """Sampling of the revisions and the number of references."""

        references: int = 7
        """K − 1: siblings each wrong trajectory is shown, one revision each; 1 is the paper's single-reference form"""
        only_correct: bool = False
        """skip wrong siblings: a group without a success is then not revised at all"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.references < 1:
                raise ValueError(f"references is {self.references}; wanted at least 1 sibling per wrong trajectory.")

    config: Config

    def run(
        self,
        *,
        prompts: Prompts,
        trajectories: Trajectories,
        rewards: Annotated[Rewards, same_rows("trajectories")],
        policy: Policy,
        verifier: Verifier,
    ) -> Outputs:
        """Samples all revisions in one request batch, then judges them."""
        check_aligned(trajectories, rewards)
        settings = self.config
        wrong, shown = pair_up(
            trajectories.group, rewards.correct, rewards.valid, settings.references, settings.only_correct
        )
        firsts = trajectories.select(wrong)
        asked = _asked(prompts, trajectories, wrong.tolist(), shown.tolist(), policy)
        # One keyed draw per reference place: a revision does not depend on what else is revised.
        place = torch.arange(len(wrong)) - torch.searchsorted(wrong, wrong)
        table = keyed_seeds(self.context.rng(), keys_within(trajectories.prompt_uid), 0, settings.references)
        uid = self.context.uids(len(wrong))
        made = second_turn(policy, prompts, firsts, asked, table[wrong, place], settings.sampling(), uid)
        verdicts = _ended_only(finite_rewards(verifier.verify(prompts, made)), made)
        for row in (~verdicts.valid).nonzero(as_tuple=True)[0].tolist():
            self.context.reject({"revision": int(uid[row]), "trajectory": int(firsts.uid[row])}, verdicts.detail[row])
        self._count(trajectories, rewards, wrong, shown, made, verdicts)
        references = References(uid=uid, reference=trajectories.uid[shown], correct=rewards.correct[shown])
        return Outputs(revisions=made, rewards=verdicts, references=references)

    def _count(
        self,
        trajectories: Trajectories,
        rewards: Rewards,
        wrong: Tensor,
        shown: Tensor,
        made: Trajectories,
        verdicts: Rewards,
    ) -> None:
        is_wrong = rewards.valid & ~rewards.correct
        has_right = torch.isin(trajectories.group, trajectories.group[rewards.valid & rewards.correct])
        asked = torch.zeros(len(trajectories), dtype=torch.bool).index_fill_(0, wrong, True)
        count, total = max(int(is_wrong.sum()), 1), max(len(made), 1)
        to_right = rewards.correct[shown]
        self.context.log(
            **length_metrics(made),
            revisions=len(made),
            unrevised_share=float((is_wrong & ~asked).sum()) / count,
            no_correct_sibling_share=float((is_wrong & ~has_right).sum()) / count,
            correct_reference_share=float(to_right.sum()) / total,
            unended_share=float(unended(made).sum()) / total,
            invalid=float((~verdicts.valid).sum()),
            repaired_share=float(verdicts.correct.sum()) / total,
            repaired_by_correct=float((verdicts.correct & to_right).sum()) / max(int(to_right.sum()), 1),
            repaired_by_wrong=float((verdicts.correct & ~to_right).sum()) / max(int((~to_right).sum()), 1),
        )


def _asked(
    prompts: Prompts, trajectories: Trajectories, wrong: list[int], shown: list[int], policy: Policy
) -> list[str]:
    steps = thought_texts(trajectories, policy.tokenizer)
    rows = prompts.index_of(trajectories.prompt_uid).tolist()
    return [
        revise_prompt(
            prompts.metadata[rows[bad]], question_of(prompts, rows[bad]), steps[bad], steps[sibling], policy.tokenizer
        )
        for bad, sibling in zip(wrong, shown, strict=True)
    ]


def _ended_only(rewards: Rewards, made: Trajectories) -> Rewards:
    cut = unended(made)
    detail = [NOT_ENDED if is_cut else text for is_cut, text in zip(cut.tolist(), rewards.detail, strict=True)]
    return rewards.replace(
        value=rewards.value.masked_fill(cut, 0.0),
        correct=rewards.correct & ~cut,
        valid=rewards.valid | cut,
        detail=detail,
    )
