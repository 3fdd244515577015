"""Soft punishment of overlong responses (DAPO)."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from creditgraph.pipeline.core.component import Component, same_rows
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Rewards, Trajectories, check_aligned


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The rewards with the punishment added."""

    rewards: Annotated[Rewards, same_rows("trajectories")]


def overlong_punishment(length: Tensor, max_length: int, buffer: int) -> Tensor:
    """Soft overlong punishment, float32 [N] in [−1, 0], of response lengths [N] in tokens.

    0 up to max_length − buffer; ((max_length − buffer) − length) / buffer up to max_length; −1 beyond.
    With buffer 0 it is the hard form: −1 beyond max_length, else 0. Source: 2503.14476, equation 13.
    """
    if buffer == 0:
        return -(length > max_length).float()
    return ((max_length - buffer - length).float() / buffer).clamp(-1.0, 0.0)


class Overlong(Component):
    """Adds to each valid reward a punishment of long responses, from 0 down to −weight; `correct` is unchanged."""

    paper = "2503.14476"
    metrics = (
        Metric("punished_share", "share", "trajectories that are punished"),
        Metric("punishment", "reward", "mean punishment of a trajectory, 0 or less"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Lengths in response tokens."""

        max_length: int = 20480
        """tokens; a longer response gets the full punishment. Set it to the sampler's `max_tokens`"""
        buffer: int = 4096
        """tokens before `max_length` over which the punishment grows from 0 to −weight"""
        weight: float = 1.0
        """size of the full punishment"""

        def __post_init__(self) -> None:
            if not 0 <= self.buffer <= self.max_length:
                raise ValueError(f"expected 0 ≤ buffer ≤ max_length ({self.max_length}), got {self.buffer}.")

    config: Config

    def run(self, *, trajectories: Trajectories, rewards: Annotated[Rewards, same_rows("trajectories")]) -> Outputs:
        """Punishes every row."""
        check_aligned(trajectories, rewards)
        added = overlong_punishment(trajectories.response_tokens.lengths, self.config.max_length, self.config.buffer)
        # A row without a verdict has no reward to add to.
        added = self.config.weight * added.masked_fill(~rewards.valid, 0.0)
        count = max(len(rewards), 1)
        self.context.log(punished_share=float((added < 0).sum()) / count, punishment=float(added.sum()) / count)
        return Outputs(rewards=rewards.replace(value=rewards.value + added))
