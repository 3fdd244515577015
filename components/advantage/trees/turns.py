"""Trees of episodes: a row is a turn, a leaf an episode, and a node a run of turns between two branches."""

from __future__ import annotations

import torch

from creditgraph.components.advantage.trees.tree import Grown, tree_over
from creditgraph.components.rollouts.turn_rows import by_episode, check_episode_rewards, rows_before
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Rewards, Trajectories, Turns


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
