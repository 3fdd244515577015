"""Outcome rewards: a verifier applied to trajectories."""

from dataclasses import dataclass
from typing import Annotated

from creditgraph.components.rollouts.rewards import finite_rewards
from creditgraph.pipeline.core.component import Component, Count, same_rows
from creditgraph.pipeline.core.handles import Verifier
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Trajectories, check_aligned


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """One reward per trajectory."""

    rewards: Annotated[Rewards, same_rows("trajectories")]


class Outcome(Component):
    """Verifies each trajectory; its reward r_i is the verifier's value.

    A reward that is NaN or infinite becomes 0 and `valid=False` with the reason, so the trajectory gets no credit.
    Every trajectory that could not be verified is written to rejected.jsonl.
    """

    metrics = (
        Metric("mean", "reward", "mean reward of a trajectory, invalid ones as 0"),
        Metric("correct", "share", "trajectories that are correct"),
        Metric("invalid", "rows", "trajectories that could not be verified; they get no credit"),
    )

    def run(self, *, verifier: Verifier, trajectories: Trajectories, prompts: Prompts) -> Outputs:
        """Verifies every row; never fails for a bad one."""
        # One NaN would spread to its whole group through mean and standard deviation.
        rewards = finite_rewards(verifier.verify(prompts, trajectories))
        check_aligned(trajectories, rewards)
        for row in (~rewards.valid).nonzero(as_tuple=True)[0].tolist():
            self.context.reject(
                {"trajectory": int(rewards.uid[row]), "prompt": int(trajectories.prompt_uid[row])}, rewards.detail[row]
            )
        count = max(len(rewards), 1)
        self.context.log(
            mean=float(rewards.value.sum()) / count,
            correct=float(rewards.correct.sum()) / count,
            invalid=Count((~rewards.valid).sum()),
        )
        return Outputs(rewards=rewards)
