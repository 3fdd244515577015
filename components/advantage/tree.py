"""Trees of trajectories: nodes, leaves and values, from the lineage that trajectories carry.

A tree needs no payload of its own. Each row is a leaf; `parent` and `inherited` say where it left which other row. A
*node* is a run of response tokens between two places where rows part, sampled once and shared by all leaves under it.
Above the first nodes is the *root*, the
prompt: all rows of one group. A branch that added no tokens is an empty node, still a leaf with a reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from components.advantage.group import group_sum
from pipeline.core.errors import AlignmentError
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Trajectories

ValueOf = Literal["leaves", "children"]


TREE_METRICS = (
    Metric("nodes", "nodes", "segments per tree, shared ones once"),
    Metric("leaves", "leaves", "responses per tree"),
    Metric("depth", "segments", "mean number of segments from root to leaf"),
    Metric("max_depth", "segments", "segments on the longest path"),
    Metric("zero_share", "share", "segments whose advantage is 0"),
    Metric("advantage_size", "reward", "mean absolute advantage of a segment"),
    Metric("trained_share", "share", "response tokens that are trained"),
    Metric("untrained_rows", "rows", "responses of which no token is trained"),
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Tree:
    """K nodes over N leaves in R roots.

    Attributes:
        path: Jagged int64, one row per leaf: its nodes from the root down, as places 0 … K − 1.
        ends: Jagged int64, exclusive end of each of them in the leaf's response; never decreasing, the last one is its
            length.
        parent: int64 [K], place of the node above, −1 below the root.
        root: int64 [K], place of the node's group among the sorted groups.
        depth: int64 [K], 1 below the root.
    """

    path: Jagged
    ends: Jagged
    parent: Tensor
    root: Tensor
    depth: Tensor

    def __len__(self) -> int:
        return len(self.parent)

    def spread(self, per_node: Tensor) -> Tensor:
        """Repeats one number per node [K] over the response tokens of all leaves [total tokens]."""
        sizes = self.ends.values.diff(prepend=self.ends.values.new_zeros(1))
        sizes[self.ends.positions == 0] = self.ends.values[self.ends.positions == 0]
        return torch.repeat_interleave(per_node[self.path.values], sizes)


@dataclass(frozen=True, eq=False, kw_only=True)
class Values:
    """Values of nodes and roots, float64, and numbers of valid leaves, int64; without a valid leaf both are 0."""

    node: Tensor
    root: Tensor
    leaves: Tensor


def tree_of(trajectories: Trajectories) -> Tree:
    """The tree of a batch that holds, with every row, the row it continues.

    Raises:
        AlignmentError: a parent is missing from the batch, or belongs to another group.
    """
    place = {uid: row for row, uid in enumerate(trajectories.uid.tolist())}
    parents = trajectories.parent.tolist()
    missing = [row for row, uid in enumerate(parents) if uid >= 0 and uid not in place]
    if missing:
        raise AlignmentError(
            f"{trajectories.origin or 'trajectories'}: trajectory {int(trajectories.uid[missing[0]])} continues "
            f"{parents[missing[0]]}, "
            f"which is not in the batch ({len(missing)} such rows); wanted whole trees. Wire all trajectories of the "
            "node that grew them."
        )
    above = [place.get(uid, -1) for uid in parents]
    group, length = trajectories.group, trajectories.response_tokens.lengths.tolist()
    inherited = trajectories.inherited.tolist()
    foreign = [row for row, over in enumerate(above) if over >= 0 and int(group[row]) != int(group[over])]
    if foreign:
        raise AlignmentError(
            f"{trajectories.origin or 'trajectories'}: trajectory {int(trajectories.uid[foreign[0]])} is in another "
            "group than the one it "
            "continues; wanted one group per tree. Wire trajectories of expander.tree."
        )
    beyond = [row for row, over in enumerate(above) if over >= 0 and inherited[row] > min(length[row], length[over])]
    if beyond:
        raise AlignmentError(
            f"{trajectories.origin or 'trajectories'}: trajectory {int(trajectories.uid[beyond[0]])} inherits "
            f"{inherited[beyond[0]]} "
            "tokens, more than it or the one it continues has; wanted a shared prefix. Leave responses of a tree uncut."
        )
    paths, ends, parent, owner = lineage_paths(above, inherited, length)
    root = torch.unique(group, return_inverse=True)[1]
    path = Jagged.from_rows(paths, torch.int64)
    depth = torch.zeros(len(parent), dtype=torch.int64)
    depth[path.values] = path.positions + 1
    return Tree(
        path=path,
        ends=Jagged.from_rows(ends, torch.int64),
        parent=torch.tensor(parent, dtype=torch.int64),
        root=root[torch.tensor(owner, dtype=torch.int64)],
        depth=depth,
    )


def lineage_paths(
    above: list[int], inherited: list[int], length: list[int]
) -> tuple[list[list[int]], list[list[int]], list[int], list[int]]:
    """Cuts every row where others leave it.

    Args:
        above: row whose prefix each row inherited, −1 for none.
        inherited: number of inherited tokens.
        length: number of tokens.

    Returns:
        Node path of each row, exclusive ends along it, and for each node its parent (−1 for none) and the row that
        sampled it.
    """
    order, anchor, cuts = _by_lineage(above), list(above), [{n} for n in length]
    continued = [False] * len(above)  # others go on where the row ends: its own leaf is an empty node beside them
    for row in order:
        over = above[row]
        while over >= 0 and inherited[row] <= inherited[over]:
            over = above[over]  # the shared prefix was itself inherited
        anchor[row] = over
        if over >= 0:
            cuts[over].add(inherited[row])
            continued[over] |= inherited[row] == length[over]
    paths: list[list[int]] = [[] for _ in above]
    ends: list[list[int]] = [[] for _ in above]
    parent: list[int] = []
    owner: list[int] = []
    for row in order:
        start, over = inherited[row] if anchor[row] >= 0 else 0, anchor[row]
        if over >= 0:
            kept = sum(end <= start for end in ends[over][: len(ends[over]) - continued[over]])
            paths[row], ends[row] = paths[over][:kept], ends[over][:kept]
        for end in [
            *sorted(end for end in cuts[row] if end > start),
            *([length[row]] if continued[row] or length[row] == start else []),
        ]:
            parent.append(paths[row][-1] if paths[row] else -1)
            owner.append(row)
            paths[row].append(len(parent) - 1)
            ends[row].append(end)
    return paths, ends, parent, owner


def node_values(tree: Tree, reward: Tensor, valid: Tensor, value: ValueOf = "leaves") -> Values:
    """V of each node and root.

    leaves: mean reward of the valid leaves below. children: mean over the children's V, a leaf's being its reward, so a
    branch that ended early weighs as much as its siblings whose subtrees have many leaves; both agree on a full tree.

    Args:
        tree: K nodes over N leaves.
        reward: float [N].
        valid: bool [N]; other leaves do not count.
        value: the form.
    """
    reward = torch.where(valid, reward.double(), 0.0)
    rows, nodes = tree.path.row_ids, tree.path.values
    count = int(tree.root.max()) + 1 if len(tree) else 0
    last = tree.path.offsets[1:] - 1
    of_root = tree.root[nodes[last]]
    leaves = torch.zeros(len(tree), dtype=torch.int64).index_add_(0, nodes, valid[rows].long())
    if value == "leaves":
        total = torch.zeros(len(tree), dtype=torch.float64).index_add_(0, nodes, reward[rows])
        at_root = torch.zeros(count, dtype=torch.float64).index_add_(0, of_root, reward)
        root_leaves = torch.zeros(count, dtype=torch.int64).index_add_(0, of_root, valid.long())
        return Values(node=total / leaves.clamp(min=1), root=at_root / root_leaves.clamp(min=1), leaves=leaves)
    # Places beyond K are the roots; a level of the tree at a time, from the deepest.
    above = torch.where(tree.parent >= 0, tree.parent, len(tree) + tree.root)
    total, parts = (
        torch.zeros(len(tree) + count, dtype=torch.float64),
        torch.zeros(len(tree) + count, dtype=torch.float64),
    )
    total.index_add_(0, nodes[last], reward)
    parts.index_add_(0, nodes[last], valid.double())
    for depth in range(int(tree.depth.max()) if len(tree) else 0, 0, -1):
        level = ((tree.depth == depth) & (leaves > 0)).nonzero(as_tuple=True)[0]
        total.index_add_(0, above[level], total[level] / parts[level])
        parts.index_add_(0, above[level], torch.ones(len(level), dtype=torch.float64))
    mean = total / parts.clamp(min=1)
    return Values(node=mean[: len(tree)], root=mean[len(tree) :], leaves=leaves)


def parent_values(tree: Tree, values: Values) -> Tensor:
    """V of what is above each node, float64 [K]: its parent, or its root."""
    return torch.where(tree.parent >= 0, values.node[tree.parent.clamp(min=0)], values.root[tree.root])


def sibling_advantage(tree: Tree, values: Values) -> Tensor:
    """A = V − mean V of the node's siblings, itself included; float64 [K], 0 for a node without a valid leaf."""
    known = values.leaves > 0
    family = torch.where(tree.parent >= 0, tree.parent, len(tree) + tree.root)
    total, place = group_sum(torch.where(known, values.node, 0.0), family)
    size = group_sum(known, family)[0].clamp(min=1)
    return torch.where(known, values.node - (total / size)[place], 0.0)


def path_advantage(tree: Tree, values: Values) -> Tensor:
    """R = [(V − V(root)) + (V − V(parent))] / √leaves; float64 [K], 0 for a node without a valid leaf (2506.11902)."""
    known = values.leaves > 0
    gain = 2 * values.node - values.root[tree.root] - parent_values(tree, values)
    return torch.where(known, gain / values.leaves.clamp(min=1).double().sqrt(), 0.0)


def once_mask(tree: Tree, valid: Tensor) -> Tensor:
    """bool [total tokens]: True in one leaf per node, the first valid one [N] (the first one where none is)."""
    rows, nodes, count = tree.path.row_ids, tree.path.values, len(valid)
    rank = rows + torch.where(valid[rows], 0, count)
    first = torch.full((len(tree),), 2 * count, dtype=torch.int64).scatter_reduce(0, nodes, rank, "amin")
    row_of_token = torch.repeat_interleave(torch.arange(count), _lengths(tree))
    return tree.spread(first % max(count, 1)) == row_of_token


def tree_metrics(tree: Tree, advantage: Tensor, mask: Jagged) -> dict[str, float]:
    """Size and shape of the trees, share of nodes without signal, and of response tokens trained on."""
    roots = max(int(tree.root.max()) + 1 if len(tree) else 0, 1)
    return {
        "nodes": len(tree) / roots,
        "leaves": len(mask) / roots,
        "depth": float(tree.path.lengths.double().mean()) if len(mask) else 0.0,
        "max_depth": float(tree.depth.max()) if len(tree) else 0.0,
        "zero_share": float((advantage.abs() < 1e-8).double().mean()) if len(tree) else 0.0,
        "advantage_size": float(advantage.abs().mean()) if len(tree) else 0.0,
        "trained_share": float(mask.values.double().mean()) if len(mask.values) else 0.0,
        "untrained_rows": float((mask.sum() == 0).sum()),
    }


def _lengths(tree: Tree) -> Tensor:
    return tree.ends.values[tree.ends.offsets[1:] - 1]


def _by_lineage(above: list[int]) -> list[int]:
    """Rows ordered so that each comes after the row it continues."""
    steps = [-1] * len(above)
    for row in range(len(above)):
        chain = []
        while row >= 0 and steps[row] < 0:
            chain.append(row)
            row = above[row]
        base = steps[row] if row >= 0 else -1
        for count, link in enumerate(reversed(chain), 1):
            steps[link] = base + count
    return sorted(range(len(above)), key=lambda row: (steps[row], row))
