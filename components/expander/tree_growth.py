"""Two ways to grow trees of trajectories: by segments of fixed length (SPO-Tree) and at uncertain tokens (TreeRL).

Both give leaves whose `parent` and `inherited` tell the tree (`components.advantage.tree` reads it): `parent` is a leaf
that shares the prefix, and the tokens after `inherited` were sampled in this row and in no other. Every draw is keyed
by the prompt and the place of the branch in its tree, so a prompt's tree does not depend on the other prompts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from components.expander.tree_thoughts import in_last_thought, with_closed_ends, with_whole_thoughts
from components.rollouts.requests import keyed_seeds, sample_fresh, sample_from_prefix
from components.segmenter.entropy_cuts import rank_in_row
from components.segmenter.thought import ends_of_stop, token_pieces
from pipeline.core.component import Context
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Policy, Prompts, Sampling, Trajectories, known_entropies

Measure = Literal["logprob", "entropy"]


@dataclass(frozen=True, kw_only=True)
class SegmentRule:
    """SPO-Tree (2505.23564): a level of branches every `tokens` tokens."""

    branching: tuple[int, ...] = (6, 6, 6)
    """branches at the prompt, at the end of the first segment, …; the last level runs to the end. Leaves are at most
    their product"""
    tokens: int = 64
    """M, tokens per segment"""

    def __post_init__(self) -> None:
        if not self.branching or min(self.branching) < 1 or self.tokens < 1:
            raise ValueError(
                f"branching is {list(self.branching)}, tokens {self.tokens}; wanted one or more levels of at least 1, "
                "and tokens ≥ 1."
            )


@dataclass(frozen=True, kw_only=True)
class UncertainRule:
    """TreeRL's EPTree (M, N, L, T) (2506.11902): M (1 + N L T) leaves per prompt, unless responses have fewer tokens than branches."""

    chains: int = 6
    """M, whole responses that trees begin with, per prompt"""
    points: int = 2
    """N, tokens branched at per tree and round"""
    rounds: int = 1
    """L, rounds; later ones also branch at tokens of earlier branches"""
    branches: int = 2
    """T, new responses from before each of these tokens"""
    measure: Measure = "logprob"
    """uncertainty of a token: −log π of the sampled token, as in the released code, or the entropy it was drawn with"""
    not_after: tuple[str, ...] = ()
    """no branches after the token that completes one of these strings (where the answer is announced)"""

    def __post_init__(self) -> None:
        if min(self.chains, self.points, self.branches) < 1 or self.rounds < 0:
            raise ValueError(
                f"chains {self.chains}, points {self.points}, rounds {self.rounds}, branches {self.branches}; wanted "
                "at least 1 of each, "
                "and rounds 0 (chains only) or more."
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Grown:
    """Leaves, prompt by prompt, and what growing cost."""

    leaves: Trajectories
    discarded_tokens: int = 0
    missed_branches: int = 0


def grow_segments(prompts: Prompts, policy: Policy, rule: SegmentRule, sampling: Sampling, context: Context) -> Grown:
    """Every branch that still runs at the end of its segment is continued `branching[level]` times, independently.

    The first continuation keeps the row (uid, parent, inherited), the others are new rows. A branch that ends within
    its segment is a leaf at once.
    """
    seeds = keyed_seeds(context.rng(), prompts.uid, 0, _slots(rule.branching))
    done: list[Trajectories] = []
    discarded = 0
    rows, place = torch.arange(len(prompts)), torch.zeros(len(prompts), dtype=torch.int64)
    running: Trajectories | None = None
    for level, width in enumerate(rule.branching):
        budget = (
            sampling.max_tokens
            if level == len(rule.branching) - 1
            else min((level + 1) * rule.tokens, sampling.max_tokens)
        )
        here = dataclasses.replace(sampling, max_tokens=budget)
        rows, place = rows.repeat_interleave(width), _children(place, width)
        seed, uid = seeds[rows, _slots(rule.branching[:level]) + place], context.uids(len(rows))
        if running is None:
            made = sample_fresh(policy, prompts, rows, seed, here, uid)
        else:
            branch = torch.arange(len(running)).repeat_interleave(width)
            made, lost = _continue(
                policy, running.select(branch), running.response_tokens.lengths[branch], seed, here, uid
            )
            made, discarded = _first_keeps_row(made, running.select(branch), width), discarded + lost
        # A shorter row that ran out of budget filled the model's context.
        ended = torch.tensor([reason != "length" for reason in made.finish_reason], dtype=torch.bool)
        ended |= (made.response_tokens.lengths < budget) | (budget >= sampling.max_tokens)
        done.append(made.select(ended))
        running, rows, place = made.select(~ended), rows[~ended], place[~ended]
        if sampling.thoughts is not None:
            running = with_closed_ends(running, sampling.thoughts, policy.tokenizer)
    return Grown(leaves=_by_prompt(Trajectories.concat(done), prompts), discarded_tokens=discarded)


def grow_uncertain(
    prompts: Prompts, policy: Policy, rule: UncertainRule, sampling: Sampling, context: Context
) -> Grown:
    """Per round, each tree (a first chain with all that branched from it) is branched at its most uncertain tokens.

    A branch inherits what is before the token and samples that token anew. A token is branched at in one round only: a
    reconstruction, the released code would let later rounds come back to it.
    """
    per_round = rule.points * rule.branches
    seeds = keyed_seeds(context.rng(), prompts.uid, 0, rule.chains * (1 + rule.rounds * per_round))
    rows = torch.arange(len(prompts)).repeat_interleave(rule.chains)
    chain = torch.arange(rule.chains).repeat(len(prompts))
    leaves = sample_fresh(policy, prompts, rows, seeds[rows, chain], sampling, context.uids(len(rows)))
    tree, used, discarded, missed = torch.arange(len(rows)), _closed_tokens(leaves, rule, policy), 0, 0
    for number in range(rule.rounds):
        row, token, rank = most_uncertain(uncertainty(leaves, rule.measure), used, tree, rule.points)
        used.values[used.offsets[row] + token] = True
        missed += (len(rows) * rule.points - len(row)) * rule.branches
        branch = torch.arange(rule.branches).repeat(len(row))
        row, token, rank = (x.repeat_interleave(rule.branches) for x in (row, token, rank))
        slot = rule.chains + (number * rule.chains + chain[tree[row]]) * per_round + rank * rule.branches + branch
        seed, uid = seeds[rows[tree[row]], slot], context.uids(len(row))
        made, lost = _continue(policy, leaves.select(row), token, seed, sampling, uid)
        made, discarded = made.replace(group=made.prompt_uid.clone()), discarded + lost
        leaves, tree = Trajectories.concat([leaves, made]), torch.cat([tree, tree[row]])
        used = Jagged.concat([used, _closed_tokens(made, rule, policy)])
    return Grown(leaves=_by_prompt(leaves, prompts), discarded_tokens=discarded, missed_branches=missed)


def uncertainty(trajectories: Trajectories, measure: Measure) -> Jagged:
    """Float32 over response tokens: −log-prob of the sampled token, or entropy; in steps of 0.001 nat.

    Rows of a tree often repeat each other, and their equal scores differ by rounding, which depends on the batch. In
    steps they are ties.
    """
    entropies = trajectories.entropies.values
    values = (
        known_entropies(entropies, "expander.tree") if measure == "entropy" else -trajectories.engine_logprobs.values
    )
    return trajectories.entropies.with_values((values * 1000).round() / 1000)


def most_uncertain(score: Jagged, closed: Jagged, tree: Tensor, points: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `points` highest scores of each tree among tokens that are not closed.

    Args:
        score: float over the response tokens of N rows.
        closed: bool over the same tokens.
        tree: int64 [N], the tree of each row.
        points: most tokens per tree.

    Returns:
        Row, token and rank in its tree (0 for the highest) of each chosen token; equal scores in the order of rows and
        tokens.
    """
    order = torch.argsort(tree, stable=True)
    count = int(tree.max()) + 1 if len(tree) else 0
    values = score.with_values(score.values.masked_fill(closed.values, -torch.inf)).select(order)
    sizes = torch.zeros(count, dtype=torch.int64).index_add_(0, tree[order], values.lengths)
    rank = rank_in_row(Jagged.from_lengths(values.values, sizes)).values
    chosen = (rank < points) & (values.values > -torch.inf)
    return order[values.row_ids[chosen]], values.positions[chosen], rank[chosen]


def _closed_tokens(trajectories: Trajectories, rule: UncertainRule, policy: Policy) -> Jagged:
    """Bool over response tokens: inherited ones (they belong to another row), and what follows a string of `not_after`."""
    tokens = trajectories.response_tokens
    closed = tokens.positions < trajectories.inherited[tokens.row_ids]
    if rule.not_after:
        ends = [
            [min(ends_of_stop(pieces, s)[:1] or [len(pieces)]) for s in rule.not_after]
            for pieces in token_pieces(policy.tokenizer, tokens)
        ]
        limit = torch.tensor([min(row) for row in ends], dtype=torch.int64)
        closed |= tokens.positions >= limit[tokens.row_ids]
    return tokens.with_values(closed)


def _continue(
    policy: Policy, parents: Trajectories, prefix: Tensor, seed: Tensor, sampling: Sampling, uid: Tensor
) -> tuple[Trajectories, int]:
    """Continuations with exact thought ends, and the number of sampled tokens that had to be cut off for it."""
    if sampling.thoughts is None:
        return sample_from_prefix(policy, parents, prefix, seed, sampling, uid), 0
    # A prefix that ends in its last thought has one stop string left, not a thought of its own.
    closing = in_last_thought(parents, prefix, sampling.thoughts, policy.tokenizer)
    to_stop = dataclasses.replace(sampling, thoughts=None, stop=(sampling.thoughts.stop,))
    parts = [
        sample_from_prefix(policy, parents.select(rows), prefix[rows], seed[rows], how, uid[rows])
        for rows, how in (
            ((~closing).nonzero(as_tuple=True)[0], sampling),
            (closing.nonzero(as_tuple=True)[0], to_stop),
        )
    ]
    made = Trajectories.concat(parts).select(torch.argsort(torch.argsort(closing.long(), stable=True)))
    whole = with_whole_thoughts(made, sampling.thoughts, policy.tokenizer)
    return whole, int(made.response_tokens.lengths.sum() - whole.response_tokens.lengths.sum())


def _first_keeps_row(made: Trajectories, parents: Trajectories, width: int) -> Trajectories:
    first = torch.arange(len(made)) % width == 0
    return made.replace(
        uid=torch.where(first, parents.uid, made.uid),
        parent=torch.where(first, parents.parent, parents.uid),
        inherited=torch.where(first, parents.inherited, made.inherited),
        group=made.prompt_uid.clone(),
    )


def _children(place: Tensor, width: int) -> Tensor:
    """Place of each child among all of its level, from its parent's."""
    return (place[:, None] * width + torch.arange(width)).reshape(-1)


def _slots(branching: tuple[int, ...]) -> int:
    """Branches in a full tree."""
    total, level = 0, 1
    for width in branching:
        level *= width
        total += level
    return total


def _by_prompt(leaves: Trajectories, prompts: Prompts) -> Trajectories:
    """Rows prompt by prompt, otherwise in the order in which they began."""
    row = prompts.index_of(leaves.prompt_uid)
    by_uid = torch.argsort(leaves.uid)
    return leaves.select(by_uid[torch.argsort(row[by_uid], stable=True)])
