"""Outcomes of leaves compared within their tree and across the trees of a prompt (Tree-GRPO)."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from creditgraph.components.advantage.explanations import INVALID, decimal, lines_of_segments, signed
from creditgraph.components.advantage.group import Outputs, group_advantage
from creditgraph.components.advantage.trees.siblings import grown_of_turns
from creditgraph.components.advantage.trees.tree import Grown, TreeAdvantage, grown_of
from creditgraph.components.advantage.turns.base import NormalizeSettings
from creditgraph.pipeline.core.component import same_rows
from creditgraph.pipeline.core.payloads import Rewards, Trajectories, Turns, check_aligned


class TreeLeaves(TreeAdvantage):
    """A(leaf) = norm(R) within its tree + norm(R) across all trees of the prompt; a node has the sum over its leaves.

    A tree is all that branched off one response or episode that began at the prompt. The sum is what training on the
    path of each leaf gives, with shared tokens computed once. A node above all leaves of its tree gets nothing from the
    comparison within, whose advantages add up to 0; without branches this is GRPO.

    Source: 2509.21240, second-hand: it adds both comparisons and trains on every path. Biased even with `mean`: the
    episodes that a mean is over depend on the actions, as how often a tree branches does; and E[Σ A ∇log π] counts a
    level by its leaves. An invalid reward is left out and gives zero credit. Whole trees must arrive together.
    """

    paper = "2509.21240"

    @dataclass(frozen=True, kw_only=True)
    class Config(NormalizeSettings):
        """How outcomes are compared."""

    config: Config

    def run(
        self,
        *,
        trajectories: Trajectories,
        rewards: Annotated[Rewards, same_rows("trajectories")],
        turns: Annotated[Turns | None, same_rows("trajectories")] = None,
    ) -> Outputs:
        """Spreads each node's sum over its tokens."""
        grown, within, across = self._parts(trajectories, rewards, turns)
        return self.outputs(trajectories, grown, summed(grown, within + across), grown.once)

    def _parts(self, trajectories: Trajectories, rewards: Rewards, turns: Turns | None) -> tuple[Grown, Tensor, Tensor]:
        """The tree and both advantages of each leaf, float32."""
        check_aligned(trajectories, rewards)
        grown = grown_of(trajectories, rewards) if turns is None else grown_of_turns(trajectories, turns, rewards)
        how: dict[str, Any] = {"normalize": self.config.normalize, "eps": self.config.eps}
        first = grown.tree.path.values[grown.tree.path.offsets[:-1]]  # below the root: one node for each tree
        within = group_advantage(grown.reward, first, grown.valid, **how)
        return grown, within, group_advantage(grown.reward, grown.tree.root[first], grown.valid, **how)

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """Both sums of each node on a leaf's path."""
        trajectories: Trajectories = inputs["trajectories"]
        turns = inputs.get("turns")
        grown, *parts = self._parts(trajectories, inputs["rewards"], turns)
        within, across = (summed(grown, part).tolist() for part in parts)
        below = summed(grown, grown.valid.double()).tolist()
        head = "norm(R) within the tree + norm(R) across the prompt's trees, summed over the leaves below"

        def line(node: int) -> str:
            total = signed(within[node] + across[node])
            return f"{signed(within[node])} + ({signed(across[node])}) = {total}, leaves below: {decimal(below[node])}"

        if turns is not None:
            first = grown.node[trajectories.response_tokens.offsets[:-1]].tolist()
            return [f"{head}\n{line(node)}" if below[node] else INVALID for node in first]
        texts = lines_of_segments(grown.tree.path, head, lambda place: line(int(grown.tree.path.values[place])))
        return [t if ok else INVALID for t, ok in zip(texts, inputs["rewards"].valid.tolist(), strict=True)]


def summed(grown: Grown, per_leaf: Tensor) -> Tensor:
    """Σ over the leaves below each node, float64 [K], of `per_leaf` [N]."""
    path = grown.tree.path
    return torch.zeros(len(grown.tree), dtype=torch.float64).index_add_(0, path.values, per_leaf.double()[path.row_ids])
