"""Trees of trajectories: nodes, leaves and values, derived from `parent` and `inherited`.

A tree needs no separate payload. Each row is a leaf; `parent` and `inherited` give the row from which it branches and
where. A *node* is a run of response tokens between two branch points, sampled once and shared by all leaves below it.
The *root*, above the first nodes, is the prompt: all rows of one group. A branch that added no tokens is an empty node,
which is still a leaf with a reward.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from creditgraph.components.advantage.group import Outputs, group_sum
from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.errors import AlignmentError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Credit, Rewards, Trajectories

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
        first = self.ends.positions == 0
        sizes[first] = self.ends.values[first]
        return torch.repeat_interleave(per_node[self.path.values], sizes)


@dataclass(frozen=True, eq=False, kw_only=True)
class Values:
    """Values of nodes [K] and roots [R], float64, and valid leaves per node, int64 [K]; 0 without a valid leaf."""

    node: Tensor
    root: Tensor
    leaves: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Grown:
    """A tree, the rewards of its leaves, and the tokens of a batch in it.

    Attributes:
        tree: K nodes over N leaves.
        reward, valid: float and bool [N], of the leaves.
        node: int64 [total tokens], the node of each response token of the batch.
        credited: bool [total tokens], False in rows that get no credit.
        once: bool [total tokens], True in one row for each node.
    """

    tree: Tree
    reward: Tensor
    valid: Tensor
    node: Tensor
    credited: Tensor
    once: Tensor


def grown_of(trajectories: Trajectories, rewards: Rewards) -> Grown:
    """The tree of `tree_of`, whose leaves are the rows; a row whose reward is invalid gets no credit."""
    tree = tree_of(trajectories)
    return Grown(
        tree=tree,
        reward=rewards.value,
        valid=rewards.valid,
        node=tree.spread(torch.arange(len(tree))),
        credited=rewards.valid[trajectories.response_tokens.row_ids],
        once=once_mask(tree, rewards.valid),
    )


def tree_of(trajectories: Trajectories) -> Tree:
    """The tree of a batch that holds, with every row, the row it continues.

    Raises:
        AlignmentError: a parent is missing from the batch, or belongs to another group.
    """
    place = {uid: row for row, uid in enumerate(trajectories.uid.tolist())}
    above = [place.get(uid, -1) for uid in trajectories.parent.tolist()]
    return tree_over(
        trajectories, above, trajectories.inherited.tolist(), trajectories.response_tokens.lengths.tolist()
    )


def tree_over(leaves: Trajectories, above: list[int], inherited: list[int], length: list[int]) -> Tree:
    """The tree of leaves whose lineage is given as in `lineage_paths`; paths may count other things than tokens.

    Raises:
        AlignmentError: as `tree_of`.
    """
    _check_lineage(leaves, above, inherited, length)
    paths, ends, parent, owner = lineage_paths(above, inherited, length)
    root = torch.unique(leaves.group, return_inverse=True)[1]
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


def _check_lineage(trajectories: Trajectories, above: list[int], inherited: list[int], length: list[int]) -> None:
    origin = trajectories.origin or "trajectories"
    uid = trajectories.uid.tolist()
    parent = trajectories.parent.tolist()
    group = trajectories.group.tolist()
    missing = [row for row, over in enumerate(above) if over < 0 <= parent[row]]
    if missing:
        raise AlignmentError(
            f"{origin}: expected whole trees, but trajectory {uid[missing[0]]} continues {parent[missing[0]]}, which "
            f"is not in the batch ({len(missing)} such rows). Wire all trajectories of the node that grew them."
        )
    for row, over in enumerate(above):
        if over >= 0 and group[row] != group[over]:
            raise AlignmentError(
                f"{origin}: expected one group per tree, but trajectory {uid[row]} is in another group than the one it "
                "continues. Wire trajectories of expander.tree."
            )
        if over >= 0 and inherited[row] > min(length[row], length[over]):
            raise AlignmentError(
                f"{origin}: expected a shared prefix, but trajectory {uid[row]} inherits {inherited[row]} tokens or "
                "turns, more than it or the one it continues has. Leave responses and episodes of a tree uncut."
            )


def lineage_paths(
    above: list[int], inherited: list[int], length: list[int]
) -> tuple[list[list[int]], list[list[int]], list[int], list[int]]:
    """Cuts every row where others branch off.

    Args:
        above: row whose prefix each row inherited, −1 for none.
        inherited: number of inherited tokens.
        length: number of tokens.

    Returns:
        Node path of each row, exclusive ends along it, and for each node its parent (−1 for none) and the row that
        sampled it.
    """
    order = _by_lineage(above)
    anchor = list(above)  # the row that sampled the tokens before the place where each row leaves
    cuts = [{n} for n in length]
    continued = [False] * len(above)  # others continue at the end of the row, whose leaf is then an empty node
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
        over = anchor[row]
        start = inherited[row] if over >= 0 else 0
        if over >= 0:
            kept = sum(end <= start for end in ends[over][: len(ends[over]) - continued[over]])
            paths[row] = paths[over][:kept]
            ends[row] = ends[over][:kept]
        new_ends = sorted(end for end in cuts[row] if end > start)
        if continued[row] or length[row] == start:
            new_ends.append(length[row])
        for end in new_ends:
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
    rows = tree.path.row_ids
    nodes = tree.path.values
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
    total = torch.zeros(len(tree) + count, dtype=torch.float64)
    total.index_add_(0, nodes[last], reward)
    parts = torch.zeros(len(tree) + count, dtype=torch.float64)
    parts.index_add_(0, nodes[last], valid.double())
    for depth in range(int(tree.depth.max()) if len(tree) else 0, 0, -1):
        level = ((tree.depth == depth) & (leaves > 0)).nonzero(as_tuple=True)[0]
        total.index_add_(0, above[level], total[level] / parts[level])
        parts.index_add_(0, above[level], torch.ones(len(level), dtype=torch.float64))
    mean = total / parts.clamp(min=1)
    return Values(node=mean[: len(tree)], root=mean[len(tree) :], leaves=leaves)


def parent_values(tree: Tree, values: Values) -> Tensor:
    """V of the parent or root of each node, float64 [K]."""
    return torch.where(tree.parent >= 0, values.node[tree.parent.clamp(min=0)], values.root[tree.root])


def sibling_advantage(tree: Tree, values: Values) -> Tensor:
    """A = V − mean V of the node's siblings, itself included; float64 [K], 0 for a node without a valid leaf."""
    known = values.leaves > 0
    # Nodes below a root are siblings of each other: roots are numbered after the nodes.
    family = torch.where(tree.parent >= 0, tree.parent, len(tree) + tree.root)
    total, place = group_sum(torch.where(known, values.node, 0.0), family)
    size = group_sum(known, family)[0].clamp(min=1)
    return torch.where(known, values.node - (total / size)[place], 0.0)


def equal_levels(tree: Tree, values: Values) -> Tensor:
    """float64 [K]: weights of sibling advantages with which each level of branches counts as much as the first.

    A family of n siblings has (b − 1) / (n − 1) over the number of ways in which the nodes above it went on, b being
    the siblings below its root: E[Σ A ∇log π] of n siblings is (n − 1) times the gradient of their state's value.
    """
    known = values.leaves > 0
    above = torch.where(tree.parent >= 0, tree.parent, len(tree) + tree.root)
    counts, place = group_sum(known, above)
    size = counts[place].clamp(min=1)
    share = torch.ones(len(tree), dtype=torch.float64)  # of the state before a node, among all ways to its turn
    first = size.clone()
    for depth in range(2, int(tree.depth.max()) + 1 if len(tree) else 0):
        level = (tree.depth == depth).nonzero(as_tuple=True)[0]
        over = tree.parent[level]
        share[level] = share[over] / size[over]
        first[level] = first[over]
    return share * (first - 1) / (size - 1).clamp(min=1)


def path_advantage(tree: Tree, values: Values) -> Tensor:
    """R = [(V − V(root)) + (V − V(parent))] / √leaves; float64 [K], 0 for a node without a valid leaf (2506.11902)."""
    known = values.leaves > 0
    gain = 2 * values.node - values.root[tree.root] - parent_values(tree, values)
    return torch.where(known, gain / values.leaves.clamp(min=1).double().sqrt(), 0.0)


def once_mask(tree: Tree, valid: Tensor) -> Tensor:
    """bool [total tokens]: True in one leaf per node, the first valid one [N] (the first one where none is)."""
    rows = tree.path.row_ids
    count = len(valid)
    # Invalid leaves rank after all valid ones.
    rank = rows + torch.where(valid[rows], 0, count)
    first = torch.full((len(tree),), 2 * count, dtype=torch.int64).scatter_reduce(0, tree.path.values, rank, "amin")
    row_of_token = torch.repeat_interleave(torch.arange(count), tree.ends.values[tree.ends.offsets[1:] - 1])
    return tree.spread(first % max(count, 1)) == row_of_token


def tree_metrics(tree: Tree, advantage: Tensor, mask: Jagged) -> dict[str, float]:
    """Values of `TREE_METRICS`."""
    roots = max(int(tree.root.max()) + 1 if len(tree) else 0, 1)
    return {
        "nodes": len(tree) / roots,
        "leaves": len(tree.path) / roots,
        "depth": float(tree.path.lengths.double().mean()) if len(tree) else 0.0,
        "max_depth": float(tree.depth.max()) if len(tree) else 0.0,
        "zero_share": float((advantage.abs() < 1e-8).double().mean()) if len(tree) else 0.0,
        "advantage_size": float(advantage.abs().mean()) if len(tree) else 0.0,
        "trained_share": float(mask.values.double().mean()) if len(mask.values) else 0.0,
        "untrained_rows": float((mask.sum() == 0).sum()),
    }


def _by_lineage(above: list[int]) -> list[int]:
    """Rows ordered so that each comes after the row it continues."""
    steps = [-1] * len(above)
    for row in range(len(above)):
        # Without recursion: a lineage may be longer than the stack.
        chain = []
        while row >= 0 and steps[row] < 0:
            chain.append(row)
            row = above[row]
        base = steps[row] if row >= 0 else -1
        for count, link in enumerate(reversed(chain), 1):
            steps[link] = base + count
    return sorted(range(len(above)), key=lambda row: (steps[row], row))


class TreeAdvantage(Component):
    """Base of advantages of tree nodes."""

    metrics = TREE_METRICS

    def outputs(self, trajectories: Trajectories, grown: Grown, per_node: Tensor, trained: Tensor) -> Outputs:
        """Spreads each node's advantage [K] over its tokens, 0 on those that get no credit.

        Args:
            trajectories: the batch.
            grown: its tree.
            per_node: float64 [K].
            trained: bool [total tokens], tokens that are trained on.
        """
        tokens = trajectories.response_tokens
        advantage = tokens.with_values(torch.where(grown.credited, per_node[grown.node], 0.0).float())
        mask = tokens.with_values(trained)
        self.context.log(**tree_metrics(grown.tree, per_node, mask))
        return Outputs(credit=Credit(uid=trajectories.uid, advantage=advantage, mask=mask))
