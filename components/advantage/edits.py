"""Which tokens a revision changes: Levenshtein alignment at token level."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from creditgraph.pipeline.core.errors import extra
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Rewards, Trajectories


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
