"""Advantages whose effect is known: what a comparison must be able to see."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from creditgraph.components.advantage.group import GroupAdvantage, Outputs
from creditgraph.components.expander.reset import reset_length
from creditgraph.components.rollouts.thoughts import num_thoughts, true_first_errors
from creditgraph.pipeline.core.component import same_rows
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Trajectories, Turns


class OracleAdvantage(GroupAdvantage):
    """GRPO's advantage, of a wrong response on its true first wrong thought alone: the positive control.

    What comes before the first error was right, and what comes after it is not to blame, so both get 0.
    """

    def run(  # type: ignore[override]  # one more input
        self,
        *,
        trajectories: Trajectories,
        rewards: Annotated[Rewards, same_rows("trajectories")],
        prompts: Prompts,
        policy: Policy,
    ) -> Outputs:
        """Keeps the advantage of right responses, and of first errors."""
        credit = super().run(trajectories=trajectories, rewards=rewards).credit
        tokens = trajectories.response_tokens
        step = true_first_errors(prompts, trajectories, policy.tokenizer)
        kept = in_thought(trajectories, step) | tokens.spread(rewards.correct).values
        return Outputs(credit=credit.replace(advantage=tokens.with_values(credit.advantage.values * kept)))


def in_thought(trajectories: Trajectories, step: Tensor) -> Tensor:
    """Whether each response token [tokens] is in the thought `step` [N], from 1, of its row."""
    tokens, ends = trajectories.response_tokens, trajectories.thought_ends
    count = num_thoughts(trajectories)
    last = torch.where(step < count, reset_length(ends, torch.minimum(step + 1, count)), tokens.lengths)
    place = tokens.positions
    inside: Tensor = (place >= tokens.spread(reset_length(ends, step)).values) & (place < tokens.spread(last).values)
    return inside


class FlippedAdvantage(GroupAdvantage):
    """GRPO's advantage with the wrong sign: the negative control."""

    def run(
        self,
        *,
        trajectories: Trajectories,
        rewards: Annotated[Rewards, same_rows("trajectories")],
        turns: Annotated[Turns | None, same_rows("trajectories")] = None,
    ) -> Outputs:
        """Pushes towards what failed."""
        credit = super().run(trajectories=trajectories, rewards=rewards, turns=turns).credit
        return Outputs(credit=credit.replace(advantage=credit.advantage.with_values(-credit.advantage.values)))


class OracleTurns(GroupAdvantage):
    """The positive control over turns: GRPO's advantage, in a failed episode on its first wrong turn alone.

    The states must be those of `environment.thoughts`, which say whether all turns before were right.
    """

    def run(
        self,
        *,
        trajectories: Trajectories,
        rewards: Annotated[Rewards, same_rows("trajectories")],
        turns: Annotated[Turns | None, same_rows("trajectories")] = None,
    ) -> Outputs:
        """Keeps the advantage of right episodes, and of the last turn before which all were right."""
        assert turns is not None
        credit = super().run(trajectories=trajectories, rewards=rewards, turns=turns).credit
        right = torch.tensor([" right" in state for state in turns.state])
        right_after = torch.cat([right[1:] & (turns.turn[1:] > 0), torch.zeros(1, dtype=torch.bool)])
        kept = rewards.correct | (right & ~right_after)
        tokens = trajectories.response_tokens
        return Outputs(
            credit=credit.replace(advantage=tokens.with_values(credit.advantage.values * tokens.spread(kept).values))
        )
