"""Two ways to grow trees of trajectories: by segments of fixed length (SPO-Tree) and at uncertain tokens (TreeRL).

Both return leaves whose `parent` and `inherited` describe the tree (`advantage/trees/tree.py` reads it):
`parent` is a leaf that shares the prefix, and the tokens after `inherited` were sampled in this row and in no other.
Every draw is keyed by the prompt and the place of the branch in its tree, so a prompt's tree does not depend on the
other prompts.
"""

import dataclasses
import operator
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from creditgraph.components.rollouts.carry import CarriedBatch
from creditgraph.components.rollouts.requests import keyed_seeds, sample_fresh, sample_from_prefix
from creditgraph.components.rollouts.segments import rank_in_row
from creditgraph.components.text.stops import decode_rows, ends_of_stop, token_texts
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.handles import Policy, Sampling, ThoughtLimits, known_entropies
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Prompts, Trajectories

Measure = Literal["logprob", "entropy"]


@dataclass(frozen=True, kw_only=True)
class SegmentRule:
    """SPO-Tree (2505.23564): a level of branches every `tokens` tokens."""

    branching: tuple[int, ...] = (6, 6, 6)
    """branches at the prompt, at the end of the first segment, …; the last level runs to the end of the response"""
    tokens: int = 64
    """M, tokens per segment"""

    def __post_init__(self) -> None:
        if not self.branching or min(self.branching) < 1 or self.tokens < 1:
            raise ValueError(
                f"expected one or more levels of branching ≥ 1 and tokens ≥ 1, got branching {list(self.branching)} "
                f"and tokens {self.tokens}."
            )


@dataclass(frozen=True, kw_only=True)
class UncertainRule:
    """TreeRL's EPTree (M, N, L, T) (2506.11902): M (1 + N L T) leaves per prompt, fewer where responses are short."""

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
                f"expected chains, points and branches ≥ 1 and rounds ≥ 0 (0 is chains only), got chains "
                f"{self.chains}, points {self.points}, branches {self.branches}, rounds {self.rounds}."
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Grown:
    """Leaves, prompt by prompt, and counts of growing them."""

    leaves: Trajectories
    discarded_tokens: int = 0
    missed_branches: int = 0


def grow_segments(carried: CarriedBatch, rule: SegmentRule, sampling: Sampling, context: Context) -> Grown:
    """Continues every branch that has not ended at the end of its segment `branching[level]` times, independently.

    The first continuation keeps the row (uid, parent, inherited), the others are new rows. A branch that ends within
    its segment is a leaf at once, and so is one that is paused.
    """
    prompts, policy = carried.prompts, carried.policy
    seeds = keyed_seeds(carried.stream, prompts.uid, 0, _slots(rule.branching))
    done: list[Trajectories] = []
    discarded = 0
    rows = torch.arange(len(prompts))  # the prompt of each running branch
    place = torch.zeros(len(prompts), dtype=torch.int64)  # its place among all branches of its level in a full tree
    running: Trajectories | None = None
    for level, width in enumerate(rule.branching):
        last = level == len(rule.branching) - 1
        budget = sampling.max_tokens if last else min((level + 1) * rule.tokens, sampling.max_tokens)
        here = dataclasses.replace(sampling, max_tokens=budget)
        rows = rows.repeat_interleave(width)
        place = (place[:, None] * width + torch.arange(width)).reshape(-1)
        seed = seeds[rows, _slots(rule.branching[:level]) + place]
        uid = context.uids(len(rows))
        if running is None:
            grown = sample_fresh(policy, prompts, rows, seed, here, uid)
        else:
            parents = running.select(torch.arange(len(running)).repeat_interleave(width))
            grown, lost = _continue(policy, parents, parents.response_tokens.lengths, seed, here, uid)
            grown = _first_keeps_row(grown, parents, width)
            discarded += lost
        # A shorter row that ran out of budget filled the model's context.
        ended = torch.tensor([reason != "length" for reason in grown.finish_reason], dtype=torch.bool)
        ended |= (grown.response_tokens.lengths < budget) | (budget >= sampling.max_tokens)
        done.append(grown.select(ended))
        running = grown.select(~ended)
        rows = rows[~ended]
        place = place[~ended]
        if sampling.thoughts is not None:
            running = with_closed_ends(running, sampling.thoughts, policy.tokenizer)
    return Grown(leaves=_by_prompt(Trajectories.concat(done), prompts), discarded_tokens=discarded)


def grow_uncertain(carried: CarriedBatch, rule: UncertainRule, sampling: Sampling, context: Context) -> Grown:
    """Per round, branches each tree (a first response and all its branches) at its most uncertain tokens.

    A branch inherits the tokens before the chosen one and samples that token again. A token is branched at in one round
    only (our reading; in the released code later rounds may choose it again). A tree of a prompt with a paused row does
    not branch until that row has ended.
    """
    prompts, policy = carried.prompts, carried.policy
    per_round = rule.points * rule.branches
    seeds = keyed_seeds(carried.stream, prompts.uid, 0, rule.chains * (1 + rule.rounds * per_round))
    prompt_of_tree = torch.arange(len(prompts)).repeat_interleave(rule.chains)
    chain_of_tree = torch.arange(rule.chains).repeat(len(prompts))
    num_trees = len(prompt_of_tree)
    seed = seeds[prompt_of_tree, chain_of_tree]
    leaves = sample_fresh(policy, prompts, prompt_of_tree, seed, sampling, context.uids(num_trees))
    tree = torch.arange(num_trees)  # of each leaf
    closed = _closed_tokens(leaves, rule, policy)
    discarded = 0
    missed = 0
    for number in range(rule.rounds):
        grows = carried.complete(prompts.uid)[prompt_of_tree]
        waits = closed.with_values(closed.values | ~closed.spread(grows[tree]).values)
        row, token, rank = most_uncertain(uncertainty(leaves, rule.measure), waits, tree, rule.points)
        closed.values[closed.offsets[row] + token] = True
        missed += (int(grows.sum()) * rule.points - len(row)) * rule.branches
        branch = torch.arange(rule.branches).repeat(len(row))
        row, token, rank = (x.repeat_interleave(rule.branches) for x in (row, token, rank))
        parent_tree = tree[row]
        first_slot = rule.chains + (number * rule.chains + chain_of_tree[parent_tree]) * per_round
        seed = seeds[prompt_of_tree[parent_tree], first_slot + rank * rule.branches + branch]
        grown, lost = _continue(policy, leaves.select(row), token, seed, sampling, context.uids(len(row)))
        discarded += lost
        leaves = Trajectories.concat([leaves, grown.replace(group=grown.prompt_uid.clone())])
        tree = torch.cat([tree, parent_tree])
        closed = Jagged.concat([closed, _closed_tokens(grown, rule, policy)])
    return Grown(leaves=_by_prompt(leaves, prompts), discarded_tokens=discarded, missed_branches=missed)


def uncertainty(trajectories: Trajectories, measure: Measure) -> Jagged:
    """Float32 over response tokens: −log-prob of the sampled token, or entropy; in steps of 0.001 nat.

    Rows of a tree often repeat each other, and their equal scores differ by rounding, which depends on the batch. In
    steps they are ties.
    """
    if measure == "entropy":
        values = known_entropies(trajectories.entropies.values, "expander.tree")
    else:
        values = -trajectories.engine_logprobs.values
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
    """Bool over response tokens: those of another row (inherited), and those after a string of `not_after`."""
    tokens = trajectories.response_tokens
    closed = tokens.positions < trajectories.inherited[tokens.row_ids]
    if rule.not_after:
        limits = [
            min([len(pieces), *(end for text in rule.not_after for end in ends_of_stop(pieces, text))])
            for pieces in token_texts(policy.tokenizer, tokens)
        ]
        closed |= tokens.positions >= torch.tensor(limits, dtype=torch.int64)[tokens.row_ids]
    return tokens.with_values(closed)


def _continue(
    policy: Policy, parents: Trajectories, prefix: Tensor, seed: Tensor, sampling: Sampling, uid: Tensor
) -> tuple[Trajectories, int]:
    """Continuations with exact thought ends, and the number of sampled tokens that had to be cut off for it."""
    if sampling.thoughts is None:
        return sample_from_prefix(policy, parents, prefix, seed, sampling, uid), 0
    # A prefix that ends in its last thought needs one more stop string, not another thought.
    closing = in_last_thought(parents, prefix, sampling.thoughts, policy.tokenizer)
    to_stop = dataclasses.replace(sampling, thoughts=None, stop=(sampling.thoughts.stop,))
    parts = [
        sample_from_prefix(policy, parents.select(rows), prefix[rows], seed[rows], how, uid[rows])
        for rows, how in ((~closing, sampling), (closing, to_stop))
    ]
    # The rank of each row in the order of the parts, which undoes their split.
    in_order = torch.argsort(torch.argsort(closing.long(), stable=True))
    grown = Trajectories.concat(parts).select(in_order)
    whole = with_whole_thoughts(grown, sampling.thoughts, policy.tokenizer)
    return whole, int(grown.response_tokens.lengths.sum() - whole.response_tokens.lengths.sum())


def _first_keeps_row(grown: Trajectories, parents: Trajectories, width: int) -> Trajectories:
    first = torch.arange(len(grown)) % width == 0
    return grown.replace(
        uid=torch.where(first, parents.uid, grown.uid),
        parent=torch.where(first, parents.parent, parents.uid),
        inherited=torch.where(first, parents.inherited, grown.inherited),
        group=grown.prompt_uid.clone(),
    )


def _slots(branching: tuple[int, ...]) -> int:
    """Branches in a full tree."""
    return sum(accumulate(branching, operator.mul))


def _by_prompt(leaves: Trajectories, prompts: Prompts) -> Trajectories:
    """Rows prompt by prompt, otherwise in the order in which they began."""
    row = prompts.index_of(leaves.prompt_uid)
    by_uid = torch.argsort(leaves.uid)
    return leaves.select(by_uid[torch.argsort(row[by_uid], stable=True)])


# Thought ends of responses that were sampled in pieces. An engine begins a new thought where a request begins: if the
# prefix ends inside a thought, the first thought that it reports is only the rest of that one. It misses a stop or
# final string across the cut, a final string before it, and the tokens already in the thought. Token limits never
# insert tokens, so the ends can be derived again from the tokens, and a response that is too long is cut where it
# would have ended.


def closed_thoughts(pieces: list[str], limits: ThoughtLimits) -> tuple[list[int], str]:
    """Exclusive token ends of thoughts closed by the stop string or by their token limit, and why no thought follows.

    Args:
        pieces: text of each token of the response.
        limits: the thought limits.

    Returns:
        The ends, up to the one that ends the response; "final", "thoughts", or "" when the response continues.

    >>> closed_thoughts(["a", ".", "b", "!", ".", "c"], ThoughtLimits(stop=".", final="!"))
    ([2, 5], 'final')
    """
    text = "".join(pieces)
    bounds = [0, *accumulate(len(piece) for piece in pieces)]
    ends: list[int] = []
    start = 0
    while start < len(pieces):
        place = text.find(limits.stop, bounds[start]) if limits.stop else -1
        stopped = bisect_left(bounds, place + len(limits.stop)) if place >= 0 else len(pieces) + 1
        end = min(stopped, start + limits.max_tokens)
        if end > len(pieces):
            break
        ends.append(end)
        if limits.final and limits.final in text[bounds[start] : bounds[end]]:
            return ends, "final"
        if len(ends) >= limits.max_thoughts:
            return ends, "thoughts"
        start = end
    return ends, ""


def in_last_thought(parents: Trajectories, prefix: Tensor, limits: ThoughtLimits, tokenizer: Any) -> Tensor:
    """bool [N]: the first `prefix` [N] tokens end inside a thought that already holds the final string."""
    if not limits.final:
        return torch.zeros(len(parents), dtype=torch.bool)
    inside = []
    for pieces, length in zip(token_texts(tokenizer, parents.response_tokens), prefix.tolist(), strict=True):
        ends, reason = closed_thoughts(pieces[:length], limits)
        open_thought = "".join(pieces[ends[-1] if ends else 0 : length])
        inside.append(not reason and limits.final in open_thought)
    return torch.tensor(inside, dtype=torch.bool)


def with_closed_ends(trajectories: Trajectories, limits: ThoughtLimits, tokenizer: Any) -> Trajectories:
    """Keeps only the ends of closed thoughts, as required of a prefix that will be continued."""
    ends = [closed_thoughts(pieces, limits)[0] for pieces in token_texts(tokenizer, trajectories.response_tokens)]
    return trajectories.replace(thought_ends=Jagged.from_rows(ends, torch.int32))


def with_whole_thoughts(trajectories: Trajectories, limits: ThoughtLimits, tokenizer: Any) -> Trajectories:
    """Responses as if sampled in one go: thought ends derived again, and tokens after the true end cut off."""
    ends = []
    lengths = []
    reasons = []
    rows = zip(token_texts(tokenizer, trajectories.response_tokens), trajectories.finish_reason, strict=True)
    for pieces, reason in rows:
        closed, ended = closed_thoughts(pieces, limits)
        size = closed[-1] if ended else len(pieces)
        if not ended and (not closed or closed[-1] < size) and size:
            # An end-of-text token alone belongs to the thought before it.
            eos_alone = reason == "eos" and closed and closed[-1] == size - 1
            closed = [*(closed[:-1] if eos_alone else closed), size]
        ends.append(closed)
        lengths.append(size)
        reasons.append(ended or reason)
    length = torch.tensor(lengths, dtype=torch.int64)
    start = torch.zeros_like(length)
    tokens = trajectories.response_tokens.slice_rows(start, length)
    shortened = (length < trajectories.response_tokens.lengths).nonzero(as_tuple=True)[0]
    texts = list(trajectories.text)
    for row, text in zip(shortened.tolist(), decode_rows(tokenizer, tokens.select(shortened).to_lists()), strict=True):
        texts[row] = text
    return trajectories.replace(
        response_tokens=tokens,
        engine_logprobs=trajectories.engine_logprobs.slice_rows(start, length),
        entropies=trajectories.entropies.slice_rows(start, length),
        thought_ends=Jagged.from_rows(ends, torch.int32),
        finish_reason=reasons,
        text=texts,
        routed_experts=trajectories.experts_of_first(length),
    )
