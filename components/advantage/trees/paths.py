"""Global and local advantage of tree nodes (TreeRL)."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from creditgraph.components.advantage.explanations import INVALID, lines_of_segments, minus, signed
from creditgraph.components.advantage.group import Outputs
from creditgraph.components.advantage.trees.tree import (
    TreeAdvantage,
    grown_of,
    node_values,
    parent_values,
    path_advantage,
    tree_of,
)
from creditgraph.pipeline.core.component import same_rows
from creditgraph.pipeline.core.payloads import Rewards, Trajectories, check_aligned


class TreePaths(TreeAdvantage):
    """Credits each tree node s with [(V(s) − V(root)) + (V(s) − V(parent))] / √(leaves under s).

    V(s) is the mean reward of the leaves below s. A tree of depth 1 gives 2 (r − mean). Every leaf is a training
    sequence of its whole path, so a node with n leaves occurs n times; the √n damps that, it does not undo it. An
    invalid reward is left out of values and leaf counts, and its trajectory gets zero credit. Whole trees must arrive
    together.
    """

    paper = "2506.11902"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Rows in which shared tokens are trained on."""

        shared: Literal["paths", "once"] = "paths"
        """paths: in every leaf below, as summaries of the paper have it; once: in the first valid leaf only"""

    config: Config

    def run(self, *, trajectories: Trajectories, rewards: Annotated[Rewards, same_rows("trajectories")]) -> Outputs:
        """Spreads each node's advantage over its tokens."""
        check_aligned(trajectories, rewards)
        grown = grown_of(trajectories, rewards)
        per_node = path_advantage(grown.tree, node_values(grown.tree, rewards.value, rewards.valid))
        trained = grown.once if self.config.shared == "once" else torch.ones_like(grown.once)
        return self.outputs(trajectories, grown, per_node, trained)

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The values of node, root and parent of each node on a leaf's path, in numbers."""
        rewards: Rewards = inputs["rewards"]
        tree = tree_of(inputs["trajectories"])
        values = node_values(tree, rewards.value, rewards.valid)
        advantage = path_advantage(tree, values)
        parents = parent_values(tree, values)

        def line(place: int) -> str:
            node = int(tree.path.values[place])
            own = float(values.node[node])
            gains = f"({minus(own, float(values.root[tree.root[node]]))}) + ({minus(own, float(parents[node]))})"
            return f"[{gains}]/√{int(values.leaves[node])} = {signed(float(advantage[node]))}"

        texts = lines_of_segments(tree.path, "[(V − V(root)) + (V − V(parent))]/√leaves, V: mean reward below", line)
        return [t if ok else INVALID for t, ok in zip(texts, rewards.valid.tolist(), strict=True)]
