"""Turn rewards compared at the same turn of a group's episodes, and their outcomes (MT-GRPO)."""

from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from creditgraph.components.advantage.explanations import decimal, signed
from creditgraph.components.advantage.group import Normalize, Outputs, group_advantage
from creditgraph.components.advantage.turns.base import NormalizeSettings, TurnAdvantage, outcome_advantage
from creditgraph.components.rollouts.turn_rows import by_episode, last_turns, state_groups
from creditgraph.pipeline.core.component import same_rows
from creditgraph.pipeline.core.jagged import takes_lists
from creditgraph.pipeline.core.payloads import Rewards, Trajectories, Turns


@takes_lists
def turn_advantage(
    reward: Tensor, group: Tensor, turn: Tensor, counts: Tensor, *, normalize: Normalize = "std", eps: float = 1e-6
) -> Tensor:
    """Each turn's reward against those of the same turn of its group's episodes, float32 [N].

    With `mean`, in expectation a turn t has the weight w_t = 1 − (1 − (1 − p)^N) / (N p) of a comparison with the exact
    mean, p being the probability that an episode reaches t and N the group's episodes: the own reward is 1/n of the
    mean over the n episodes that are still going on. So rarely reached turns count less; without an early end all w_t
    are 1 − 1/N. The reward is that of the turn alone: what it leads to is not in it.

    Args:
        reward, group, turn: [N].
        counts: bool [N], turns that are compared; others get 0.
        normalize, eps: as in `group_advantage`.
    """
    same_turn = state_groups(group, [str(t) for t in turn.tolist()])
    return group_advantage(reward, same_turn, counts, normalize=normalize, eps=eps)


class TurnGroup(TurnAdvantage):
    """A = A_outcome + w A_turn: the episode's reward against its group, and the turn's against the same turn's.

    Source: 2505.11821, whose episodes have two turns, the first with A_turn + A_outcome, the last with A_outcome only.
    More turns, and an end that the policy chooses, are our reading. weight 0 is GRPO over episodes, each counting once.

    Unbiased (up to a factor) with `mean` and weight 0: E[Σ A ∇log π] = (N − 1) ∇J. The second term follows the turns'
    own rewards, see `turn_advantage`; with `last_turn: false` it never compares ending with going on: its part for a
    choice to end at turn t is 0, and for going on its mean is 0.
    """

    paper = "2505.11821"

    @dataclass(frozen=True, kw_only=True)
    class Config(NormalizeSettings):
        """The weight of a turn's own reward, and which turns have one."""

        weight: float = 1.0
        """w, weight of the comparison of turn rewards; 0 leaves the episode's reward alone"""
        last_turn: bool = False
        """also compare the reward of an episode's last turn, which otherwise counts in the outcome only"""

    config: Config

    def run(
        self,
        *,
        trajectories: Trajectories,
        turns: Annotated[Turns, same_rows("trajectories")],
        rewards: Annotated[Rewards, same_rows("trajectories")],
    ) -> Outputs:
        """Credits each turn; `rewards` are those of the episodes, the same on all turns of one."""
        episodes = self.episodes(trajectories, turns, rewards)
        outcome, turn = self._parts(trajectories, turns, rewards)
        return self.outputs(trajectories, episodes, outcome + self.config.weight * turn)

    def _parts(self, trajectories: Trajectories, turns: Turns, rewards: Rewards) -> tuple[Tensor, Tensor]:
        config = self.config
        how: dict[str, Any] = {"normalize": config.normalize, "eps": config.eps}
        episodes = by_episode(trajectories, turns)
        outcome = outcome_advantage(rewards.value, trajectories.group, rewards.valid, episodes, **how)
        counts = rewards.valid if config.last_turn else rewards.valid & ~last_turns(episodes)
        return outcome, turn_advantage(turns.reward, trajectories.group, turns.turn, counts, **how)

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """Both parts of each turn's advantage."""
        rewards: Rewards = inputs["rewards"]
        turns: Turns = inputs["turns"]
        outcome, turn = self._parts(inputs["trajectories"], turns, rewards)
        total = outcome + self.config.weight * turn

        def line(o: float, t: float, a: float, k: int, r: float, value: float) -> str:
            parts = f"outcome {signed(o)} + {decimal(self.config.weight)}·(turn {signed(t)}) = {signed(a)}"
            return f"{parts}\nturn {k + 1} with reward {decimal(r)}, episode with reward {decimal(value)}"

        return self.explained(rewards, line, outcome, turn, total, turns.turn, turns.reward, rewards.value)
