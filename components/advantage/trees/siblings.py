"""Sibling advantages of tree nodes (SPO-Tree)."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from creditgraph.components.advantage.explanations import INVALID, lines_of_segments, minus, signed
from creditgraph.components.advantage.group import EXACT_ZERO, Outputs
from creditgraph.components.advantage.trees.tree import (
    Grown,
    TreeAdvantage,
    ValueOf,
    Values,
    equal_levels,
    grown_of,
    node_values,
    sibling_advantage,
    tree_over,
)
from creditgraph.components.rollouts.turn_rows import by_episode, check_episode_rewards, rows_before
from creditgraph.pipeline.core.component import same_rows
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Rewards, Trajectories, Turns, check_aligned


class TreeSiblings(TreeAdvantage):
    """Credits each tree node with V(node) − mean V of its siblings, on tokens of probability below `max_probability`.

    V(node) = mean reward of the leaves below. A tree of depth 1 gives r − mean (GRPO without the standard deviation).
    Each node is trained on in one leaf only, the first whose reward is valid, so shared tokens count once however many
    leaves share them. An invalid reward is left out of all values and gives zero credit. Whole trees must arrive
    together.

    With `turns` the rows are turns, the leaves episodes (sampler.turn_tree), and a node is a run of turns between two
    branches; V is of whole returns. A turn that valid episodes continue keeps its credit when its own has a fault.

    Where an episode branches must not depend on what follows. Then with `value: children` and `equal_levels`
    E[Σ A ∇log π] = (b − 1) ∇J for b branches at the root; without `equal_levels` the part of ∇J of a level that has n
    ways to go on from each of m nodes in a full tree counts m (n − 1) times. `value: leaves` is biased in trees of
    three and more levels where some branches end early: it favours what leads to many leaves.
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
        equal_levels: bool = False
        """weigh nodes so that each level of branches counts as much as the first, and not by its number of nodes"""

        def __post_init__(self) -> None:
            if not 0 < self.max_probability <= 1:
                raise ValueError(f"expected 0 < max_probability ≤ 1 (1 keeps all tokens), got {self.max_probability}.")

    config: Config

    @classmethod
    def needs_of(cls, config: Config) -> frozenset[str]:
        """The probabilities that `max_probability` bounds."""
        return frozenset({"logprobs"} if config.max_probability < 1 else ())

    def run(
        self,
        *,
        trajectories: Trajectories,
        rewards: Annotated[Rewards, same_rows("trajectories")],
        turns: Annotated[Turns | None, same_rows("trajectories")] = None,
    ) -> Outputs:
        """Spreads each node's advantage over its tokens."""
        settings = self.config
        grown, _, per_node = self._credit(trajectories, rewards, turns)
        trained = grown.once
        if settings.max_probability < 1:
            trained = trained & (trajectories.engine_logprobs.values < math.log(settings.max_probability))
        if settings.drop_zero:
            trained = trained & grown.credited & (per_node[grown.node].abs() >= EXACT_ZERO)
        return self.outputs(trajectories, grown, per_node, trained)

    def _credit(
        self, trajectories: Trajectories, rewards: Rewards, turns: Turns | None
    ) -> tuple[Grown, Values, Tensor]:
        """The tree, V of its nodes, and the advantage of each."""
        check_aligned(trajectories, rewards)
        grown = grown_of(trajectories, rewards) if turns is None else grown_of_turns(trajectories, turns, rewards)
        values = node_values(grown.tree, grown.reward, grown.valid, self.config.value)
        advantage = sibling_advantage(grown.tree, values)
        if self.config.equal_levels:
            advantage = advantage * equal_levels(grown.tree, values)
        return grown, values, advantage

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The value of each node on a leaf's path and the mean of its siblings, in numbers."""
        trajectories: Trajectories = inputs["trajectories"]
        rewards: Rewards = inputs["rewards"]
        turns = inputs.get("turns")
        grown, values, advantage = self._credit(trajectories, rewards, turns)
        gain = sibling_advantage(grown.tree, values)

        def line(node: int) -> str:
            own, above, leaves = float(values.node[node]), float(gain[node]), int(values.leaves[node])
            weight = "" if advantage[node] == gain[node] else f", weighed {signed(float(advantage[node]))}"
            below = f"V over {leaves} {'leaf' if leaves == 1 else 'leaves'}"
            return f"{minus(own, own - above)} = {signed(above)}{weight}, {below}"

        head = "V − mean V of its siblings, V: mean reward below"
        if turns is not None:
            first = grown.node[trajectories.response_tokens.offsets[:-1]].tolist()
            return [f"{head}\n{line(node)}" if values.leaves[node] else INVALID for node in first]
        texts = lines_of_segments(grown.tree.path, head, lambda place: line(int(grown.tree.path.values[place])))
        return [t if ok else INVALID for t, ok in zip(texts, rewards.valid.tolist(), strict=True)]


def grown_of_turns(trajectories: Trajectories, turns: Turns, rewards: Rewards) -> Grown:
    """The tree of episodes that begin after the row that is the `parent` of their first one; paths count turns.

    The reward of a leaf is its episode's, and what the turns before it were given; a turn is in one row only.

    Raises:
        AlignmentError: turns before an episode are missing, or in another group; turns are not of the trajectories.
    """
    episodes = by_episode(trajectories, turns)
    check_episode_rewards(rewards, turns)
    first = episodes.offsets[:-1]
    before = [path for row, path in enumerate(rows_before(trajectories, turns)) if turns.uid[row] == turns.episode[row]]
    owner = episodes.row_ids.tolist()
    above = [owner[path[-1]] if path else -1 for path in before]
    begin = turns.turn[first]
    length = begin + episodes.lengths
    tree = tree_over(trajectories.select(first), above, begin.tolist(), length.tolist())
    received = torch.tensor([float(turns.reward[path].double().sum()) for path in before], dtype=torch.float64)
    # Each episode has a row for its own turns, not for those that it shares with the one it continues.
    path = Jagged.from_lengths(tree.spread(torch.arange(len(tree))), length)
    own = path.positions >= begin[path.row_ids]
    node = path.values[own][trajectories.response_tokens.row_ids]
    every = torch.ones(len(node), dtype=torch.bool)
    return Grown(
        tree=tree,
        reward=rewards.value[first] + received,
        valid=rewards.valid[first],
        node=node,
        credited=every,
        once=every,
    )
