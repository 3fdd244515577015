"""Sibling advantages of tree nodes (SPO-Tree)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from components.advantage.explanations import INVALID, lines_of_segments, minus, signed
from components.advantage.group import EXACT_ZERO, Outputs
from components.advantage.trees.tree import TreeAdvantage, ValueOf, node_values, once_mask, sibling_advantage, tree_of
from pipeline.core.component import same_rows
from pipeline.core.payloads import Rewards, Trajectories, check_aligned


class TreeSiblings(TreeAdvantage):
    """Credits each tree node with V(node) − mean V of its siblings, on tokens of probability below `max_probability`.

    V(node) = mean reward of the leaves below. A tree of depth 1 gives r − mean (GRPO without the standard deviation).
    Each node is trained on in one leaf only, the first whose reward is valid, so shared tokens count once however many
    leaves share them. An invalid reward is left out of all values and gives zero credit. Whole trees must arrive
    together.
    """

    paper = "2505.23564"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Values and masks."""

        value: ValueOf = "leaves"
        """V of a node: mean over its leaves, or over its children as in the released code (branches may end early)"""
        max_probability: float = 0.9
        """tokens with at least this probability under the sampling policy leave the loss; 1 keeps all"""
        drop_zero: bool = False
        """exclude nodes without signal from the loss denominator too"""

        def __post_init__(self) -> None:
            if not 0 < self.max_probability <= 1:
                raise ValueError(f"expected 0 < max_probability ≤ 1 (1 keeps all tokens), got {self.max_probability}.")

    config: Config

    def run(self, *, trajectories: Trajectories, rewards: Annotated[Rewards, same_rows("trajectories")]) -> Outputs:
        """Spreads each node's advantage over its tokens."""
        check_aligned(trajectories, rewards)
        settings = self.config
        tree = tree_of(trajectories)
        per_node = sibling_advantage(tree, node_values(tree, rewards.value, rewards.valid, settings.value))
        trained = once_mask(tree, rewards.valid)
        if settings.max_probability < 1:
            trained &= trajectories.engine_logprobs.values < math.log(settings.max_probability)
        if settings.drop_zero:
            valid = rewards.valid[trajectories.response_tokens.row_ids]
            trained &= valid & (tree.spread(per_node).abs() >= EXACT_ZERO)
        return self.outputs(trajectories, rewards, tree, per_node, trained)

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The value of each node on a leaf's path and the mean of its siblings, in numbers."""
        rewards: Rewards = inputs["rewards"]
        tree = tree_of(inputs["trajectories"])
        values = node_values(tree, rewards.value, rewards.valid, self.config.value)
        advantage = sibling_advantage(tree, values)

        def line(place: int) -> str:
            node = int(tree.path.values[place])
            own = float(values.node[node])
            gain = float(advantage[node])
            leaves = int(values.leaves[node])
            return f"{minus(own, own - gain)} = {signed(gain)}, V over {leaves} {'leaf' if leaves == 1 else 'leaves'}"

        texts = lines_of_segments(tree.path, "V − mean V of its siblings, V: mean reward below", line)
        return [t if ok else INVALID for t, ok in zip(texts, rewards.valid.tolist(), strict=True)]
