"""Counterfactual comparison: the policy revises its wrong responses, given siblings of the same problem (IBPO)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from creditgraph.components.models.load import context_length
from creditgraph.components.rollouts.requests import (
    LENGTH_METRICS,
    SAMPLING_NAMES,
    SamplingSettings,
    keyed_seeds,
    length_metrics,
    unended,
)
from creditgraph.components.rollouts.rewards import finite_rewards
from creditgraph.components.rollouts.second_turn import encoded, problem_of, second_turn
from creditgraph.components.rollouts.thoughts import thought_texts
from creditgraph.components.text.templates import revise_prompt
from creditgraph.pipeline.core.component import Component, Context, same_rows
from creditgraph.pipeline.core.handles import Policy, Verifier
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Batch, Prompts, Rewards, Trajectories, check_aligned
from creditgraph.pipeline.core.streams import keys_within

LEAST_GROUP = 3  # two siblings, which IBPO's comparison needs (second-hand: notes on the paper)
NOT_ENDED = "the revision did not end within its budget"


@dataclass(frozen=True, eq=False, kw_only=True)
class References(Batch):
    """The reference shown for each revision.

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
    chosen cyclically from the next row on, so that a group's wrong trajectories do not all see the same sibling.
    Invalid rows are neither revised nor shown.

    >>> correct = torch.tensor([True, False, False, False])
    >>> wrong, shown = pair_up(torch.tensor([1, 1, 1, 2]), correct, torch.ones(4, dtype=torch.bool), 2)
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
            siblings = [r for r in rows[place + 1 :] + rows[:place] if right[r] or not only_correct]
            siblings.sort(key=lambda r: not right[r])  # stable: each kind stays in cyclic order
            pairs += [(row, r) for r in siblings[:most]]
    # Trajectory order, whatever the order of groups; the sort is stable, so references keep theirs.
    pairs.sort(key=lambda pair: pair[0])
    table = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    return table[:, 0].contiguous(), table[:, 1].contiguous()


class Compare(Component):
    """Samples, for each wrong trajectory y and sibling y_ref, a revision ŷ from a prompt with the problem, y and y_ref.

    That each pair gives one revision is second-hand (notes on the paper). The revision's `parent` is y, its
    `prompt_uid` the original problem, its `prompt_tokens` the revision prompt. Sampling settings other than those of
    y's sampler are refused, so that y and ŷ end alike. A wrong trajectory without a sibling gets no revision; without a
    correct sibling it is shown wrong ones (our reading), or none under `only_correct`. A revision that does not end
    counts as wrong whatever it holds; one that could not be verified stays invalid. A pair whose prompt leaves no room
    in the model's context for a repair as long as y is left out (our reading). All are counted.
    """

    paper = "2605.16302"
    same_settings: ClassVar[Mapping[str, tuple[str, ...]]] = {"trajectories": SAMPLING_NAMES}
    metrics = (
        *LENGTH_METRICS,
        Metric("revisions", "rows", "revisions sampled"),
        Metric("no_room_share", "share", "pairs left out because prompt and repair would exceed the model's context"),
        Metric(
            "unrevised_share",
            "share",
            "wrong trajectories without a revision",
            alarm="no wrong response was revised, so no credit came from revisions. no_room_share, "
            "no_correct_sibling_share and unended_share say why.",
        ),
        Metric("no_correct_sibling_share", "share", "wrong trajectories of groups without a correct one"),
        Metric("correct_reference_share", "share", "revisions that were shown a correct reference"),
        Metric("unended_share", "share", "revisions without an end"),
        Metric("invalid", "rows", "revisions that could not be verified"),
        Metric("repaired_share", "share", "revisions that are correct"),
        Metric("repaired_by_correct", "share", "the same among those shown a correct reference"),
        Metric("repaired_by_wrong", "share", "the same among those shown a wrong one"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SamplingSettings):
        """Sampling of the revisions and the number of references."""

        references: int = 7
        """K − 1: siblings each wrong trajectory is shown, one revision each; 1 is the single-reference form, which is
        reported to lose most of the gain (second-hand)"""
        only_correct: bool = False
        """skip wrong siblings: a group without a success is then not revised at all"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.references < 1:
                raise ValueError(f"expected references ≥ 1 (siblings per wrong trajectory), got {self.references}.")

    config: Config

    @classmethod
    def misfits(cls, node: Any, graph: Any, model: Any, data: Any) -> list[str]:
        """Groups in which a trajectory has fewer than two siblings."""
        sampler = graph[node.wires["trajectories"][0].source]
        size = getattr(sampler.config, "group_size", LEAST_GROUP)
        if size >= LEAST_GROUP:
            return []
        return [
            f"{sampler.name}.group_size: expected at least {LEAST_GROUP}, as {node.use} compares a trajectory with two "
            f"siblings or more, got {size}. Set {sampler.name}.group_size=8."
        ]

    @classmethod
    def shown_responses(cls, config: Any) -> int:
        """The trajectory and one sibling."""
        return 2

    def setup(self, context: Context) -> None:
        """Reads the length of the model's context."""
        super().setup(context)
        self.room = context_length(context.model)

    def run(
        self,
        *,
        prompts: Prompts,
        trajectories: Trajectories,
        rewards: Annotated[Rewards, same_rows("trajectories")],
        policy: Policy,
        verifier: Verifier,
    ) -> Outputs:
        """Samples all revisions in one request batch, then verifies them."""
        check_aligned(trajectories, rewards)
        settings = self.config
        wrong, shown = pair_up(
            trajectories.group, rewards.correct, rewards.valid, settings.references, settings.only_correct
        )
        firsts = trajectories.select(wrong)
        steps = thought_texts(trajectories, policy.tokenizer)
        prompt_rows = prompts.index_of(firsts.prompt_uid).tolist()
        texts = [
            revise_prompt(*problem_of(prompts, row), steps[bad], steps[sibling], policy.tokenizer, settings.mode)
            for row, bad, sibling in zip(prompt_rows, wrong.tolist(), shown.tolist(), strict=True)
        ]
        # One keyed draw per reference place: a revision does not depend on what else is revised.
        place = torch.arange(len(wrong)) - torch.searchsorted(wrong, wrong)
        seeds = keyed_seeds(self.context.rng(), keys_within(trajectories.prompt_uid), 0, settings.references)
        seed = seeds[wrong, place]
        fits = encoded(policy.tokenizer, texts).lengths + firsts.response_tokens.lengths <= self.room
        firsts = firsts.select(fits)
        wrong = wrong[fits]
        shown = shown[fits]
        texts = list(compress(texts, fits.tolist()))
        uid = self.context.uids(len(wrong))
        revisions = second_turn(policy, prompts, firsts, texts, seed[fits], settings.sampling(), uid)
        verdicts = _unended_as_wrong(finite_rewards(verifier.verify(prompts, revisions)), unended(revisions))
        for row in (~verdicts.valid).nonzero(as_tuple=True)[0].tolist():
            self.context.reject({"revision": int(uid[row]), "trajectory": int(firsts.uid[row])}, verdicts.detail[row])
        self.context.log(
            **length_metrics(revisions),
            no_room_share=float((~fits).double().mean()) if len(fits) else 0.0,
            **_metrics(trajectories.group, rewards, wrong, shown, unended(revisions), verdicts),
        )
        references = References(uid=uid, reference=trajectories.uid[shown], correct=rewards.correct[shown])
        return Outputs(revisions=revisions, rewards=verdicts, references=references)


def _unended_as_wrong(rewards: Rewards, cut: Tensor) -> Rewards:
    detail = [NOT_ENDED if is_cut else text for is_cut, text in zip(cut.tolist(), rewards.detail, strict=True)]
    return rewards.replace(
        value=rewards.value.masked_fill(cut, 0.0),
        correct=rewards.correct & ~cut,
        valid=rewards.valid | cut,
        detail=detail,
    )


def _metrics(
    group: Tensor, rewards: Rewards, wrong: Tensor, shown: Tensor, cut: Tensor, verdicts: Rewards
) -> dict[str, float]:
    is_wrong = rewards.valid & ~rewards.correct
    has_correct_sibling = torch.isin(group, group[rewards.valid & rewards.correct])
    revised = torch.zeros(len(group), dtype=torch.bool).index_fill_(0, wrong, True)
    shown_correct = rewards.correct[shown]
    num_wrong = max(int(is_wrong.sum()), 1)
    num_revisions = max(len(verdicts), 1)
    return {
        "revisions": len(verdicts),
        "unrevised_share": float((is_wrong & ~revised).sum()) / num_wrong,
        "no_correct_sibling_share": float((is_wrong & ~has_correct_sibling).sum()) / num_wrong,
        "correct_reference_share": float(shown_correct.sum()) / num_revisions,
        "unended_share": float(cut.sum()) / num_revisions,
        "invalid": float((~verdicts.valid).sum()),
        "repaired_share": float(verdicts.correct.sum()) / num_revisions,
        "repaired_by_correct": float((verdicts.correct & shown_correct).sum()) / max(int(shown_correct.sum()), 1),
        "repaired_by_wrong": float((verdicts.correct & ~shown_correct).sum()) / max(int((~shown_correct).sum()), 1),
    }
